"""Warnings of what strangers can cause: few of them, however often it happens."""

import logging
from collections.abc import Callable


class RareLog:
    """Writes at most one warning in a while, and says how many it kept back."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], every_s: float) -> None:
        self._clock = clock
        self._every_s = every_s
        self._logger = logger
        self._next_at: float | None = None
        self._num_kept = 0

    def warn(self, text: str) -> None:
        now = self._clock()
        if self._next_at is not None and now < self._next_at:
            self._num_kept += 1
            return
        self._logger.warning("%s%s", text, f" ({self._num_kept} more like it)" if self._num_kept else "")
        self._next_at, self._num_kept = now + self._every_s, 0
