"""One line of the log about what a worker does: requests, memory, and what has happened since the line before."""

from collections.abc import Iterator, Mapping

from deltaserve.core.metrics import read_samples

_GAUGES = {
    "deltaserve_num_running_reqs": "running",
    "deltaserve_num_queue_reqs": "waiting",
    "deltaserve_compute_threads": "compute threads",
    "deltaserve_blocked_need_pages": "pages needed by the first that was refused memory",
}
_EVENTS = {
    "deltaserve_steps_total": "steps",
    "deltaserve_computed_tokens_total": "tokens",
    "deltaserve_pages_evicted_total": "pages evicted",
    "deltaserve_retractions_total": "retractions",
    "deltaserve_admissions_blocked_total": "refusals of memory",
}


class LoadLine:
    """Due once in `every_s` as long as anything is computed or waits."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at = float("-inf")
        self._told: dict[str, float] = {}

    def due(self, metrics: Mapping[str, float], now: float) -> str | None:
        """The line, from an instance's metrics; None when it is too early or nothing has happened."""
        if now - self._told_at < self._every_s:
            return None
        totals = _by_name(metrics)
        has_moved = totals.get("deltaserve_steps_total", 0) > self._told.get("deltaserve_steps_total", 0)
        if not has_moved and not totals.get("deltaserve_num_queue_reqs"):
            return None
        since = {name: totals[name] - self._told.get(name, 0.0) for name in _EVENTS if name in totals}
        self._told_at, self._told = now, totals
        return "; ".join(
            [
                ", ".join(_told(totals, _GAUGES)),
                *_pools(metrics),
                "since the last line " + ", ".join(_told(since, _EVENTS)),
            ]
        )


def _told(values: Mapping[str, float], words: Mapping[str, str]) -> Iterator[str]:
    """The first two always, of the others those that are not zero."""
    always = list(words)[:2]
    for name, text in words.items():
        if name in values and (values[name] or name in always):
            yield f"{values[name]:.0f} {text}"


def _by_name(metrics: Mapping[str, float]) -> dict[str, float]:
    """Each metric's value, summed over labels."""
    totals: dict[str, float] = {}
    for sample in read_samples(metrics):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _pools(metrics: Mapping[str, float]) -> list[str]:
    """`pool 0: 93 % used, 20 free, ...`, without the states that no page is in."""
    usage: dict[str, float] = {}
    pages: dict[str, list[str]] = {}
    for sample in read_samples(metrics):
        pool = sample.labels.get("pool", "")
        if sample.name == "deltaserve_pages_usage":
            usage[pool] = sample.value
        elif sample.name == "deltaserve_pages" and (sample.value or sample.labels["state"] == "free"):
            pages.setdefault(pool, []).append(f"{sample.value:.0f} {sample.labels['state']}")
        elif sample.value and sample.name in ("deltaserve_pages_evictable", "deltaserve_pages_protected"):
            pages.setdefault(pool, []).append(f"{sample.value:.0f} {sample.name.rpartition('_')[2]}")
    return [f"pool {pool}: {share:.0%} used, {', '.join(pages.get(pool, ()))}" for pool, share in usage.items()]
