"""The one way time enters the core: as a number handed in."""

from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start, never going back."""

    def now(self) -> float: ...
