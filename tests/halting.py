"""Processes that stand still while a test does something, so that it comes first however late the test itself is."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tests.patience import PATIENCE_S
from tests.ports import taken
from tests.process.worker.server import wait_until


@contextmanager
def halted(pid: int) -> Iterator[None]:
    """A process stands still while it lasts, from its first line on. It may be ended meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill_wholly(pid: int) -> None:
    """Kill a process, and wait until all its threads have ended and its ports are free.

    A zombie is left where its parent does not look: such a one may still have threads that end, so its state says less.
    """
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        assert ended, f"process {pid} does not end"
    finally:
        os.close(pidfd)


@contextmanager
def losing_its_port(child: int, port: int, supervisor: int) -> Iterator[None]:
    """A child was killed, and while this lasts its port is somebody else's: since before its supervisor saw the end."""
    with ExitStack() as stack:
        with halted(supervisor):
            kill_wholly(child)
            stack.enter_context(taken(port))
        yield
