"""What the processes hold, as the kernel sees it: descriptors, threads, resident memory over time."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SAMPLE_S = 1.0
_LAG_PROBE_S = 0.05
_NUM_COUNTS = 20
_COUNT_S = 0.1


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one process."""

    descriptors: int
    threads: int


def counts_of(pid: int) -> Counts:
    return Counts(*(sum(1 for _ in Path(f"/proc/{pid}/{kind}").iterdir()) for kind in ("fd", "task")))


async def settled_counts(pid: int) -> Counts:
    """The fewest of each over a while without requests: a connection just hung up is still open at the other end for a
    moment, what leaked is there all the time."""
    seen = []
    for _ in range(_NUM_COUNTS):
        await asyncio.sleep(_COUNT_S)
        seen.append(counts_of(pid))
    return Counts(min(c.descriptors for c in seen), min(c.threads for c in seen))


@dataclass(slots=True)
class Memory:
    """Resident memory of processes that live through the whole run."""

    pids: Mapping[str, int]
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """(seconds since the first sample, process |-> MiB)"""

    async def watch(self) -> None:
        """Until cancelled."""
        began = time.monotonic()
        while True:
            now = {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in self.pids.items()}
            self.samples.append((time.monotonic() - began, now))
            await asyncio.sleep(_SAMPLE_S)

    def slopes(self, warm_up_s: float) -> dict[str, float]:
        """MiB per minute: the least squares line through all samples after the warm-up."""
        points = [(at_s / 60, values) for at_s, values in self.samples if at_s >= warm_up_s]
        return {name: _slope([(x, values[name]) for x, values in points]) for name in self.pids}

    def last(self) -> dict[str, float]:
        return self.samples[-1][1]


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


@dataclass(slots=True)
class Lag:
    """How late this process itself was: on a busy machine answers seem late that were not."""

    lags: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_PROBE_S)
            late_s = time.monotonic() - before - _LAG_PROBE_S
            if late_s > _LAG_PROBE_S:
                self.lags.append((before, late_s))

    def since(self, began: float) -> float:
        """Seconds lost since then."""
        total = 0.0
        for at, late_s in reversed(self.lags):
            if at < began:
                break
            total += late_s
        return total

    def worst(self) -> float:
        return max((late_s for _, late_s in self.lags), default=0.0)
