"""How many threads compute the next steps: all that a worker has while each has a core, fewer while they wait for one.

Threads of a step wait for each other, so one that is ready and has no core holds up all of them. On an idle machine of
two cores a second thread makes a step 1.5 times as fast; where other processes want the cores it makes it slower than
one thread alone. How long threads were ready and did not run is counted by the kernel, and is what this goes by.
"""

from collections.abc import Callable

_WINDOW_S = 0.2
"""Seconds of steps in a window: what is counted in it decides."""
_WAITED_SHARE = 1 / 3
"""Share of a window's steps beyond which half of the threads would do as much."""
_WINDOWS = 2
"""So many in a row say so before the threads are halved. In one of them a burst of the server's own front, or of
another process, is enough, and the pause behind it costs more than the burst did."""
_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
"""Seconds from fewer threads to the next try with more: at first, and at most. Each try that fails doubles them."""


class ThreadPace:
    """How many threads compute one worker's steps; times are seconds of a clock that the caller reads."""

    def __init__(self, most: int, waited_s: Callable[[], float | None], least: int = 1) -> None:
        """`waited_s`: how long the threads that compute have been ready without a core, in all; None: nobody counts it,
        and the number stays what it is."""
        self.num_threads = most
        self._most, self._least = most, least
        self._waited_s = waited_s
        self._busy_s = 0.0
        self._waited_before: float | None = None
        self._num_waiting = 0
        """Windows in a row, the last one included, in which threads waited too long."""
        self._pause_s, self._retry_at = _PAUSE_S, 0.0

    def learn(self, seconds: float, now: float) -> int:
        """After a step that took so long: threads of the next one."""
        self._busy_s += seconds
        if self._most > self._least and (self._waited_before is None or self._busy_s >= _WINDOW_S):
            self._look(now)
        return self.num_threads

    def _look(self, now: float) -> None:
        before, waited = self._waited_before, self._waited_s()
        busy_s, self._busy_s = self._busy_s, 0.0
        self._waited_before = waited
        if waited is None or before is None:
            return
        has_waited = self.num_threads > self._least and (waited - before) / busy_s > _WAITED_SHARE
        self._num_waiting = self._num_waiting + 1 if has_waited else 0
        if self._num_waiting == _WINDOWS:
            self._num_waiting = 0
            self.num_threads = max(self._least, self.num_threads // 2)
            self._retry_at = now + self._pause_s
            self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
        elif self.num_threads < self._most:
            if now >= self._retry_at and not has_waited:
                self.num_threads = min(self._most, 2 * self.num_threads)
        elif not has_waited:
            self._pause_s = max(_PAUSE_S, self._pause_s / 2)
