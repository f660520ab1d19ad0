"""What a supervisor and its preload process tell each other: a request to fork, and its answer."""

from collections.abc import Mapping

import msgspec


class ForkRequest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor: fork a process. With it come descriptors: its output, its channel."""

    argv: tuple[str, ...]
    """The command that the new process does in place of, and that `ps` shows."""
    env: Mapping[str, str]
    """Added to the preload process's own environment."""
    supervisor: int
    """Process id of who asks, and is to be its parent."""


class ForkAnswer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Preload process: done; the new process is a child of the supervisor."""

    pid: int | None
    """None: it could not be forked."""


NUM_DESCRIPTORS = 2

_encoder = msgspec.msgpack.Encoder()
_fork: msgspec.msgpack.Decoder[ForkRequest] = msgspec.msgpack.Decoder(ForkRequest)
_forked: msgspec.msgpack.Decoder[ForkAnswer] = msgspec.msgpack.Decoder(ForkAnswer)


def encode(message: ForkRequest | ForkAnswer) -> bytes:
    return _encoder.encode(message)


def decode_fork(data: bytes) -> ForkRequest:
    """Raises msgspec.DecodeError."""
    return _fork.decode(data)


def decode_forked(data: bytes) -> ForkAnswer:
    """Raises msgspec.DecodeError."""
    return _forked.decode(data)
