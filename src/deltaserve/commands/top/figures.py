"""What two looks at a server come to: rates between them, and what is there now."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deltaserve.control.front.known_worker import STATE_WORDS

Series = Mapping[str, float]
"""`name{label="x"}` |-> value."""
_WORDS = {state.value: words for state, words in STATE_WORDS.items()}
_BYTES = "deltaserve_transfer_bytes_landed_total"
_SLOTS = "deltaserve_tier_slots"
_TTFT, _ITL = "deltaserve_time_to_first_token_seconds", "deltaserve_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server."""

    at_s: float
    info: Mapping[str, Any]
    """Content of /server_info."""
    front: Series
    """Series of /metrics, without those of workers."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages of one pool of a worker."""

    used: int
    """In nobody's tree, or under a lease."""
    cached: int
    """In the tree, and evictable."""
    free: int

    @property
    def total(self) -> int:
        return self.used + self.cached + self.free


@dataclass(frozen=True, slots=True)
class FileUse:
    """The file under the cache of a worker."""

    pages: int
    slots: int
    """Pages that it has room for; 0: the worker should have one and cannot."""
    loaded_bytes: float
    """What came back from it, since the start of the worker."""
    failures: int
    """Copies to or from it that failed."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker, now and since the last look."""

    name: str
    role: str
    state: str
    revision: str | None
    """Revision of the model; None: it has not told yet, or the server tells of none."""
    running: int
    waiting: int
    pools: tuple[PoolUse, ...]
    file: FileUse | None
    """None: it has none."""
    tokens_per_s: float | None
    """Tokens computed, of prompts and answers; None at the first look."""
    bytes_per_s: float | None
    """Bytes of pages that came from prefill."""
    evicted_per_s: float | None
    retractions: int
    tickets: int
    quarantined: int
    step_s: float
    """Length of a step without prompts; 0: none was measured."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """All that is shown."""

    model: str
    running: int
    waiting: int
    requests_per_s: float | None
    output_per_s: float | None
    prompt_per_s: float | None
    found_share: float | None
    """Share of the prompt tokens looked for lately, or ever at the first look, that were in a cache."""
    ttft_s: float | None
    """Median, as far as a histogram tells."""
    itl_s: float | None
    moved_bytes: float
    """Bytes of pages, since the start of those workers that are there."""
    found_tokens: float
    """Prompt tokens that decode's caches had, since the start of the front: none of them was moved."""
    workers: tuple[WorkerFigures, ...]


def series_of(text: str) -> Series:
    """Series of a /metrics answer. Raises ValueError for what is none."""
    return {
        f"{sample.name}{_labels(sample.labels)}": float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "instance" not in sample.labels
    }


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}" if inside else ""


def figures(now: Look, before: Look | None) -> ServerFigures:
    """`before`: the look before this one; None: this is the first."""
    seconds = None if before is None else max(1e-9, now.at_s - before.at_s)
    old: Series = {} if before is None else before.front

    def gained(prefix: str) -> float:
        return max(0.0, _sum(now.front, prefix) - _sum(old, prefix))

    def rate(prefix: str) -> float | None:
        return None if seconds is None else gained(prefix) / seconds

    engine = now.info["engine"]
    known = {} if before is None else {worker["name"]: worker for worker in before.info["engine"]["workers"]}
    looked_up = gained("deltaserve_prompt_tokens_looked_up_total")
    workers = tuple(_worker(worker, known.get(worker["name"]), seconds) for worker in engine["workers"])
    return ServerFigures(
        model=str(now.info["served_model_name"]),
        running=int(_sum(now.front, "deltaserve_num_requests_running")),
        waiting=int(_sum(now.front, "deltaserve_num_requests_waiting")),
        requests_per_s=rate("deltaserve_requests_total"),
        output_per_s=rate("deltaserve_generation_tokens_total"),
        prompt_per_s=rate("deltaserve_prompt_tokens_total"),
        found_share=gained("deltaserve_prompt_tokens_found_total") / looked_up if looked_up else None,
        ttft_s=_median(now.front, old, _TTFT),
        itl_s=_median(now.front, old, _ITL),
        moved_bytes=sum(_metrics(worker).get(_BYTES, 0.0) for worker in engine["workers"]),
        found_tokens=_sum(now.front, 'deltaserve_cached_tokens_total{side="decode"}'),
        workers=workers,
    )


def _sum(series: Series, prefix: str) -> float:
    """Sum over all labels."""
    return sum(value for name, value in series.items() if name == prefix or name.startswith(prefix + "{"))


def _median(now: Series, before: Series, name: str) -> float | None:
    """Median of what a histogram gained, evenly spread within its bucket. None: it gained nothing."""
    prefix = f'{name}_bucket{{le="'
    found = [(series.removeprefix(prefix)[:-2], value) for series, value in now.items() if series.startswith(prefix)]
    counts = sorted((float(le), value - before.get(f'{prefix}{le}"}}', 0.0)) for le, value in found)
    half = counts[-1][1] / 2 if counts else 0.0
    low = below = 0.0
    for le, count in counts:
        if half and count >= half:
            return low if math.isinf(le) else low + (le - low) * (half - below) / max(1e-9, count - below)
        low, below = le, count
    return None


def _metrics(worker: Mapping[str, Any]) -> Series:
    status = worker.get("status")
    return {} if status is None else status["metrics"]


def _worker(now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float | None) -> WorkerFigures:
    status, metrics = now.get("status") or {}, _metrics(now)
    old = None if before is None else _metrics(before)

    def rate(prefix: str) -> float | None:
        if seconds is None or not old or not metrics:
            return None
        return max(0.0, _sum(metrics, prefix) - _sum(old, prefix)) / seconds

    return WorkerFigures(
        name=now["name"],
        role=now["role"],
        state="leaving" if now.get("leaving") else "draining" if status.get("draining") else _WORDS[now["state"]],
        revision=now.get("revision"),
        running=status.get("num_running", 0),
        waiting=status.get("num_waiting", 0),
        pools=tuple(_pools(status)),
        file=_file(metrics),
        tokens_per_s=rate("deltaserve_computed_tokens_total"),
        bytes_per_s=rate(_BYTES),
        evicted_per_s=rate("deltaserve_pages_evicted_total"),
        retractions=int(_sum(metrics, "deltaserve_retractions_total")),
        tickets=status.get("open_tickets", 0),
        quarantined=sum(status.get("quarantined_pages", ())),
        step_s=status.get("decode_step_s", 0.0),
    )


def _file(metrics: Series) -> FileUse | None:
    if not any(name.startswith(_SLOTS) for name in metrics):
        return None
    return FileUse(
        pages=int(_sum(metrics, "deltaserve_tier_pages")),
        slots=int(_sum(metrics, _SLOTS)),
        loaded_bytes=_sum(metrics, "deltaserve_tier_bytes_loaded_total"),
        failures=int(_sum(metrics, "deltaserve_tier_failures_total")),
    )


def _pools(status: Mapping[str, Sequence[int]]) -> Iterator[PoolUse]:
    names = ("num_pages", "free_pages", "evictable_pages")
    for total, free, evictable in zip(*(status.get(name, ()) for name in names), strict=True):
        yield PoolUse(used=max(0, total - free - evictable), cached=evictable, free=free)
