"""One child process of the supervisor: how it is started, watched by descriptor, heard, signalled and told."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import msgspec

from deltaserve.link.notices import (
    MAX_NOTICE_BYTES,
    PARENT_VARIABLE,
    ToChild,
    ToSupervisor,
    decode_from_child,
    encode_notice,
)

_TAIL_BYTES = 4096


class Kind(IntEnum):
    """What a child is; children drain in this order."""

    FRONT = 0
    DECODE = 1
    """Also a unified worker."""
    PREFILL = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running. It must call `Parent.attach()` first of all, and `ready` when it serves."""

    name: str
    """Its instance name; also that of its log file."""
    argv: tuple[str, ...]
    kind: Kind
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""


class Child:
    """A started process. Its stdout and stderr are appended to `log_path`."""

    def __init__(self, spec: ChildSpec, log_path: Path, welcome: ToChild) -> None:
        """Raises OSError when the program cannot be started."""
        self.spec = spec
        self._log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_mute = False
        self._channel = ours
        ours.setblocking(False)
        self.tell(welcome)
        try:
            self._process = self._start(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)

    def _start(self, channel: socket.socket) -> "subprocess.Popen[bytes]":
        env = {**os.environ, **self.spec.env, PARENT_VARIABLE: f"{channel.fileno()}:{os.getpid()}"}
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as log:
            return subprocess.Popen(
                self.spec.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(channel.fileno(),),
                start_new_session=True,  # a terminal's interrupt reaches the supervisor alone, which drains in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pidfd(self) -> int:
        """Readable when the process has ended."""
        return self._pidfd

    @property
    def channel_fd(self) -> int:
        """Readable when the child has said something, and for ever once it has closed its end."""
        return self._channel.fileno()

    def tell(self, notice: ToChild) -> None:
        """Never blocks. A child that does not read loses notices, not the others."""
        with suppress(BlockingIOError, ConnectionError):
            self._channel.send(encode_notice(notice))

    def hear(self) -> list[ToSupervisor]:
        """What the child has said and was not heard yet. Sets `is_mute` when it has closed its end."""
        notices: list[ToSupervisor] = []
        while not self.is_mute:
            try:
                data = self._channel.recv(MAX_NOTICE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended without reading all it was told; what it said follows
                continue
            self.is_mute = not data
            with suppress(msgspec.DecodeError):
                notices += [decode_from_child(data)] if data else []
        return notices

    def signal(self, number: signal.Signals) -> None:
        """To this very process: through its descriptor, so never to another one with a reused id."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def reap(self) -> int:
        """Exit code of an ended process (negative: the signal), which is gone for the kernel afterwards."""
        code = self._process.wait()
        os.close(self._pidfd)
        self._channel.close()
        return code

    def rotate_log(self, max_bytes: int) -> None:
        """Move what was written to `<log>.1` when it is more than `max_bytes`. The child goes on with its descriptor.

        Lines written between copy and cut are lost: a log may be, a full disk may not.
        """
        if self._log_path.stat().st_size <= max_bytes:
            return
        kept = self._log_path.with_name(self._log_path.name + ".1")
        kept.touch(mode=0o600)
        shutil.copyfile(self._log_path, kept)
        os.truncate(self._log_path, 0)
        self._log_start = 0

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines this start wrote."""
        with open(self._log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
