"""Exit codes, and the one way a broken process ends: its stack logged, at once, without cleaning up.

A thread that died would leave a worker that looks alive and answers nobody. The process ends instead: the supervisor
tells the peers, they fence it, and a new start has a new boot.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn

from deltaserve.process.children.unblocked import unblocked

_log = logging.getLogger(__name__)


class Exit(IntEnum):
    """Exit codes of the processes of a server."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    """The configuration is wrong: starting again would not help."""
    THREAD_DIED = 70
    STUCK = 71
    """The loop made no turn for too long."""
    INTEGRITY = 72
    """`check_integrity` found two counts that disagree; ended after draining."""
    QUARANTINE = 73
    """Too many pages, or some for too long, could neither be used nor freed; ended after draining."""
    RANK_ENDED = 74
    """Another rank of this worker, or another member of its expert group, ended or was out of step with this one: they
    start again together."""


class ProcessOver(Exception):
    """Raised in a thread: the process ends with this code and this reason."""

    def __init__(self, code: Exit, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def how_it_ended(code: int) -> str:
    """How another process ended, in words. `code`: as subprocess has it, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, of which only the first and the last have names
        return f"signal {-code}"


def end_process(code: Exit, reason: str) -> NoReturn:
    """Log the current exception, if there is one, and end without running destructors or waiting for threads."""
    _log.critical("process ends: %s", reason, exc_info=sys.exc_info()[0] is not None)
    leave(code)


def end_stuck(reason: str) -> NoReturn:
    """Something makes no progress: show where every thread is, and end."""
    if sys.stderr is not None:
        with suppress(OSError):  # no descriptor is left, or nobody reads any more
            print(_stacks(), end="", file=unblocked(sys.stderr), flush=True)
    end_process(Exit.STUCK, reason)


def _stacks() -> str:
    """Where every thread is. Raises OSError.

    By way of memory: the dump holds the interpreter while it writes, to a pipe that nobody reads for ever.
    """
    with open(os.memfd_create("stacks"), "r+b", buffering=0) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def leave(code: Exit) -> NoReturn:
    """End now. Native libraries with threads of their own may crash in an interpreter's orderly exit."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is where the process was started with a closed descriptor
            with suppress(OSError):  # a full disk
                stream.flush()
    os._exit(code)


def start_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """Run `body` in a thread whose exceptions end the process."""

    def run() -> None:
        try:
            body()
        except ProcessOver as over:
            end_process(over.code, str(over))
        except BaseException:
            end_process(Exit.THREAD_DIED, f"thread {name} died")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


_END_CHECKS = 60
"""Seconds that one part of a process's end may take: half a minute beyond the longest time that any of them gives
itself, and as long as a kernel may need to free what a rank had pinned. Nothing that is of use later is done then."""


class Watchdog:
    """Ends the process when nobody calls `alive` for `limit` checks, one a second; and when it does not end, once it is
    to. It goes on until the process has left.

    It counts checks instead of reading a clock: a process that was stopped and goes on is not stuck.
    """

    def __init__(self, limit: int) -> None:
        self._beats = 0
        self._expected = limit, "the loop made no turn"
        start_thread("watchdog", self._run)

    def alive(self) -> None:
        self._beats += 1

    def ends(self, part: str) -> None:
        """The loop is over. This part of the process's end begins, and the one before is over."""
        self.alive()
        self._expected = _END_CHECKS, f"the process did not end, {part} went on"

    def _run(self) -> None:
        last, missed = self._beats, 0
        while True:
            time.sleep(1.0)
            limit, words = self._expected  # read before the beats, which are counted before it is written
            missed = missed + 1 if self._beats == last else 0
            last = self._beats
            if missed >= limit:
                end_stuck(f"{words} for {missed} s")
