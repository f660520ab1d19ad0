"""What a check has to say, and what all of them come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but not as well as it could, or only in part."""
    SKIP = "skip"
    """Not looked at, so nobody knows."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """One finding of a check."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:<5} {self.subject:<13} {self.text}"


def verdict(levels: Sequence[Level]) -> str:
    """The sum of all findings. Nothing is called free of obstacles that was not looked at."""
    failed, skipped = levels.count(Level.FAIL), levels.count(Level.SKIP)
    if skipped:
        return f"{failed} failed, {skipped} not looked at"
    return f"{failed} failed" if failed else "nothing stands in the way"
