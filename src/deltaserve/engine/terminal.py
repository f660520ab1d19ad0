"""What a process tells its user while it runs: lines on stderr that all begin alike."""

import logging
import sys
from contextlib import suppress


def say(text: object) -> None:
    """A terminal that went away hears nothing; what runs goes on, or drains."""
    with suppress(OSError):
        print(f"deltaserve: {text}", file=sys.stderr, flush=True)


class LinesForUser(logging.Formatter):
    """The log of a process without a supervisor: its ordinary course reads as what `say` says, the rest as a log."""

    def __init__(self, name: str, form: str) -> None:
        super().__init__(form)
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno != logging.INFO:
            return super().format(record)
        return f"deltaserve: {self._name}: {record.getMessage()}"
