"""What the control plane and the workers count, on the front's /metrics: one scrape shows pools, leases, tickets and
transfers of all."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaserve.base.metrics import HELP, Sample, read_samples

Stats = Callable[[], Mapping[str, object]]

_OWN = {
    "rooms": "deltaserve_front_rooms",
    "waiting_tokens": "deltaserve_front_waiting_tokens",
    "draining": "deltaserve_front_draining",
    "stale_frames": "deltaserve_front_stale_frames_total",
    "internal_errors": "deltaserve_front_internal_errors_total",
}
"""Number in Engine.stats() |-> metric."""
_FRONT = {"instance": "front", "role": "front"}


class EngineMetrics(Collector):
    """Samples of Engine.stats(): the front's own, and those of each worker's last Status, labelled with `instance` and
    `role`. `_total` names are counters."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for sample in _samples(self._stats()):
            family = families.setdefault(sample.name, _family(sample.name))
            family.add_sample(sample.name, dict(sample.labels), sample.value)
        return families.values()


def _samples(stats: Mapping[str, object]) -> Iterator[Sample]:
    for key, name in _OWN.items():
        if isinstance(value := stats.get(key), bool | int | float):
            yield Sample(name, {}, float(value))
    for event, count in _numbers(stats.get("counts")).items():
        yield Sample("deltaserve_front_events_total", {"event": event}, count)
    yield from _labelled(_numbers(stats.get("links")), _FRONT)
    workers = stats.get("workers")
    for worker in workers if isinstance(workers, list) else []:
        yield from _of_worker(worker)


def _of_worker(worker: Mapping[str, object]) -> Iterator[Sample]:
    labels = {"instance": str(worker["name"]), "role": str(worker["role"])}
    yield Sample("deltaserve_worker_up", labels, float(worker.get("state") == "ready"))
    yield Sample("deltaserve_worker_breaker_open", labels, float(worker.get("breaker") == "open"))
    for key in ("rooms", "resident_keys"):
        if isinstance(value := worker.get(key), int):
            yield Sample(f"deltaserve_worker_{key}", labels, float(value))
    status = worker.get("status")
    if isinstance(status, Mapping):
        yield from _labelled(_numbers(status.get("metrics")), labels)


def _labelled(values: Mapping[str, float], labels: Mapping[str, str]) -> Iterator[Sample]:
    for sample in read_samples(values):
        yield Sample(sample.name, {**labels, **sample.labels}, sample.value)


def _numbers(values: object) -> Mapping[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}


def _family(name: str) -> Metric:
    text = HELP.get(name, "Reported by a worker")
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), text)
    return GaugeMetricFamily(name, text)
