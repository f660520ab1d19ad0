"""Frame = magic (2) | version (1) | crc32 of the payload (4, little-endian) | msgpack payload.

Whoever reads a frame gets an Envelope or one ProtocolError; nothing else can come out of bytes from a peer.
"""

import zlib
from typing import TypeVar

import msgspec

from deltaserve.core.errors import ProtocolError
from deltaserve.core.wire.messages import PROTOCOL_VERSION, Done, Envelope, Events, Grant, Offer, Submit, WriteBack

MAGIC = b"dS"
HEADER_BYTES = 7
LARGE_FRAME_BYTES = 16 << 20
SMALL_FRAME_BYTES = 1 << 20
_LARGE = (Submit, Offer, Grant, Events, WriteBack)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_done_decoder = msgspec.msgpack.Decoder(Done)


def encode(envelope: Envelope) -> bytes:
    """Raises ProtocolError when the message exceeds the limit of its type: never sent, so never refused."""
    payload = _encoder.encode(envelope)
    _check_size(len(payload), envelope)
    return MAGIC + bytes([PROTOCOL_VERSION]) + zlib.crc32(payload).to_bytes(4, "little") + payload


def decode(frame: bytes) -> Envelope:
    """Raises ProtocolError: wrong magic, version, checksum, size, unknown type or field, value out of type."""
    if len(frame) < HEADER_BYTES or frame[:2] != MAGIC:
        raise ProtocolError("not a deltaserve frame")
    if frame[2] != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version: ours {PROTOCOL_VERSION}, theirs {frame[2]}")
    if len(frame) > LARGE_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds {LARGE_FRAME_BYTES}")
    payload = frame[HEADER_BYTES:]
    if zlib.crc32(payload).to_bytes(4, "little") != frame[3:HEADER_BYTES]:
        raise ProtocolError("checksum mismatch")
    envelope = decoded(_decoder, payload, "payload")
    _check_size(len(payload), envelope)
    return envelope


def encode_done(done: Done) -> bytes:
    """A Done travels as a transport notification: no envelope, the boots are inside."""
    return MAGIC + _encoder.encode(done)


def decode_done(data: bytes) -> Done:
    """Raises ProtocolError for anything that is not exactly one Done."""
    if data[:2] != MAGIC:
        raise ProtocolError("not a deltaserve notification")
    return decoded(_done_decoder, data[2:], "notification")


def decoded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes, what: str) -> T:
    """What the bytes encode. Raises ProtocolError naming `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {what}: {error}") from None


def _check_size(payload_bytes: int, envelope: Envelope) -> None:
    limit = LARGE_FRAME_BYTES if isinstance(envelope.body, _LARGE) else SMALL_FRAME_BYTES
    if payload_bytes > limit - HEADER_BYTES:
        raise ProtocolError(f"{type(envelope.body).__name__} of {payload_bytes} bytes exceeds {limit}")
