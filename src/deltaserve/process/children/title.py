"""The command line that `ps` shows of a process that was forked, not started by one."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOM = " " * 512
"""An argument for a process that will be renamed: the new line is written over its arguments."""
_ARG_START = 45
"""Place in /proc/self/stat behind the name in brackets; the end follows."""


def show_command(argv: Sequence[str]) -> None:
    """Show `argv` where the process's own arguments were, cut to their length. Where /proc does not tell the place,
    they stay."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        room = end - start - 2
        if start and room > 0:
            line = " ".join(argv).encode()[:room]
            # Linux: a last byte that is not zero says that one text, up to the first zero, took the arguments' place.
            ctypes.memmove(start, line.ljust(room + 1, b"\0") + b"\1", room + 2)
