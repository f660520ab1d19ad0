"""One child process of the supervisor: how it is started, watched by descriptor, heard, signalled and told."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec

from deltaserve.process.children.log_file import Output
from deltaserve.process.children.notices import (
    PARENT_VARIABLE,
    ToChild,
    ToSupervisor,
    decode_from_child,
    encode_notice,
    messages,
)


class Kind(IntEnum):
    """What a child is; children drain in this order."""

    FRONT = 0
    DECODE = 1
    """A decode worker, or a unified one."""
    PREFILL = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running. It must call `Parent.attach()` first of all, and `ready` when it serves."""

    name: str
    """Instance name; also that of its log file."""
    argv: tuple[str, ...]
    kind: Kind
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    files: tuple[Path, ...] = ()
    """What it reads when it starts. Written by whoever made this; the supervisor restores what is removed."""
    group: str | None = None
    """Children of one group are of no use without each other: when one ends all do, and they start again together."""
    may_be_forked: bool = False
    """Whether a preload process can be forked in place of starting `argv`."""


class Started(Protocol):
    """A process that has this one as its parent. `wait`: its exit code, negative for a signal."""

    pid: int

    def wait(self) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[ChildSpec, int, socket.socket], Started]
"""(spec, descriptor of its output, its end of the channel) -> the process. Raises OSError."""


def start_program(spec: ChildSpec, output: int, channel: socket.socket) -> Started:
    """Start the program `spec.argv`."""
    return subprocess.Popen(
        spec.argv,
        env={**os.environ, **spec.env, PARENT_VARIABLE: f"{channel.fileno()}:{os.getpid()}"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(channel.fileno(),),
        start_new_session=True,  # a terminal's interrupt reaches the supervisor alone, which drains in order
    )


class Child:
    """A started process. Its stdout and stderr are appended to `log`, which is closed with it."""

    def __init__(self, spec: ChildSpec, log: Output, welcome: ToChild, start: Start = start_program) -> None:
        """Raises OSError when the program cannot be started, or not be watched; then there is no process."""
        self.spec = spec
        self._log = log
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            log.close()
            raise
        self.is_mute = False
        self._channel = ours
        ours.setblocking(False)
        self.tell(welcome)
        try:
            self._process = start(spec, log.fileno(), theirs)
            self._pidfd = self._watch()
        except OSError:
            ours.close()
            log.close()
            raise
        finally:
            theirs.close()

    def _watch(self) -> int:
        """A descriptor of the process. Some sandboxes and old kernels have none: then it must not go on unseen."""
        try:
            return os.pidfd_open(self._process.pid)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            raise OSError(error.errno, f"pidfd_open: {error.strerror}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pidfd(self) -> int:
        """Readable when the process has ended."""
        return self._pidfd

    @property
    def channel(self) -> socket.socket:
        """This end of it, which does not block."""
        return self._channel

    @property
    def channel_fd(self) -> int:
        """Readable when the child has said something, and for ever once it has closed its end."""
        return self._channel.fileno()

    def tell(self, notice: ToChild) -> None:
        """Tell the child, without blocking: one that does not read loses notices, not the others."""
        with suppress(BlockingIOError, ConnectionError):
            self._channel.send(encode_notice(notice))

    def hear(self) -> list[ToSupervisor]:
        """What the child has said and was not heard yet. Sets `is_mute` when it has closed its end."""
        notices: list[ToSupervisor] = []
        for data in () if self.is_mute else messages(self._channel):
            self.is_mute = not data
            with suppress(msgspec.DecodeError):
                notices += [decode_from_child(data)] if data else []
        return notices

    def signal(self, number: signal.Signals) -> None:
        """Signal this very process: through its descriptor, so never another one with a reused id."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: it neither works nor ends."""
        try:
            return os.waitid(os.P_PIDFD, self._pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has ended, and nobody has looked at that yet
            return False

    def has_ended(self) -> bool:
        """Whether the process has ended. It stays a zombie until it is reaped."""
        return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Exit code of an ended process (negative: the signal), which is gone for the kernel afterwards."""
        code = self._process.wait()
        os.close(self._pidfd)
        self._channel.close()
        self._log.close()
        return code

    @property
    def log(self) -> Output:
        return self._log
