"""What a process tells: its log, as text or as JSON, and lines for its user, on stderr or through its supervisor."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, TextIO

import msgspec

from deltaserve.process.children.unblocked import unblocked

Say = Callable[[object], None]


class LogSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process does with its log."""

    level: str = "info"
    format: Literal["text", "json"] = "text"
    is_seen: bool = False
    """The user sees the log itself: no line of it need be told through the supervisor."""


def say(text: object) -> None:
    """A terminal that went away hears nothing; what runs goes on, or drains."""
    with suppress(OSError):
        print(f"deltaserve: {text}\n", end="", file=unblocked(sys.stderr), flush=True)


def say_in_json(name: str, stream: TextIO) -> Say:
    """A `say` for lines that are collected with those of JSON logs."""

    def say_it(text: object) -> None:
        with suppress(OSError):
            line = _as_json(name, time.time(), "info", {"message": str(text)})
            print(f"{line}\n", end="", file=unblocked(stream), flush=True)

    return say_it


def start_log(name: str, spec: LogSpec, tell: Callable[[str], None] | None) -> None:
    """Send the log to stderr, of which a supervisor makes a file; without one it is the user's terminal.

    `tell`: reaches the user of the supervisor, who hears of warnings.
    """
    handler = logging.StreamHandler(unblocked(sys.stderr))
    handler.setFormatter(_formatter(name, spec, tell is None))
    handlers: list[logging.Handler] = [handler]
    if tell is not None and not spec.is_seen:
        handlers.append(ForUser(tell))
    logging.basicConfig(level=spec.level.upper(), handlers=handlers, force=True)


def _formatter(name: str, spec: LogSpec, is_terminal: bool) -> logging.Formatter:
    if spec.format == "json":
        return JsonLines(name)
    if is_terminal:
        return LinesForUser(name)
    return logging.Formatter(f"%(asctime)s {name} %(levelname)s %(threadName)s %(name)s: %(message)s")


class LinesForUser(logging.Formatter):
    """The log of a process without a supervisor, in the words that the user of one would read: as `say` says them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        at = "" if record.levelno == logging.INFO else f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} "
        lines = [f"deltaserve: {self._name}: {at}{record.getMessage()}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """One object a line. What a record has as `fields` (`extra=`) stands there by itself, not as text."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {"logger": record.name, "thread": record.threadName}
        fields = record.__dict__.get("fields")
        told |= {"message": record.getMessage()} if fields is None else {"fields": fields}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return _as_json(self._name, record.created, record.levelname.lower(), told)


def _as_json(name: str, at: float, level: str, told: Mapping[str, object]) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    head = {"time": f"{seconds}.{int(at * 1000) % 1000:03d}Z", "level": level, "process": name}
    return json.dumps({**head, **told}, default=str)


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
        if not 0.0 <= record.created - self._window_began < _WINDOW_S:  # over, or the clock was set back
            self._window_began, self._num_lines = record.created, 0
        self._num_lines += 1
        if self._num_lines <= _LINES_PER_WINDOW:
            at = self._clock.formatTime(record, "%H:%M:%S")
            self._tell(f"{at} {record.levelname} {record.getMessage()}")
        elif self._num_lines == _LINES_PER_WINDOW + 1:
            self._tell("more warnings than fit here: the log has them")
