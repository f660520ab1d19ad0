"""Signals that ask a process to end: which they are, and what they do while it starts.

A start that is interrupted ends with one exit code and without a stack, wherever it was.
"""

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, `kill`, and the terminal that goes away, unless `nohup` said that this one does not matter."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def end_silently() -> None:
    """From now on Ctrl-C ends the process at once. For imports, which have nothing to clean up."""
    signal.signal(signal.SIGINT, _leave)


def clean_up_first() -> None:
    """From now on each stop signal raises KeyboardInterrupt, so that `finally` blocks run."""
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
