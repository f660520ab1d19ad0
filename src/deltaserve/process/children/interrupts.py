"""Signals that ask a process to end: which they are, and what they do while it starts.

A start that is interrupted ends with one exit code and without a stack, wherever it was.
"""

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, `kill`, and the terminal that goes away, unless `nohup` said that this one does not matter."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def end_silently() -> None:
    """Let each stop signal end the process at once from now on. For imports, which have nothing to clean up.

    SIGTERM too: the first process of a container has no default action for it, and would only end when it is killed.
    """
    for number in stop_signals():
        signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


def clean_up_first() -> None:
    """Let each stop signal raise KeyboardInterrupt from now on, so that `finally` blocks run."""
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)


def hold_for_successor() -> None:
    """Stop signals wait until the program that replaces this one calls `end_silently`: an exec forgets handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
