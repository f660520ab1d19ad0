"""A preload process as its supervisor has it: it has loaded what workers need, and is forked for each of them.

A worker that is started as a program spends nearly all of its start loading libraries, and has a copy of its own of
what they allocate then. A forked one begins at once, and shares it.
"""

import ctypes
import errno
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from deltaserve.process.children.child import Child, ChildSpec, Started
from deltaserve.process.children.log_file import Output
from deltaserve.process.children.notices import ForkAnswer, ForkRequest, Ready, ToSupervisor, Welcome, encode_notice

_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_S = 10.0
"""A fork takes milliseconds: after so long the process is stopped, or the machine is."""


class Preload(Child):
    """A running preload process."""

    def __init__(self, spec: ChildSpec, log: Output) -> None:
        """Raises OSError when it cannot be started."""
        super().__init__(spec, log, Welcome(None, ()))
        self.is_ready = False
        """It has loaded everything."""

    def hear(self) -> list[ToSupervisor]:
        """What it has said; it may have become ready."""
        notices = super().hear()
        self.is_ready |= any(isinstance(notice, Ready) for notice in notices)
        return notices

    def fork(self, spec: ChildSpec, output: int, channel: socket.socket) -> Started:
        """Start `spec.argv` by forking the process, which is ready. Raises OSError where it does not answer, or the
        new process is no child of this one (a sandbox may not know of adoption)."""
        request = encode_notice(ForkRequest(spec.argv, spec.env, os.getpid()))
        with _adopting():
            socket.send_fds(self.channel, [request], [output, channel.fileno()])
            if not select.select([self.channel], [], [], _ANSWER_S)[0]:
                raise TimeoutError(errno.ETIMEDOUT, "a preload process does not answer")
            answer = next((notice for notice in self.hear() if isinstance(notice, ForkAnswer)), None)
        if answer is None or answer.pid is None:
            raise OSError(errno.EAGAIN, "a preload process could not be forked")
        return _Adopted(answer.pid)

    def end(self) -> int:
        """Kill it, if it has not ended; its exit code. What it was forked for goes on."""
        self.signal(signal.SIGKILL)
        return self.reap()


class _Adopted:
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when it is no child."""
        self.pid = pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphans below this process; no longer than it needs one, since each must be waited for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
