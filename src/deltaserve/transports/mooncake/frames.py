"""What a MooncakeTransport and its engine processes say to each other, and what a peer must know of an engine."""

import zlib
from ipaddress import IPv4Address

import msgspec

from deltaserve.core.transport import TransportError

TOKEN_BYTES = 16
_MAGIC = b"DSM1"
_HEADER_BYTES = len(_MAGIC) + 4
_LENGTH_BYTES = 4


class EngineCard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a peer finds an engine, and its memory: the content of an endpoint's metadata."""

    host: str
    port: int
    """Port of the library: it names the engine."""
    notice_port: int
    token: bytes
    """Secret of this engine: who knows it was told by one of the two workers."""
    version: str
    """Version of the library."""
    bases: dict[int, int]
    """Region |-> its address in the engine's process."""


class SharedRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region as the engine maps it."""

    id: int
    file: int
    """Number of the inherited descriptor of its file."""
    num_bytes: int


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine how to start; once and first of all."""

    host: str
    """IPv4 address under which peers reach it; nothing listens on another."""
    protocol: str
    devices: str
    regions: tuple[SharedRegion, ...]


class FarEngine(msgspec.Struct, frozen=True, array_like=True):
    """The engine of a rank of the peer."""

    host: str
    port: int
    notice_port: int
    token: bytes


class AttachEngines(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine all ranks of the peer, in order."""

    ranks: tuple[FarEngine, ...]


class PostWrite(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine to write: addresses and lengths are packed uint64, those of the source in the engine's own
    process."""

    write: int
    rank: int
    sources: bytes
    targets: bytes
    lengths: bytes
    notification: bytes | None


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine tells that all is registered."""

    card: EngineCard


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine tells that it cannot start."""

    problem: str


class EngineWithoutLibrary(msgspec.Struct, frozen=True, tag=True):
    """The engine tells that the library is missing, cannot be loaded, or is too old."""

    problem: str


class WriteSettled(msgspec.Struct, frozen=True, tag=True):
    """The engine tells that the library reported the end of a write."""

    write: int
    is_done: bool


class NoticeHeard(msgspec.Struct, frozen=True, tag=True):
    """The engine passes on a notification of a rank of the peer."""

    rank: int
    data: bytes


ToEngine = StartEngine | AttachEngines | PostWrite
FromEngine = EngineReady | EngineFailed | EngineWithoutLibrary | WriteSettled | NoticeHeard

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_card = msgspec.msgpack.Decoder(EngineCard)


def encode_frame(frame: ToEngine | FromEngine) -> bytes:
    return framed(_encoder.encode(frame))


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)


def framed(data: bytes) -> bytes:
    """A frame: `data` behind its length."""
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class FrameBuffer:
    """Takes a stream apart into what was `framed`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now. Raises ValueError for one longer than allowed."""
        self._unread += data
        frames: list[bytes] = []
        while len(self._unread) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "little")
            if end > _LENGTH_BYTES + self._max_bytes:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._unread) < end:
                break
            frames.append(bytes(self._unread[_LENGTH_BYTES:end]))
            del self._unread[:end]
        return frames


def encode_card(card: EngineCard) -> bytes:
    """The card as an endpoint's metadata."""
    blob = _encoder.encode(card)
    return _MAGIC + zlib.crc32(blob).to_bytes(4, "little") + blob


def decode_card(metadata: bytes) -> EngineCard:
    """The card in an endpoint's metadata. Raises TransportError."""
    blob = metadata[_HEADER_BYTES:]
    if metadata[:_HEADER_BYTES] != _MAGIC + zlib.crc32(blob).to_bytes(4, "little"):
        raise TransportError("this is not the metadata of a mooncake endpoint")
    try:
        card = _card.decode(blob)
    except msgspec.DecodeError as error:
        raise TransportError(f"this is not the metadata of a mooncake endpoint: {error}") from None
    ports = (card.port, card.notice_port)
    if len(card.token) != TOKEN_BYTES or not all(0 < port < 1 << 16 for port in ports) or not _is_ipv4(card.host):
        raise TransportError("this is not the metadata of a mooncake endpoint: impossible address or token")
    return card


def _is_ipv4(host: str) -> bool:
    """A name would be looked up, by whoever answers for names."""
    try:
        IPv4Address(host)
    except ValueError:
        return False
    return True
