"""How long single calls take, and the table or JSON of them."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallTimes:
    """One measured operation; times in microseconds."""

    name: str
    p50: float
    p99: float
    samples: int


def timed(name: str, calls: Sequence[Callable[[], object]], before: Callable[[], object] = lambda: None) -> CallTimes:
    """Time each call once, with `before` done each time and not counted; without the cyclic collector."""
    gc.collect()
    gc.disable()
    times = []
    for call in calls:
        before()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    gc.enable()
    times.sort()
    return CallTimes(name, statistics.median(times), times[int(len(times) * 0.99)], len(times))


def print_times(rows: Sequence[CallTimes], memory: Mapping[str, float], summary: str, *, as_json: bool) -> None:
    """`summary`: the line of the table that says what `memory` holds."""
    if as_json:
        times = {row.name: {"p50_us": row.p50, "p99_us": row.p99, "samples": row.samples} for row in rows}
        print(json.dumps({"times": times, "memory": memory}, indent=2))
        return
    print(f"{'operation':<52}{'p50 us':>10}{'p99 us':>10}{'samples':>9}")
    for row in rows:
        print(f"{row.name:<52}{row.p50:>10.1f}{row.p99:>10.1f}{row.samples:>9}")
    print(summary)
