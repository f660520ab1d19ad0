"""What to do about a room whose half failed: a table, so that a new remedy is a new row.

Decode owns attempts. When prefill fails, decode says so (`Finished` with `retryable`) and the front submits the SAME
room to the same decode worker with another prefill worker; decode opens the next attempt. When decode is lost, the room
goes to another decode worker, and when a worker has no capacity, to another pair. It makes no difference whether tokens
were delivered: they are part of the new Submit, and the random bits of a position do not depend on who draws it.

Where there is nobody else, a room waits for a worker that comes back, up to its deadline.

A room that goes forward is tried again for as long as its deadline allows: bounds count from its last new token. What
they are for is a request that ends whoever computes it. It brings no token where it does so, or it would need a token
for each worker that it ends; so three worker processes that end in a row, without a token of the room between them, or
`MAX_ENDED` in all, are taken for its doing. Processes, not connections: a worker that is merely silent or cut off may
be well, and the room goes elsewhere without a bound.
"""

from dataclasses import dataclass, field
from enum import Enum

from deltaserve.core.errors import FailReason


class Cause(Enum):
    """Whose failure ended a room's attempt."""

    PREFILL = "prefill"
    PREFILL_LOST = "prefill_lost"
    """Decode does not reach it."""
    FENCED = "fenced"
    """Nobody's that is known: the room's transfer ended with a fence that another one needed."""
    DECODE = "decode"
    """The decode worker's process ended, as far as is known."""
    SILENT = "silent"
    """Decode is not heard of; nothing says that its process ended."""
    GAP = "gap"
    """What decode told is not complete, and nobody tells the rest again."""
    CAPACITY = "capacity"
    """Nobody's: a worker is full."""
    LEAVING = "leaving"
    """Nobody's: a worker drains, to end or to take up another role."""
    NUMERICAL = "numerical"
    """The output was not finite, maybe by pages that others computed: another try reads nothing of theirs."""


class Remedy(Enum):
    NEXT_PREFILL = "next_prefill"
    """Same decode worker; another prefill worker, or the same one where it is the only one. Any, if there was none."""
    OTHER_PREFILL = "other_prefill"
    """Same decode worker; another prefill worker."""
    OTHER_DECODE = "other_decode"
    """Another decode worker, any prefill worker."""
    OTHER_PAIR = "other_pair"
    """Another decode worker, else another prefill worker for the same one."""
    LATER = "later"
    """Any pair, when the workers have had time to report which of them leave, or to join again."""
    GIVE_UP = "give_up"


REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    Cause.PREFILL: (Remedy.NEXT_PREFILL,),
    Cause.PREFILL_LOST: (Remedy.OTHER_PREFILL,) * 2,
    Cause.FENCED: (Remedy.NEXT_PREFILL, *(Remedy.LATER,) * 4),
    Cause.DECODE: (Remedy.OTHER_DECODE,) * 2,
    Cause.GAP: (Remedy.OTHER_DECODE,) * 2,
    Cause.CAPACITY: (Remedy.OTHER_PAIR,),
    Cause.LEAVING: (Remedy.OTHER_PAIR, *(Remedy.LATER,) * 5),
    Cause.NUMERICAL: (Remedy.NEXT_PREFILL,),
}
"""What is tried in order, from a room's last new token on. Few: a request that kills the workers it comes to must not
go through all of them."""

MAX_ENDED = 16
"""Decode processes that may end under one room in all."""

_ENDLESS = {Cause.SILENT: Remedy.OTHER_DECODE}
_NOBODYS = frozenset({Cause.FENCED, Cause.CAPACITY, Cause.LEAVING})
"""A stream that has begun waits these out; what has not may as well be sent again by its client."""
_FOR_LIFE = frozenset({Cause.NUMERICAL})
"""Counted whatever tokens came: it is about the request's own numbers."""

_PREFILL_LOST = frozenset({FailReason.PEER_LOST, FailReason.NO_PEER})

_PREFILL_FAULTS = frozenset(
    {
        FailReason.TRANSFER_FAILED,
        FailReason.PEER_LOST,
        FailReason.INCOMPATIBLE,
        FailReason.NO_PEER,
    }
)


def cause_of(reason: FailReason, retryable: bool) -> Cause | None:
    """Cause of a failure that decode told of; None: it would fail everywhere."""
    if reason is FailReason.OVERLOADED:
        return Cause.CAPACITY
    if reason is FailReason.DRAINING:
        return Cause.LEAVING
    if not retryable:
        return None
    match reason:
        case FailReason.PEER_FENCED:
            return Cause.FENCED
        case FailReason.NUMERICAL:
            return Cause.NUMERICAL
        case _:
            return Cause.PREFILL_LOST if reason in _PREFILL_LOST else Cause.PREFILL


def blame(reason: FailReason) -> Cause | None:
    """Against which half a failure counts; None: the request's own, honest shedding, or another room's fence."""
    if reason in _PREFILL_FAULTS:
        return Cause.PREFILL
    return Cause.DECODE if reason is FailReason.INTERNAL else None


def told(reason: FailReason) -> FailReason:
    """What the client is told. Rooms the front cancelled are over: what is still cancelled, workers lost track of."""
    return FailReason.TRANSFER_FAILED if reason is FailReason.CANCELLED else reason


def waits_for_workers(cause: Cause, started: bool) -> bool:
    """Whether a room that nobody else can take waits for who comes back. A full server says so before it begins."""
    return started or cause is not Cause.CAPACITY


@dataclass(slots=True)
class Retries:
    """How often a room was submitted again, by cause."""

    used: dict[Cause, int] = field(default_factory=dict)
    """Tries by cause since the last new token."""
    num_ended: int = 0
    """Decode processes that ended while they served the room."""

    def progressed(self) -> None:
        """Note that a new token came: all but the causes for life count from 0 again."""
        if self.used:
            self.used = {cause: count for cause, count in self.used.items() if cause in _FOR_LIFE}

    def next(self, cause: Cause, is_started: bool) -> Remedy:
        """The remedy to try now; it counts as used."""
        if cause in _ENDLESS:
            return _ENDLESS[cause]
        self.num_ended += cause is Cause.DECODE
        num_used = self.used.get(cause, 0)
        if num_used >= len(REMEDIES[cause]) or self.num_ended > MAX_ENDED:
            return Remedy.LATER if is_started and cause in _NOBODYS else Remedy.GIVE_UP
        self.used[cause] = num_used + 1
        return REMEDIES[cause][num_used]
