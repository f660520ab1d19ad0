"""`deltaserve sim exhaustive`: every fault at every moment of a small run, then pairs while time lasts."""

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from deltaserve.commands.simulate.pool import Scripts, run_tasks
from deltaserve.sim.chance import Chance
from deltaserve.sim.exhaustive import PairSweep, Strike, paired_strikes, record, single_strikes
from deltaserve.sim.summary import Summary

_CHUNK = 16
_MAX_SHOWN = 20
_PROGRESS_S = 30.0


def take_apart(num_jobs: int, minutes: float) -> int:
    """Exit code 1 when a run broke an invariant."""
    report, recorder = record()
    if recorder.moments is None or report.breach is not None:
        print(f"the undisturbed run fails: {report.breach}")
        return 1
    print(f"one run: {recorder.moments}", flush=True)
    singles = ((strike,) for strike in single_strikes(recorder.moments))
    started = time.monotonic()
    summary = _run(singles, num_jobs)
    spent_s = time.monotonic() - started
    print(f"single faults: {summary.num_runs} runs, {len(summary.breaches)} breaches, {spent_s:.0f} s", flush=True)
    pairs = _Pairs(list(paired_strikes(recorder.moments)), time.monotonic() + 60 * minutes)
    second = _run(pairs, num_jobs)
    print(f"pairs: {second.num_runs} runs, {pairs.num_merged} more whose second fault met a state met before")
    print(f"       no time for those after {pairs.num_skipped} of {pairs.num_firsts} first faults")
    breaches = summary.breaches + second.breaches
    for strikes, breach in breaches[:_MAX_SHOWN]:
        print(f"{strikes}: {breach}")
    print(f"breaches {len(breaches)}")
    return 1 if breaches else 0


def _run(runs: Iterable[tuple[Strike, ...]], num_jobs: int) -> Summary:
    summary = Summary()
    next_line = time.monotonic() + _PROGRESS_S
    for part in run_tasks(_chunks(runs), num_jobs):
        summary.merge(part)
        if time.monotonic() >= next_line:
            next_line += _PROGRESS_S
            print(f"  {summary.num_runs:,} runs, {len(summary.breaches)} breaches", flush=True)
    return summary


def _chunks(runs: Iterable[tuple[Strike, ...]]) -> Iterator[Scripts]:
    source = iter(runs)
    while chunk := tuple(islice(source, _CHUNK)):
        yield Scripts(chunk)


class _Pairs:
    """Pairs of strikes, made while others run, until the time is over."""

    def __init__(self, firsts: list[Strike], until: float) -> None:
        Chance(1, "pairs").shuffle(firsts)  # what is left out is left out evenly
        self.num_firsts = self.num_skipped = len(firsts)
        self._firsts = firsts
        self._until = until
        self._sweep = PairSweep()

    @property
    def num_merged(self) -> int:
        return self._sweep.num_merged

    def __iter__(self) -> Iterator[tuple[Strike, ...]]:
        for first in self._firsts:
            if time.monotonic() >= self._until:
                return
            self.num_skipped -= 1
            _, recorder = record((first,))
            yield from ((first, second) for second in self._sweep.second_strikes(first, recorder))
