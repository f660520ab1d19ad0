"""When a child that ended is started again, and when it is given up. Times are handed in."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a child is started again; times in seconds."""

    max_restarts: int = 5
    """Most restarts within `window_s`, or without becoming ready in between, however long each start took."""
    window_s: float = 60.0
    first_delay_s: float = 0.2
    """Pause before the first restart; doubles with each restart that counts."""
    max_delay_s: float = 5.0
    start_timeout_s: float = 1800.0
    """Longest time from a start to Ready."""


class GiveUp(Exception):
    """Raised when it is of no use to start the child again. The message is the reason."""


class Restarts:
    """The starts of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._ends: deque[float] = deque()
        """When it ended, of the restarts that count."""
        self._is_ready = False
        self.overdue_at: float | None = None
        """When the present start will have taken too long. None: it is ready, not running, or known to be overdue."""

    def began(self, now: float) -> None:
        """Note that a start began, or that the child can only wait for others: its own time begins when they are
        ready."""
        self._is_ready = False
        self.overdue_at = now + self._policy.start_timeout_s

    def became_ready(self) -> None:
        self._is_ready = True
        self.overdue_at = None

    def take_overdue(self, now: float) -> bool:
        """Whether the start has taken too long; true once."""
        if self.overdue_at is None or now < self.overdue_at:
            return False
        self.overdue_at = None
        return True

    def ended(self, now: float) -> float:
        """How long to wait before the next start, in seconds. Raises GiveUp."""
        policy = self._policy
        self.overdue_at = None
        while self._is_ready and self._ends and now - self._ends[0] > policy.window_s:
            self._ends.popleft()
        if len(self._ends) >= policy.max_restarts:
            within = f"within {policy.window_s:.0f} s" if self._is_ready else "and not ready after the last"
            raise GiveUp(f"{policy.max_restarts} restarts {within}")
        delay_s = min(policy.first_delay_s * 2.0 ** len(self._ends), policy.max_delay_s)
        self._ends.append(now)
        return delay_s
