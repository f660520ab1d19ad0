"""What the way from one worker to another takes: a trip, and each byte.

Prompts go from prefill to decode: both parts count in the rule of near.py. Answers go back where they are worth it:

    chance of a next turn * tokens / tokens computed per second  >  bytes * seconds per byte

The left side is what prefill would compute again, as far as it can be expected to have to; the right one for how long
the link, and the cores that copy, are taken by what nobody waits for. What it takes to ask and to be answered is no
part of that: nothing waits for it either. A prompt that is offered waits for both, and computes no less for sure.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_TRIP_S = 0.02
"""A way that took so long at most says nothing about bytes: its steps wait for turns of both engines."""
_KEPT = 32
_ENOUGH = 4
"""Fewest ways from which anything is told; before, bytes count as quick."""
_QUICK = 0.25
"""What so much of the ways, or of the bytes, took at most is told: a few slow ones say nothing of those to come."""
_HOPE = 1.1
"""A way counts as so much quicker with each time that it was not taken: a link that was slow once is tried again."""
_OLD_S = 10.0
"""A price that was not measured anew for so long says little of now."""
_LEAST_CHANCE = 0.05
"""Where a next turn is less likely the pages only take room from others."""


@dataclass(frozen=True, slots=True)
class WaySize:
    """What is to come: bytes, and the tokens that they are of."""

    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Way:
    """A way between two workers, in seconds."""

    trip_s: float
    """What it takes whatever is moved."""
    byte_s: float | None
    """What a byte takes besides; None: none was moved yet."""


class WayPrice:
    """What the way to or from one worker takes, as measured."""

    def __init__(self) -> None:
        self._ways: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        """Bytes and seconds of the last ways."""
        self._measured_at = 0.0
        self._hope = 1.0

    def learn(self, num_bytes: int, seconds: float, now: float) -> None:
        """So many bytes took so long."""
        self._ways.append((num_bytes, max(0.0, seconds)))
        self._measured_at = now
        self._hope = 1.0

    def passed_over(self, now: float) -> None:
        """The way was not taken, maybe for its price. Where that is an old one, it is believed less each time."""
        if now - self._measured_at > _OLD_S:
            self._hope *= _HOPE

    @property
    def way(self) -> Way | None:
        """None: too few ways are known."""
        if (measured := self._measured) is None:
            return None
        byte_s = None if measured.byte_s is None else measured.byte_s / self._hope
        return Way(measured.trip_s / self._hope, byte_s)

    @property
    def _measured(self) -> Way | None:
        if len(self._ways) < _ENOUGH:
            return None
        trip_s = _quick((min(seconds, _TRIP_S), 1) for _, seconds in self._ways)
        bytes_s = [(max(0.0, seconds - trip_s) / size, size) for size, seconds in self._ways if size]
        return Way(trip_s, _quick(bytes_s) if bytes_s else None)

    def is_worth(self, size: WaySize, chance: float, tokens_per_s: float) -> bool:
        """Whether to ask for what nobody waits for. `chance`: that a next turn comes. `tokens_per_s`: what this worker
        computes; 0: not known."""
        if chance < _LEAST_CHANCE:
            return False
        way = self.way
        of_byte = 0.0 if way is None else way.byte_s or 0.0
        if not tokens_per_s or size.num_bytes * of_byte < chance * size.num_tokens / tokens_per_s:
            return True
        self._hope *= _HOPE
        return False

    def is_sooner(self, size: WaySize, tokens_per_s: float) -> bool:
        """Whether what somebody waits for is here before it is computed. What is not known counts as quick, and
        computing as slow."""
        way = self._measured
        way_s = 0.0 if way is None else way.trip_s + size.num_bytes * (way.byte_s or 0.0)
        return not tokens_per_s or way_s < size.num_tokens / tokens_per_s


def _quick(weighted: Iterable[tuple[float, int]]) -> float:
    """The value that a quarter of the weight does not exceed. Precondition: there is weight."""
    values = sorted(weighted)
    left = _QUICK * sum(weight for _, weight in values)
    for value, weight in values:
        left -= weight
        if left <= 0.0:
            return value
    return values[-1][0]
