"""What two endpoints of the local transport say to each other: packets of a SEQPACKET socket, and an endpoint's card.

Who writes connects and says Hello, with the files of its memory; then come its writes, each in as many packets as it
needs. The other way go acknowledgements. Everything is read as if it came from somebody else.
"""

import re
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltaserve.core.extents import Copy
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import MAX_NOTIFICATION_BYTES, TransportError
from deltaserve.transports.local.memory_access import Addresses

PACKET_BYTES = 64 << 10
"""Well below the send buffer that every system gives a socket."""
MAX_REGIONS = 64
"""Most regions of a rank: their files go in one message, of which the kernel takes 253."""
MAX_COPIES = 1 << 20
"""Most copies of one write: a window of 8 MiB has a few thousand."""
_CARD_MAGIC, _HELLO_MAGIC = b"DSL1", b"DSLH"
_TOKEN = struct.Struct("<Q")
_HELLO = struct.Struct("<4sQQI")
_REGION = struct.Struct("<QQ")
_WRITE = struct.Struct("<QII")
_ACK = struct.Struct("<Q")
_SPANS = 5
"""Numbers of a copy: source region and offset, target region and offset, bytes."""
_NAME = re.compile(r"[0-9a-f]{32}")


class LocalCard(NamedTuple):
    """An endpoint as its peer must know it."""

    token: int
    """Secret that whoever connects shows: only the two workers know it."""
    name: str
    """Name of its socket, in the folder that both workers share."""


class LocalHello(NamedTuple):
    """First packet of a connection."""

    reader: int
    """Token of the endpoint that it is meant for."""
    writer: int
    """Token of the endpoint that writes."""
    regions: tuple[tuple[RegionId, int], ...]
    """(region, bytes); its files follow the one of the epoch word."""


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """A write as the reader has to perform it; nothing in it is checked against any memory yet."""

    id: int
    spans: Addresses
    """Addresses and lengths, shape [_SPANS, copies]."""
    notification: bytes | None


def encode_card(card: LocalCard) -> bytes:
    body = _TOKEN.pack(card.token) + card.name.encode()
    return _CARD_MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode_card(data: bytes) -> LocalCard:
    """The endpoint that the bytes describe. Raises TransportError."""
    body = data[8:]
    if data[:8] != _CARD_MAGIC + zlib.crc32(body).to_bytes(4, "little") or len(body) < _TOKEN.size:
        raise TransportError("this is not the metadata of a local endpoint")
    name = body[_TOKEN.size :].decode(errors="replace")
    if _NAME.fullmatch(name) is None:
        raise TransportError("its socket has an impossible name")
    return LocalCard(_TOKEN.unpack_from(body)[0], name)


def encode_hello(hello: LocalHello) -> bytes:
    regions = b"".join(_REGION.pack(*region) for region in hello.regions)
    return _HELLO.pack(_HELLO_MAGIC, hello.reader, hello.writer, len(hello.regions)) + regions


def decode_hello(data: bytes) -> LocalHello:
    """The hello that the bytes encode. Raises TransportError."""
    if len(data) < _HELLO.size:
        raise TransportError("a hello that is too short")
    magic, reader, writer, count = _HELLO.unpack_from(data)
    if magic != _HELLO_MAGIC or count > MAX_REGIONS or len(data) != _HELLO.size + count * _REGION.size:
        raise TransportError("this is no hello of a local endpoint")
    regions = tuple((RegionId(id), size) for id, size in _REGION.iter_unpack(data[_HELLO.size :]))
    if len({id for id, _ in regions}) != count or any(size == 0 for _, size in regions):
        raise TransportError("a hello with two regions of one id, or an empty one")
    return LocalHello(reader, writer, regions)


def encode_write(id: int, copies: Sequence[Copy], notification: bytes | None) -> bytes:
    numbers = array("Q")
    for src, dst in copies:
        numbers.extend((src.region, src.offset, dst.region, dst.offset, src.num_bytes))
    note = notification or b""
    return _WRITE.pack(id, len(copies), len(note)) + numbers.tobytes() + note


def encode_ack(id: int) -> bytes:
    return _ACK.pack(id)


def decode_ack(data: bytes) -> int | None:
    return int(_ACK.unpack(data)[0]) if len(data) == _ACK.size else None


class WriteAssembly:
    """Puts the packets of writes together."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._missing = 0

    def feed(self, packet: bytes) -> WriteFrame | None:
        """The write that this packet completes. Raises TransportError."""
        if not self._parts:
            self._missing = _length(packet)
        self._parts.append(packet)
        self._missing -= len(packet)
        if self._missing < 0:
            raise TransportError("a write longer than it says")
        if self._missing:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        id, count, _ = _WRITE.unpack_from(data)
        end = _WRITE.size + count * _SPANS * 8
        spans = np.frombuffer(data, np.uint64, count * _SPANS, _WRITE.size).reshape(count, _SPANS).T
        return WriteFrame(id, spans, data[end:] or None)


def _length(packet: bytes) -> int:
    """Bytes of the write that begins so. Raises TransportError."""
    if len(packet) < _WRITE.size:
        raise TransportError("a write that is too short")
    _, count, note = _WRITE.unpack_from(packet)
    if count > MAX_COPIES or note > MAX_NOTIFICATION_BYTES or not count + note:
        raise TransportError("a write of an impossible size")
    return int(_WRITE.size + count * _SPANS * 8 + note)
