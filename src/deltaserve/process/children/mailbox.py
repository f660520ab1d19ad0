"""How threads and signals reach a loop that blocks in a poll: a queue, and a descriptor that wakes the poll."""

import os
import signal
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

_WAKES = 4096
"""Wakes taken at a time: fewer were all there are."""


class Mailbox(Generic[T]):
    """Any thread (and signal handlers) may `put`; one thread polls `fileno()` and takes."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read_fd

    def put(self, item: T) -> None:
        self._items.append(item)
        with suppress(BlockingIOError):  # full of wakes that were not taken yet: one is enough
            os.write(self._write_fd, b"\0")

    def wake_on_signals(self) -> None:
        """A signal that arrives just before the poll would be noticed only when something else ends it.

        Main thread only. Handlers run in the turn that follows the wake.
        """
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def take_all(self) -> list[T]:
        """Everything put so far, in order."""
        with suppress(BlockingIOError):
            while len(os.read(self._read_fd, _WAKES)) == _WAKES:
                pass
        taken: list[T] = []
        while self._items:
            taken.append(self._items.popleft())
        return taken
