"""What the workers count, on the front's /metrics: one scrape shows pools, leases, tickets and transfers of all."""

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Stats = Callable[[], Mapping[str, object]]

_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


class WorkerMetrics(Collector):
    """Samples of each worker's last Status, labelled with `instance` and `role`. `_total` names are counters."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, metrics in self._workers():
            for text, value in metrics.items():
                found = _NAME.fullmatch(text)
                if found is None:
                    continue
                labels = {**worker, **dict(_LABEL.findall(found[2] or ""))}
                family = families.setdefault(found[1], _family(found[1]))
                family.add_sample(found[1], labels, value)
        return families.values()

    def _workers(self) -> Iterable[tuple[dict[str, str], Mapping[str, float]]]:
        workers = self._stats().get("workers")
        for worker in workers if isinstance(workers, list) else []:
            status = worker.get("status") or {}
            yield {"instance": str(worker["name"]), "role": str(worker["role"])}, status.get("metrics") or {}


def _family(name: str) -> Metric:
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), "Counted by the workers")
    return GaugeMetricFamily(name, "Reported by the workers")
