"""What the processes hold, as the kernel sees it: descriptors, threads, resident memory over time."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from tests.patience import PATIENCE_S

_SAMPLE_S = 1.0
_LAG_PROBE_S = 0.05
_NUM_COUNTS = 20
_COUNT_S = 0.1
_NUM_SPANS = 6


@dataclass(frozen=True, slots=True)
class Counts:
    """What one process has open."""

    descriptors: int
    threads: int
    files: tuple[str, ...] = field(default=(), compare=False)
    """What the descriptors are, for a failure's reader."""

    def __str__(self) -> str:
        return f"{self.descriptors}/{self.threads}"


def counts_of(pid: int) -> Counts:
    files = tuple(sorted(_files_of(pid)))
    return Counts(len(files), sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()), files)


def _files_of(pid: int) -> Iterator[str]:
    """Sockets by their addresses and state."""
    sockets = {s.fd: f"{s.laddr} -> {s.raddr} {s.status}" for s in psutil.Process(pid).net_connections(kind="all")}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield sockets.get(int(path.name)) or str(path.readlink()).split(":[")[0]


async def counts_again(pid: int, before: Counts) -> Counts:
    """As soon as they are those of before, or when that takes too long: a worker that took up another role keeps the
    links of the former one for 60 heartbeats, to tell its end."""
    deadline = time.monotonic() + PATIENCE_S
    while (after := await settled_counts(pid)) != before and time.monotonic() < deadline:
        pass
    return after


async def settled_counts(pid: int) -> Counts:
    """The fewest of each over a while without requests: a connection just hung up is still open at the other end for a
    moment, what leaked is there all the time."""
    seen = []
    for _ in range(_NUM_COUNTS):
        await asyncio.sleep(_COUNT_S)
        seen.append(counts_of(pid))
    fewest = min(seen, key=lambda counts: counts.descriptors)
    return replace(fewest, threads=min(c.threads for c in seen))


def difference(before: Counts, after: Counts) -> str:
    """Which files came and went."""
    gone, come = Counter(before.files) - Counter(after.files), Counter(after.files) - Counter(before.files)
    return "\n".join(
        (*(f"- {n} x {file}" for file, n in gone.items()), *(f"+ {n} x {file}" for file, n in come.items()))
    )


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of the least that is resident. A leak raises it in every span; a first matrix product of a new shape, or
    one more arena, is a single step, which a line through all samples would take for a leak when the run is short.

    What is resident now and then is no matter: frames that wait for a peer which is held, 8 MiB for ten seconds, and
    cycles of objects that wait for Python's collector. Their levels by medians of ten seconds grew by 12 MiB a minute
    in one storm of three minutes; those of a longer one of the same seed came back each time.
    """

    mib_per_min: float
    """The median over the spans."""
    mib: float
    """From the first span to the last."""


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

    def growth(self, warm_up_s: float) -> dict[str, Growth]:
        """Growth of every process after the warm-up: least samples around the ends of each of `_NUM_SPANS` spans."""
        points = [(at_s, values) for at_s, values in self.samples if at_s >= warm_up_s]
        span_s = (points[-1][0] - points[0][0]) / _NUM_SPANS
        return {name: _growth([(x, values[name]) for x, values in points], span_s) for name in self.pids}

    def last(self) -> dict[str, float]:
        return self.samples[-1][1]


def _growth(points: list[tuple[float, float]], span_s: float) -> Growth:
    first_s = points[0][0]
    levels = [
        min(mib for at_s, mib in points if abs(at_s - first_s - edge * span_s) <= span_s / 2)
        for edge in range(_NUM_SPANS + 1)
    ]
    return Growth(median(b - a for a, b in pairwise(levels)) / span_s * 60, levels[-1] - levels[0])


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
