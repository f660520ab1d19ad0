"""Whether a worker's own reports say that it is well: pages come back from quarantine, and work goes forward."""

from dataclasses import dataclass

from deltaserve.control.cache.pages import is_crowded
from deltaserve.core.wire.messages import Status

NO_PROGRESS_S = 10.0
COLD_STEPS = 64
COLD_NO_PROGRESS_S = 120.0
"""While a worker has made few steps: any of them may be the first of its length, which compiles or allocates."""
QUARANTINE_PATIENCE_S = 2.0
"""Many clients that leave at once put many pages into quarantine until their writers have answered: tens of
milliseconds. Only what lasts longer than an answer may take is a reason to send nobody there."""
_SLOWER = 3.0
"""A step may take so many times as long as the slowest one so far before it counts as stuck."""
_STEPS = "deltaserve_steps_total"


@dataclass(slots=True)
class Wellness:
    """One worker's, from its start on."""

    _num_steps: float | None = None
    _since: float = 0.0
    """When a step ended last, or there was nothing to compute."""
    _crowded_since: float | None = None
    """When every report began to have too much of a pool in quarantine; None: the last one had not."""
    _slowest_s: float = 0.0

    def hear(self, status: Status, now: float) -> str | None:
        """Take a report; why the worker should get no requests, or None."""
        stuck, crowded = self._stuck(status, now), _crowded(status)
        if crowded is None:
            self._crowded_since = None
        elif self._crowded_since is None:
            self._crowded_since = now
        elif now - self._crowded_since >= QUARANTINE_PATIENCE_S:
            return crowded
        return stuck

    def _stuck(self, status: Status, now: float) -> str | None:
        num_steps, waited_s = status.metrics.get(_STEPS), now - self._since
        if num_steps is None or num_steps != self._num_steps or not status.num_running:
            if self._num_steps is not None:
                self._slowest_s = max(self._slowest_s, waited_s)
            self._num_steps, self._since = num_steps, now
            return None
        patience_s = COLD_NO_PROGRESS_S if num_steps < COLD_STEPS else NO_PROGRESS_S
        if waited_s < max(patience_s, _SLOWER * self._slowest_s):
            return None
        return f"no step ended for {waited_s:.0f} s, {status.num_running} requests are running"


def _crowded(status: Status) -> str | None:
    for quarantined, total in zip(status.quarantined_pages, status.num_pages, strict=False):
        if is_crowded(quarantined, total):
            return f"{quarantined} of {total} pages in quarantine"
    return None
