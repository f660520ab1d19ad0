"""Whether pages of an answer are worth their way back to prefill.

    chance of a next turn * tokens / tokens computed per second  >  bytes * seconds per byte

The left side is what prefill would compute again, as far as it can be expected to have to; the right one for how long
the link, and the cores that copy, are taken by what nobody waits for. What it takes to ask and to be answered is no
part of that: nothing waits for it either. A prompt that is offered waits for both, and computes no less for sure.
"""

from dataclasses import dataclass

from deltaserve.control.sched.recent import Recent

_TRIP_S = 0.02
"""A way back that took so long at most says nothing about bytes: its steps wait for turns of both engines."""
_ENOUGH = 4
"""Fewest ways back from which anything is told; before, bytes count as quick."""
_HOPE = 1.1
"""Bytes count as so much quicker with each way back that was not worth it: a link that was slow once is tried again."""
_LEAST_CHANCE = 0.05
"""Where a next turn is less likely the pages only take room from others."""


@dataclass(frozen=True, slots=True)
class WaySize:
    """What is to come: bytes, and the tokens that they are of."""

    num_bytes: int
    num_tokens: int


class BackPrice:
    """What the way back to one prefill worker takes, as measured."""

    def __init__(self) -> None:
        self._trip = Recent(_ENOUGH)
        self._of_byte = Recent(_ENOUGH)
        self._hope = 1.0

    def learn(self, num_bytes: int, seconds: float) -> None:
        """So many bytes, at least one, were granted and landed so long after."""
        self._trip.add(min(seconds, _TRIP_S))
        self._of_byte.add(max(0.0, seconds - _TRIP_S) / num_bytes)
        self._hope = 1.0

    def is_worth(self, size: WaySize, chance: float, tokens_per_s: float) -> bool:
        """Whether to ask for what nobody waits for. `chance`: that a next turn comes. `tokens_per_s`: what this worker
        computes; 0: not known."""
        if chance < _LEAST_CHANCE:
            return False
        of_byte = self._of_byte.quick() or 0.0
        if not tokens_per_s or size.num_bytes * of_byte / self._hope < chance * size.num_tokens / tokens_per_s:
            return True
        self._hope *= _HOPE
        return False

    def is_sooner(self, size: WaySize, tokens_per_s: float) -> bool:
        """Whether what somebody waits for is here before it is computed. What is not known counts as quick, and
        computing as slow."""
        way_s = (self._trip.quick() or 0.0) + size.num_bytes * (self._of_byte.quick() or 0.0)
        return not tokens_per_s or way_s < size.num_tokens / tokens_per_s
