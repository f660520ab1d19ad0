"""What a process tells its user while it runs: lines on stderr that all begin alike, or through its supervisor."""

import logging
import sys
from collections.abc import Callable
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


_WINDOW_S = 10.0
_LINES_PER_WINDOW = 20


class ForUser(logging.Handler):
    """Warnings and worse of a supervised process, told to its user; the log file has everything, tracebacks too.

    At most 20 lines in 10 s: what a client can cause must not bury what the operator needs to see.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._clock = logging.Formatter()
        self._tell = tell
        self._window_began = float("-inf")
        self._num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created - self._window_began >= _WINDOW_S:
            self._window_began, self._num_lines = record.created, 0
        self._num_lines += 1
        if self._num_lines <= _LINES_PER_WINDOW:
            at = self._clock.formatTime(record, "%H:%M:%S")
            self._tell(f"{at} {record.levelname} {record.getMessage()}")
        elif self._num_lines == _LINES_PER_WINDOW + 1:
            self._tell("more warnings than fit here: the log has them")
