"""What transfer orders and reports are as bytes of an entry of the log between ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import msgspec

from deltaserve.control.transfer.commands import TransferReport
from deltaserve.control.transfer.plane_turns import TransferOrder
from deltaserve.control.transfer.rank_chain import RankLogError

_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class UnionCodec(Generic[T]):
    """Lists of values of a union of dataclasses; each with its place in the union, which both sides have alike."""

    def __init__(self, kinds: Sequence[type[Any]]) -> None:
        self._numbers: Mapping[type[Any], int] = {kind: number for number, kind in enumerate(kinds)}
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]
        self._list = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])

    def encode(self, items: Sequence[T]) -> bytes:
        return _encoder.encode([(self._numbers[type(item)], item) for item in items])

    def decode(self, body: bytes) -> list[T]:
        """Commands or reports in the body of an entry. Raises RankLogError."""
        entries = decode_entry(self._list, body)
        if any(not 0 <= number < len(self._decoders) for number, _ in entries):
            raise RankLogError("an entry of unknown kind")
        return [decode_entry(self._decoders[number], raw) for number, raw in entries]


D = TypeVar("D")


def decode_entry(decoder: "msgspec.msgpack.Decoder[D]", body: bytes | msgspec.Raw) -> D:
    """The entry that the bytes encode. Raises RankLogError."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RankLogError(f"an entry that cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Idleness:
    """Whether nothing that a rank posted waits for completion."""

    is_idle: bool


RankNews = TransferReport | Idleness

ORDERS: UnionCodec[TransferOrder] = UnionCodec(get_args(TransferOrder))
NEWS: UnionCodec[RankNews] = UnionCodec(get_args(RankNews))
