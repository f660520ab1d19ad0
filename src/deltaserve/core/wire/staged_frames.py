"""What two ranks say to each other about staging memory, as transport notifications.

writer                          reader
StageReserve(write, bytes) ->  before there is anything to send: a lease if there is room now, else no answer
StageAsk(write, bytes)     ->
                           <-   StageLease(write, where), at once or when there is room; or StageRefusal(why)
bulk write + StagedData    ->   scatters, then hears the note inside as if it had come with a plain write
                           <-   StageAck(write): scattered; the lease is over
StageRelease(write)        ->   the lease is not needed
                           <-   StageRecall(write): somebody waits for what is reserved; released, unless it is in use
"""

import msgspec

from deltaserve.core.errors import ProtocolError
from deltaserve.core.wire.codec import decoded

_MAGIC = b"dG"


class StageReserve(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Memory for a write to come, of at most so many bytes. A StageAsk for the same write follows if it gets none."""

    write: int
    num_bytes: int


class StageRecall(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What is reserved for this write is wanted back."""

    write: int


class StageAsk(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Memory for a write of so many bytes. Repeating it changes nothing."""

    write: int
    """Numbered by the writing rank, from 1."""
    num_bytes: int


class StageLease(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Where the bytes go in the reader's staging region."""

    write: int
    round: int
    offset: int


class StageRefusal(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """There is no memory, and there was none for as long as anybody waits."""

    write: int
    reason: str


class StagedPages(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Pages of a page group that lie in the buffer, one part behind the other."""

    group: str
    first: int
    """Index in the prompt of the first page."""
    num_tokens: int
    """Tokens in the buffer, from the first page's first one on. The prompt's last page may have more room."""
    pages: bytes
    """Page ids of the reader, packed uint32."""


class StagedData(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What the write that this came with has put into the lease: the writer's plan, cut once."""

    write: int
    round: int
    offset: int
    ticket: int
    reader_boot: int
    writer_boot: int
    parts: tuple[StagedPages, ...]
    note: bytes
    """Notification that the reader announces after the scatter; empty: it announces nothing."""
    checksum: int | None = None
    """crc32 of all that the write has put into the lease. None: a notification proves that it is there."""


class StageAck(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The bytes are in their pages."""

    write: int


class StageRelease(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Nothing was written, or will be, by the lease of this write."""

    write: int


FrameOfWriter = StageReserve | StageAsk | StagedData | StageRelease
FrameOfReader = StageLease | StageRefusal | StageAck | StageRecall
StageFrame = FrameOfWriter | FrameOfReader

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[StageFrame] = msgspec.msgpack.Decoder(StageFrame)


def is_stage_frame(data: bytes) -> bool:
    return data[:2] == _MAGIC


def encode_stage(frame: StageFrame) -> bytes:
    return _MAGIC + _encoder.encode(frame)


def decode_stage(data: bytes) -> StageFrame:
    """Raises ProtocolError for anything that is not exactly one frame."""
    if not is_stage_frame(data):
        raise ProtocolError("not a staging frame")
    return decoded(_decoder, data[2:], "staging frame")
