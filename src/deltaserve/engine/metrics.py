"""A worker's metrics for Prometheus, on a loopback port of its own."""

import re
from collections.abc import Callable, Iterable, Mapping

import psutil
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


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
    for key, value in values.items():
        match = _SAMPLE.match(key)
        if match is None:
            continue
        name, labels = match["name"], dict(_LABEL.findall(match["labels"] or ""))
        if name not in found:
            found[name] = CounterMetricFamily(name, name) if name.endswith("_total") else GaugeMetricFamily(name, name)
        found[name].add_sample(name, labels, value)
    return list(found.values())


def serve_metrics(port: int, snapshot: Callable[[], Mapping[str, float]]) -> int:
    """Listen on 127.0.0.1:port (0 takes any) in a thread, for the life of the process; returns the port.

    Raises OSError when it is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    return server.server_port
