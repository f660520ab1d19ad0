"""What a check has to say."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but not as well as it could, or only in part."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:<5} {self.subject:<13} {self.text}"
