"""Whether pages of an answer are worth their way back to prefill.

    chance of a next turn * tokens / tokens computed per second  >  bytes * seconds per byte

The left side is what prefill would compute again, as far as it can be expected to have to; the right one for how long
the link, and the cores that copy, are taken by what nobody waits for. What it takes to ask and to be answered is no
part of that: nothing waits for it either.
"""

from deltaserve.control.sched.recent import Recent

_TRIP_S = 0.02
"""A way back that took so long at most says nothing about bytes: its steps wait for turns of both engines."""
_ENOUGH = 4
"""Fewest ways back from which anything is told; before, bytes count as quick."""
_HOPE = 1.1
"""Bytes count as so much quicker with each way back that was not worth it: a link that was slow once is tried again."""
_LEAST_CHANCE = 0.05
"""Where a next turn is less likely the pages only take room from others."""


class BackPrice:
    """What a byte of the way back takes, as measured, for one prefill worker."""

    def __init__(self) -> None:
        self._of_byte = Recent(_ENOUGH)
        self._hope = 1.0

    def learn(self, num_bytes: int, seconds: float) -> None:
        """So many bytes, at least one, were granted and landed so long after."""
        self._of_byte.add(max(0.0, seconds - _TRIP_S) / num_bytes)
        self._hope = 1.0

    def is_worth(self, num_bytes: int, num_tokens: int, chance: float, tokens_per_s: float) -> bool:
        """Whether to ask for so many bytes, of `num_tokens` that this worker lacks. `chance`: that a next turn comes.
        `tokens_per_s`: what it computes; 0: not known."""
        if chance < _LEAST_CHANCE:
            return False
        of_byte = self._of_byte.quick()
        if of_byte is None or not tokens_per_s or num_bytes * of_byte / self._hope < chance * num_tokens / tokens_per_s:
            return True
        self._hope *= _HOPE
        return False
