"""A child's end of the supervisor's channel. Every process the supervisor starts attaches first of all."""

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from deltaserve.core.errors import ConfigError, one_line
from deltaserve.process.children.exits import Exit, ProcessOver, end_process, leave
from deltaserve.process.children.notices import (
    MAX_NOTICE_BYTES,
    PARENT_VARIABLE,
    Progress,
    Ready,
    Rebooted,
    Refused,
    ToChild,
    ToSupervisor,
    Welcome,
    decode_from_supervisor,
    encode_notice,
    messages,
)
from deltaserve.process.children.terminal import say

_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 2000


class Parent:
    """The supervisor, seen from a child. Not blocking after `attach`; poll `fileno()` for reading.

    From `attach` on the kernel kills this process when the supervisor ends.
    """

    def __init__(self, channel: socket.socket, welcome: Welcome) -> None:
        self.welcome = welcome
        self.is_gone = False
        """The supervisor closed its end or ended."""
        self._channel = channel

    @classmethod
    def attach(cls) -> "Parent | None":
        """The channel to the supervisor; None when nobody supervises this process. Call it once, from the main thread.

        Raises ConfigError when the supervisor is gone already.
        """
        variable = os.environ.pop(PARENT_VARIABLE, None)
        if variable is None:
            return None
        descriptor, _, parent_id = variable.partition(":")
        die_with_parent(signal.SIGKILL)
        channel = socket.socket(fileno=int(descriptor))
        os.set_inheritable(channel.fileno(), False)
        first = channel.recv(MAX_NOTICE_BYTES)
        welcome = decode_from_supervisor(first) if first else None
        if not isinstance(welcome, Welcome) or os.getppid() != int(parent_id):
            channel.close()
            raise ConfigError("the supervisor ended before this process had started")
        channel.setblocking(False)
        return cls(channel, welcome)

    def fileno(self) -> int:
        return self._channel.fileno()

    def receive(self) -> list[ToChild]:
        """Notices that are there now. Sets `is_gone` at the end of the channel."""
        notices: list[ToChild] = []
        for data in () if self.is_gone else messages(self._channel):
            if data:
                notices.append(decode_from_supervisor(data))
            else:
                self.is_gone = True
        return notices

    def progress(self, text: str) -> None:
        """Tell the user, through the supervisor, what takes time now or goes wrong. Callable from any thread."""
        self._tell(Progress(text[:_MAX_TEXT]))

    def ready(self, url: str, boot: int) -> None:
        self._tell(Ready(url, boot))

    def rebooted(self, boot: int) -> None:
        """Tell that this child goes on under another boot, without having ended."""
        self._tell(Rebooted(boot))

    def refuse(self, message: str) -> None:
        """The configuration is wrong; the process ends with exit code 2 next."""
        self._tell(Refused(message[:_MAX_TEXT]))

    def take_channel(self) -> socket.socket:
        """The channel itself, which waits for messages: for a process that is asked other things on it."""
        self._channel.setblocking(True)
        return self._channel

    def close(self) -> None:
        self._channel.close()

    def _tell(self, notice: ToSupervisor) -> None:
        with suppress(BlockingIOError, ConnectionError):  # gone: `receive` says so; full: it does not read any more
            self._channel.send(encode_notice(notice))


def live(what: str, life: Callable[[Parent | None], Exit]) -> NoReturn:
    """Be a process of the server, called `what`, from its first line to its exit code, which `life` returns. It gets
    the supervisor, None where there is none; a ConfigError that it raises is for the user, all else is a bug."""
    parent: Parent | None = None
    try:
        parent = Parent.attach()
        code = life(parent)
    except ConfigError as error:
        end_refused(error, parent)
    except ProcessOver as over:
        end_process(over.code, str(over))
    except BaseException:
        end_process(Exit.FAILED, f"{what} failed")
    leave(code)


def end_refused(reason: ConfigError | str, parent: Parent | None) -> NoReturn:
    """The configuration is wrong: one line for the user, from any thread."""
    message = one_line(reason)
    say(message)
    if parent is not None:
        parent.refuse(message)
    leave(Exit.CONFIG)


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process the signal when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
