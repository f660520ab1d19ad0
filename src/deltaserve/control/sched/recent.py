"""What something took lately, told by the quicker times: a few slow ones say nothing of those to come.

A first step may compile, allocate or record for seconds, and so may the first one of each new length. A mean remembers
such a step for long; a low quantile of the last ones does not, unless most of them are slow.
"""

from collections import deque

_KEPT = 32
_ENOUGH = 8
"""Fewest times from which anything is told: before, all of them may have been of the slow kind."""


class Recent:
    """The last times of one kind, in seconds (of a step, of a token: the caller's choice)."""

    def __init__(self, enough: int = _ENOUGH) -> None:
        self._enough = enough
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def quick(self, share: float = 0.25) -> float | None:
        """Time that this share of the last ones took at most, in seconds. None: not enough are known."""
        if len(self._seconds) < self._enough:
            return None
        return sorted(self._seconds)[int(share * (len(self._seconds) - 1))]
