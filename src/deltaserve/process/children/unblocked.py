"""Output that nobody may be reading: a pipe whose reader stands still, or a terminal that Ctrl-S stopped.

A write to one that is full waits for its reader, and with it the event loop or the supervisor that wrote a line: no
request is answered and no worker started again. So lines that are not taken at once are lost, and counted.
"""

import os
import select
import stat
from functools import cache
from io import TextIOBase
from typing import TextIO

_PIECE_BYTES = select.PIPE_BUF
"""A pipe that can be written to has room for so much."""


def unblocked(stream: TextIO) -> TextIO:
    """`stream`, but that a write never waits. A file is written to as it is: it has no reader."""
    try:
        descriptor = stream.fileno()
        found = os.fstat(descriptor)
    except (OSError, ValueError):  # closed, or in memory
        return stream
    if stat.S_ISREG(found.st_mode):
        return stream
    return _opened(descriptor, found.st_dev, found.st_ino)


@cache
def _opened(descriptor: int, _device: int, _inode: int) -> TextIO:
    return _Unblocked(descriptor)  # type: ignore[return-value]  # what print and logging use of it


class _Unblocked(TextIOBase):
    """Writes to what a descriptor stands for."""

    def __init__(self, descriptor: int) -> None:
        self._own = _open_again(descriptor)
        self._shared = descriptor
        self._num_lost = 0

    def write(self, text: str) -> int:
        """Raises OSError when nobody can read any more."""
        told = f"({self._num_lost} lines were lost here: nobody read them)\n" if self._num_lost else ""
        if self._send((told + text).encode(errors="backslashreplace")):
            self._num_lost = 0
        else:
            self._num_lost += max(1, text.count("\n"))
        return len(text)

    def _send(self, data: bytes) -> bool:
        """Whether all of it was taken. Of a long text a part may be."""
        while data:
            try:
                data = data[self._send_piece(data[:_PIECE_BYTES]) :]
            except BlockingIOError:
                return False
        return True

    def _send_piece(self, data: bytes) -> int:
        if self._own is not None:
            return os.write(self._own, data)
        if not select.select([], [self._shared], [], 0.0)[1]:
            raise BlockingIOError
        return os.write(self._shared, data)


def _open_again(descriptor: int) -> int | None:
    """A descriptor of this process alone that does not wait: the flag on the one that is there would be everybody's who
    shares it, a shell's for one. None: it cannot be opened (a socket, or another user's)."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
