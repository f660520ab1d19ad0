"""Calls that take turns, so that other load on the machine falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of each call in each round, in CPU time of the process."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> tuple[float, ...]:
        """Median of each call."""
        return tuple(statistics.median(taken) for taken in zip(*self.rounds, strict=True))

    def ratio(self, top: Sequence[int], bottom: Sequence[int]) -> "Ratio":
        """Ratio of the sums of some calls."""
        found = [(sum(times[i] for i in top), sum(times[i] for i in bottom)) for times in self.rounds]
        least = [sum(min(times[i] for times in self.rounds) for i in calls) for calls in (top, bottom)]
        return Ratio(statistics.median(a / b for a, b in found), least[0] / least[1])


@dataclass(frozen=True, slots=True)
class Ratio:
    median: float
    """Median of the ratios of each round."""
    of_minima: float
    """Other load only ever adds: of the best time of each call."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.of_minima:.2f})"


def take_turns(calls: Sequence[Callable[[], object]], num_rounds: int) -> Times:
    """After one round that does not count."""
    rounds = []
    for _ in range(num_rounds + 1):
        taken = []
        for call in calls:
            start = time.process_time()
            call()
            taken.append((time.process_time() - start) * 1e3)
        rounds.append(tuple(taken))
    return Times(tuple(rounds[1:]))
