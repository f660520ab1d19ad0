"""Many runs in one table: how many, what went wrong, which cells and situations they went through."""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec

from deltaserve.control.cache.pages import PAGE_TRANSITIONS
from deltaserve.control.transfer.tables import RECEIVER, SENDER, SENDER_UNREACHABLE, STAGED_LEASE, STAGED_WRITE
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.rig import Report
from deltaserve.sim.situations import RUNS_PER_RATE, Situation

RUNS_PER_GATE = 100_000
MIN_CELL_HITS = 100
"""Least hits of every reachable cell in `RUNS_PER_GATE` runs."""
MIN_INJECTIONS = 1_000
"""Least injections of every fault kind in `RUNS_PER_GATE` runs."""


class Summary(msgspec.Struct):
    """What a set of runs came to. Sums of summaries are summaries; they travel between processes as JSON."""

    num_runs: int = 0
    num_events: int = 0
    num_requests: int = 0
    num_answered: int = 0
    num_repeated: int = 0
    """Seeds run twice, to compare their traces (I21)."""
    breaches: list[tuple[str, str]] = []
    """Breaches as (run, what broke)."""
    faults: dict[str, int] = {}
    """Fault kind |-> how often it was injected."""
    cells: dict[str, int] = {}
    """`cell_name` |-> pages, tickets or staged writes moved."""
    situations: dict[str, int] = {}
    """Name of a `Situation` |-> runs that had it."""
    turns: dict[str, int] = {}
    """One of `TURN_SIZES` |-> turns of workers that dealt with so many events."""

    def add(self, report: Report) -> None:
        self.num_runs += 1
        self.num_events += report.num_events
        self.num_requests += report.num_requests
        self.num_answered += report.num_answered
        _count(self.faults, ((kind.value, n) for kind, n in report.faults.items()))
        for moves in (report.page_moves, report.ticket_moves):
            _count(self.cells, ((cell_name(*cell), n) for cell, n in moves.items()))
        _count(self.situations, ((situation.name, 1) for situation in report.situations))
        _count(self.turns, ((turn_size(num_events), n) for num_events, n in report.turns.items()))
        if report.breach is not None:
            self.breaches.append((f"seed {report.seed}", report.breach))

    def compare(self, first: Report, again: Report) -> None:
        """I21: the same seed, the same trace."""
        self.num_repeated += 1
        if first.digest != again.digest:
            self.breaches.append((f"seed {first.seed}", f"I21: traces {first.digest} and {again.digest} of one seed"))

    def merge(self, other: "Summary") -> None:
        self.num_runs += other.num_runs
        self.num_events += other.num_events
        self.num_requests += other.num_requests
        self.num_answered += other.num_answered
        self.num_repeated += other.num_repeated
        self.breaches += other.breaches
        _count(self.faults, other.faults.items())
        _count(self.cells, other.cells.items())
        _count(self.situations, other.situations.items())
        _count(self.turns, other.turns.items())

    def lines(self) -> Iterator[str]:
        """The lines of the table that people read."""
        yield f"runs {self.num_runs:,}, events {self.num_events:,}, {self.num_events / max(1, self.num_runs):.0f} a run"
        yield f"requests {self.num_requests:,}, answered in full {self.num_answered:,}, the others with an error"
        yield f"seeds run twice {self.num_repeated:,}"
        yield "turns of workers by events: " + ", ".join(f"{size}: {self.turns.get(size, 0):,}" for size in TURN_SIZES)
        yield "injected faults"
        yield from (f"  {kind.value:22} {self.faults.get(kind.value, 0):>12,}" for kind in FaultKind)
        yield "cells of the transition tables: pages moved, ticket and staging moves"
        for name in CELLS:
            note = " (unreachable)" if name in UNREACHABLE else ""
            yield f"  {name:34} {self.cells.get(name, 0):>12,}{note}"
        yield f"situations: runs that had them, and the least number of {RUNS_PER_RATE:,}"
        for situation in Situation:
            number = self.situations.get(situation.name, 0)
            yield f"  {situation.words:66} {number:>8,} {situation.least:>8,}"
        yield f"breaches {len(self.breaches)}"
        yield from (f"  {run}: {breach}" for run, breach in self.breaches[:20])

    def gaps(self) -> list[str]:
        """What these runs did not show: cells and faults hit too rarely for their number, unreachable cells hit."""
        share = self.num_runs / RUNS_PER_GATE
        found = []
        for name in CELLS:
            hits = self.cells.get(name, 0)
            if name in UNREACHABLE and hits:
                found.append(f"{name} is marked unreachable and was hit {hits} times")
            if name not in UNREACHABLE and hits < MIN_CELL_HITS * share:
                found.append(f"{name}: {hits} hits in {self.num_runs} runs")
        for kind in FaultKind:
            hits = self.faults.get(kind.value, 0)
            if hits < MIN_INJECTIONS * share:
                found.append(f"{kind.value}: {hits} injections in {self.num_runs} runs")
        for situation in Situation:
            hits = self.situations.get(situation.name, 0)
            if hits < situation.least * self.num_runs // RUNS_PER_RATE:
                found.append(f"{situation.words}: {hits} of {self.num_runs} runs")
        return found


TURN_SIZES = ("none", "1", "2", "3-5", "more")
"""Events of one turn. One without any is due by its timer."""


def turn_size(num_events: int) -> str:
    return TURN_SIZES[min(num_events, 3)] if num_events <= 5 else TURN_SIZES[-1]


def _count(into: dict[str, int], items: Iterable[tuple[str, int]]) -> None:
    for name, number in items:
        into[name] = into.get(name, 0) + number


def cell_name(state: Enum, event: Enum) -> str:
    """Name of a cell in tables, such as `receiver open x revoke`."""
    return f"{type(state).__name__.removesuffix('State').lower()} {state.name.lower()} x {event.name.lower()}"


def _names(table: Mapping[Any, Mapping[Any, Any]]) -> list[str]:
    return [cell_name(state, event) for state, events in table.items() for event in events]


CELLS = tuple(
    name for table in (PAGE_TRANSITIONS, RECEIVER, SENDER, STAGED_WRITE, STAGED_LEASE) for name in _names(table)
)
"""Every legal (state, event) of pages, tickets and staged writes."""
UNREACHABLE = frozenset(cell_name(state, event) for state, event in SENDER_UNREACHABLE)
