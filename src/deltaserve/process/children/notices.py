"""What a supervisor and its children tell each other, one message per datagram of a private socket pair."""

import socket
from collections.abc import Iterator, Mapping

import msgspec


class Progress(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Child: a line for the user: what takes time while it starts, or a warning."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Child: it serves. `url` is where it listens."""

    url: str
    boot: int
    """Number of this process start."""


class Rebooted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Child: it goes on under another number; the next process start must have a higher one."""

    boot: int


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Child: its configuration is wrong; it ends with exit code 2. One line a user can act on."""

    message: str


class ForkAnswer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Preload process: done; the new process is a child of the supervisor."""

    pid: int | None
    """None: it could not be forked."""


class PeerUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor: another child serves at `url`."""

    name: str
    url: str
    boot: int


class PeerDown(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor: another child's process has ended and was reaped: nothing leaves it any more."""

    name: str


class PeerHalted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor: another child's process is stopped (SIGSTOP, a debugger), or goes on: then `pid` is None."""

    name: str
    pid: int | None


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor: the first message to each child."""

    url: str | None
    """Where an earlier start of this child listened: it must listen there again. None at the first start."""
    peers: tuple[PeerUp, ...]
    """The children that serve already."""
    former_boot: int = 0
    """Boot of the last start of this child that served: the new one must be higher. 0: none did."""


class ForkRequest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor, to its preload process: fork a process. With it come descriptors: its output, its channel."""

    argv: tuple[str, ...]
    """The command that the new process does in place of, and that `ps` shows."""
    env: Mapping[str, str]
    """Added to the preload process's own environment."""
    supervisor: int
    """Process id of who asks, and is to be its parent."""


ToSupervisor = Progress | Ready | Rebooted | Refused | ForkAnswer
ToChild = Welcome | PeerUp | PeerDown | PeerHalted | ForkRequest

MAX_NOTICE_BYTES = 1 << 16
PARENT_VARIABLE = "DS_PARENT"
"""Environment of a child: `<descriptor>:<process id of the supervisor>`. Not a DELTASERVE_ name: those are settings."""

_encoder = msgspec.msgpack.Encoder()
_to_supervisor: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)


def messages(channel: socket.socket) -> Iterator[bytes]:
    """What has come on a channel that does not block; the last is empty where the other side has closed its end."""
    data = b" "
    while data:
        try:
            data = channel.recv(MAX_NOTICE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended without reading all it was told; what it said follows
            continue
        yield data


def encode_notice(notice: ToSupervisor | ToChild) -> bytes:
    return _encoder.encode(notice)


def decode_from_child(data: bytes) -> ToSupervisor:
    """The child's message in the bytes. Raises msgspec.DecodeError."""
    return _to_supervisor.decode(data)


def decode_from_supervisor(data: bytes) -> ToChild:
    """The supervisor's message in the bytes. Raises msgspec.DecodeError."""
    return _to_child.decode(data)
