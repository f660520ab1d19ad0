"""The log by which rank 0 tells the other ranks what to do and they answer: numbered entries, hashed in one chain.

Every rank must do the same in the same order, or collectives hang and pages differ without anybody seeing it. So each
entry carries its number and the hash of all entries up to it. The receiver counts and hashes for itself, and tells with
each entry of its own how far it has come; both sides compare. What does not agree ends the worker.
"""

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import msgspec
import xxhash

from deltaserve.base.errors import DeltaserveError
from deltaserve.base.ids import RowId, StepIndex
from deltaserve.engine.transfer_thread import TransferOrder
from deltaserve.link.rank_link import RankSocket
from deltaserve.sched.plan import (
    PageUpdate,
    PlanItem,
    RowOpen,
    StepPlan,
    TokenOf,
    TokenValues,
    WorkList,
)
from deltaserve.transfer.commands import TransferReport

_HEADER = struct.Struct("<QQQQ")
"""Number and hash of this entry; number and hash of the other side's last entry that was taken."""


class RankLogError(DeltaserveError):
    """Two ranks do not agree on what was said."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a log has come."""

    number: int = 0
    checksum: int = 0

    def then(self, body: bytes) -> "LogPosition":
        number = self.number + 1
        checksum = xxhash.xxh3_64_intdigest(struct.pack("<QQ", number, self.checksum) + body)
        return LogPosition(number, checksum)


class LogEnd:
    """One side of a log: seals entries of its own, opens those of the other side."""

    def __init__(self) -> None:
        self._taken = LogPosition()
        self._sent: deque[LogPosition] = deque([LogPosition()])
        """From the last one the other side has told that it took."""

    @property
    def num_unanswered(self) -> int:
        """Entries of this side that the other has not told to have taken."""
        return len(self._sent) - 1

    def seal(self, body: bytes) -> bytes:
        """The frame of the next entry."""
        position = self._sent[-1].then(body)
        self._sent.append(position)
        return _HEADER.pack(position.number, position.checksum, self._taken.number, self._taken.checksum) + body

    def open(self, frame: bytes) -> bytes:
        """The body of the other side's next entry. Raises RankLogError when it is not that."""
        if len(frame) < _HEADER.size:
            raise RankLogError(f"an entry of {len(frame)} bytes")
        number, checksum, seen, seen_checksum = _HEADER.unpack_from(frame)
        body = frame[_HEADER.size :]
        expected = self._taken.then(body)
        if number != expected.number:
            raise RankLogError(f"entry {number} came where entry {expected.number} was due")
        if checksum != expected.checksum:
            raise RankLogError(f"entry {number} differs from what was sent")
        self._taken = expected
        self._compare(LogPosition(seen, seen_checksum))
        return body

    def _compare(self, seen: LogPosition) -> None:
        while self._sent[0].number < seen.number and len(self._sent) > 1:
            self._sent.popleft()
        if self._sent[0] != seen:
            raise RankLogError(f"the other side took an entry {seen.number} that differs from the one sent")


class RankChannel:
    """A log over a link: what a thread says and hears."""

    def __init__(self, socket: RankSocket, limit_s: float) -> None:
        """`limit_s`: an entry must be taken by the link within this time."""
        self._socket = socket
        self._limit_s = limit_s
        self._log = LogEnd()

    @property
    def num_unanswered(self) -> int:
        return self._log.num_unanswered

    def send(self, body: bytes) -> None:
        """Raises RankSilent."""
        self._socket.send(self._log.seal(body), self._limit_s)

    def receive(self, wait_s: float | None) -> bytes | None:
        """None when nothing came for `wait_s`. Raises RankLogError."""
        frame = self._socket.receive(wait_s)
        return None if frame is None else self._log.open(frame)

    def close(self) -> None:
        self._socket.close()


# ---------------------------------------------------------------- steps


class ItemByValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A PlanItem whose input is known."""

    row: RowId
    q_start: int
    q_len: int
    tokens: bytes
    samples: bool
    wants_prompt_logprobs: bool


class PlanByValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A StepPlan as other ranks get it: they draw no tokens, so none of theirs is meant."""

    step: StepIndex
    items: tuple[ItemByValue, ...]
    work: WorkList
    opens: tuple[RowOpen, ...]
    pages: tuple[PageUpdate, ...]
    closes: tuple[RowId, ...]


class StepDone(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank has computed a step: its pages may be read."""

    step: StepIndex


_encoder = msgspec.msgpack.Encoder()
_plans = msgspec.msgpack.Decoder(PlanByValue)
_dones = msgspec.msgpack.Decoder(StepDone)


def encode_plan(plan: StepPlan) -> bytes:
    """Raises RankLogError for an input that is not given by value."""
    items = tuple(
        ItemByValue(item.row, item.q_start, item.q_len, _values(item.inputs), item.samples, item.wants_prompt_logprobs)
        for item in plan.items
    )
    return _encoder.encode(PlanByValue(plan.step, items, plan.work, plan.opens, plan.pages, plan.closes))


def _values(inputs: TokenValues | TokenOf) -> bytes:
    if isinstance(inputs, TokenOf):
        raise RankLogError(f"the input of a row is what it drew in step {inputs.step}, which only rank 0 knows")
    return inputs.tokens


def decode_plan(body: bytes) -> StepPlan:
    """Raises RankLogError."""
    plan = _decode(_plans, body)
    items = tuple(
        PlanItem(item.row, item.q_start, item.q_len, TokenValues(item.tokens), item.samples, item.wants_prompt_logprobs)
        for item in plan.items
    )
    return StepPlan(plan.step, items, plan.work, plan.opens, plan.pages, plan.closes)


def encode_done_step(done: StepDone) -> bytes:
    return _encoder.encode(done)


def decode_done_step(body: bytes) -> StepDone:
    """Raises RankLogError."""
    return _decode(_dones, body)


# ---------------------------------------------------------------- transfers


@dataclass(frozen=True, slots=True)
class Idleness:
    """Of a rank: whether nothing it posted waits for completion."""

    is_idle: bool


RankNews = TransferReport | Idleness

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
        """Raises RankLogError."""
        entries = _decode(self._list, body)
        if any(not 0 <= number < len(self._decoders) for number, _ in entries):
            raise RankLogError("an entry of unknown kind")
        return [_decode(self._decoders[number], raw) for number, raw in entries]


ORDERS: UnionCodec[TransferOrder] = UnionCodec(get_args(TransferOrder))
NEWS: UnionCodec[RankNews] = UnionCodec(get_args(RankNews))

D = TypeVar("D")


def _decode(decoder: "msgspec.msgpack.Decoder[D]", body: bytes | msgspec.Raw) -> D:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RankLogError(f"an entry that cannot be read: {error}") from None
