"""A worker's metrics for Prometheus, on a loopback port of its own."""

from collections.abc import Callable, Iterable, Mapping

import psutil
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaserve.base.metrics import HELP, read_samples


class SnapshotCollector(Collector):
    """Reads the loop's last snapshot and the facts of this process."""

    def __init__(self, snapshot: Callable[[], Mapping[str, float]]) -> None:
        self._snapshot = snapshot
        self._process = psutil.Process()

    def collect(self) -> Iterable[Metric]:
        return families({**self._snapshot(), **self._process_facts()})

    def _process_facts(self) -> dict[str, float]:
        process = self._process
        with process.oneshot():
            times = process.cpu_times()
            return {
                "process_resident_memory_bytes": float(process.memory_info().rss),
                "process_cpu_seconds_total": times.user + times.system,
                "process_threads": float(process.num_threads()),
                "process_open_fds": float(process.num_fds()),
            }


def families(values: Mapping[str, float]) -> list[Metric]:
    """Group `name` and `name{label="x"}` by name; what ends in _total is a counter, everything else a gauge."""
    found: dict[str, Metric] = {}
    for sample in read_samples(values):
        name, text = sample.name, HELP.get(sample.name, sample.name)
        if name not in found:
            found[name] = CounterMetricFamily(name, text) if name.endswith("_total") else GaugeMetricFamily(name, text)
        found[name].add_sample(name, dict(sample.labels), sample.value)
    return list(found.values())


def serve_metrics(port: int, snapshot: Callable[[], Mapping[str, float]]) -> int:
    """Listen on 127.0.0.1:port (0 takes any) in a thread, for the life of the process; returns the port.

    Raises OSError when it is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    return server.server_port
