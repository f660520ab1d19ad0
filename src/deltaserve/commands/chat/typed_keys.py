"""The keys of a terminal: who sees them while nobody reads, and how signals are heard while somebody does."""

import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LOCAL_FLAGS = 3
"""Place of these in what tcgetattr returns."""
_LOOK_S = 0.1


class TypedKeys:
    """Not shown between two messages, where they would stand amid an answer; kept for the next message, unchanged."""

    def __init__(self, terminal: int) -> None:
        """A file descriptor. As it is now it is while a message is typed."""
        self._terminal = terminal
        self._shown = termios.tcgetattr(terminal)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Keys make signals as always. They are not read in lines: Ctrl-D and a deleted character would be lost."""
        hidden = termios.tcgetattr(self._terminal)
        hidden[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
        with self._set(hidden):
            yield

    @contextmanager
    def seen(self) -> Iterator[None]:
        """A block in which the keys are read: readline shows nothing on a terminal that would not."""
        with self._set(self._shown), _signals_heard():
            yield

    @contextmanager
    def _set(self, attributes: "termios._AttrReturn") -> Iterator[None]:
        before = termios.tcgetattr(self._terminal)
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, attributes)  # which throws no key away
        try:
            yield
        finally:
            with suppress(termios.error):  # the terminal is gone: its end is the reason why this block ends
                termios.tcsetattr(self._terminal, termios.TCSADRAIN, before)


@contextmanager
def _signals_heard() -> Iterator[None]:
    """Signals end input() at once, or nearly so.

    CPython looks for signals when one interrupts readline's wait for a key. One that comes shortly before that wait,
    while the prompt is shown or a key is taken in, would be heard with the next key only; so the wait is interrupted
    every tenth of a second.
    """
    before = signal.signal(signal.SIGALRM, _go_on)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _go_on(number: int, frame: FrameType | None) -> None:
    return
