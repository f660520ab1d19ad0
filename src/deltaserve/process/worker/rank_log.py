"""What passes between rank 0 and the other ranks, as entries of a log (control/transfer/rank_chain.py) over a link."""

import msgspec

from deltaserve.control.sched.plan import (
    PageUpdate,
    PlanItem,
    RowOpen,
    StepPlan,
    TokenOf,
    TokenValues,
    WorkList,
)
from deltaserve.control.transfer.rank_chain import LogEnd, RankLogError
from deltaserve.control.transfer.rank_entries import decode_entry
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.process.links.rank_link import RankSocket


class RankChannel:
    """A log over a link: what a thread says and hears."""

    def __init__(self, socket: RankSocket, limit_s: float) -> None:
        """`limit_s`: an entry must be taken by the link within this time."""
        self._socket = socket
        self._limit_s = limit_s
        self._log = LogEnd()

    @property
    def url(self) -> str:
        """Where its other end finds it, if this one was there first."""
        return self._socket.url

    @property
    def num_unanswered(self) -> int:
        return self._log.num_unanswered

    def send(self, body: bytes) -> None:
        """Send an entry. Raises RankSilent."""
        self._socket.send(self._log.seal(body), self._limit_s)

    def receive(self, wait_s: float | None) -> bytes | None:
        """The next entry; None when nothing came for `wait_s`. Raises RankLogError."""
        frame = self._socket.receive(wait_s)
        return None if frame is None else self._log.open(frame)

    def close(self) -> None:
        self._socket.close()


class ItemByValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A PlanItem whose input is known."""

    row: RowId
    q_start: int
    q_len: int
    tokens: bytes
    samples: bool
    wants_prompt_logprobs: bool
    num_drafts: int
    wanted_drafts: int
    wants_features: bool


class PlanByValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A StepPlan as other ranks get it: they draw no tokens, so none of theirs is meant."""

    step: StepIndex
    items: tuple[ItemByValue, ...]
    work: WorkList
    opens: tuple[RowOpen, ...]
    pages: tuple[PageUpdate, ...]
    closes: tuple[RowId, ...]
    least_likely: float


class StepDone(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank has computed a step: its pages may be read."""

    step: StepIndex


_encoder = msgspec.msgpack.Encoder()
_plans = msgspec.msgpack.Decoder(PlanByValue)
_dones = msgspec.msgpack.Decoder(StepDone)


def encode_plan(plan: StepPlan) -> bytes:
    """Raises RankLogError for an input that is not given by value."""
    items = tuple(_by_value(item) for item in plan.items)
    return _encoder.encode(
        PlanByValue(plan.step, items, plan.work, plan.opens, plan.pages, plan.closes, plan.least_likely)
    )


def _by_value(item: PlanItem) -> ItemByValue:
    return ItemByValue(
        item.row,
        item.q_start,
        item.q_len,
        _values(item.inputs),
        item.samples,
        item.wants_prompt_logprobs,
        item.num_drafts,
        item.wanted_drafts,
        item.wants_features,
    )


def _values(inputs: TokenValues | TokenOf) -> bytes:
    if isinstance(inputs, TokenOf):
        raise RankLogError(f"the input of a row is what it drew in step {inputs.step}, which only rank 0 knows")
    return inputs.tokens


def decode_plan(body: bytes) -> StepPlan:
    """The plan in an entry. Raises RankLogError."""
    plan = decode_entry(_plans, body)
    items = tuple(_item(item) for item in plan.items)
    return StepPlan(plan.step, items, plan.work, plan.opens, plan.pages, plan.closes, plan.least_likely)


def _item(item: ItemByValue) -> PlanItem:
    return PlanItem(
        item.row,
        item.q_start,
        item.q_len,
        TokenValues(item.tokens),
        item.samples,
        item.wants_prompt_logprobs,
        item.num_drafts,
        item.wanted_drafts,
        item.wants_features,
    )


def encode_done_step(done: StepDone) -> bytes:
    return _encoder.encode(done)


def decode_done_step(body: bytes) -> StepDone:
    """The answer to a step in an entry. Raises RankLogError."""
    return decode_entry(_dones, body)
