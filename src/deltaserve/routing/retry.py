"""What to do about a room whose half failed: a table, so that a new remedy is a new row.

Decode owns attempts. When prefill fails before the first token, decode says so (`Finished` with `retryable`) and the
front submits the SAME room to the same decode worker with another prefill worker; decode opens the next attempt. The
only prefill worker gets a second chance, unless decode says that it is not there: the front may learn of that later,
and the client would wait for nothing. When decode is lost before the first token, the room goes to another decode
worker: it is live on one at a time. When a worker has no capacity, the room goes to another pair. After the first token
all give up.

Sampling is counter-based, so a replay of prompt + output on another decode worker would be exact: it would be the row
(DECODE, True).
"""

from dataclasses import dataclass, field
from enum import Enum

from deltaserve.base.errors import FailReason


class Cause(Enum):
    """Whose failure it was."""

    PREFILL = "prefill"
    PREFILL_LOST = "prefill_lost"
    """Decode does not reach it."""
    DECODE = "decode"
    CAPACITY = "capacity"
    """Nobody's: a worker is full or draining."""


class Remedy(Enum):
    NEXT_PREFILL = "next_prefill"
    """Same decode worker; another prefill worker, or the same one where it is the only one."""
    OTHER_PREFILL = "other_prefill"
    """Same decode worker; another prefill worker."""
    OTHER_DECODE = "other_decode"
    """Another decode worker, any prefill worker."""
    OTHER_PAIR = "other_pair"
    """Another decode worker, else another prefill worker for the same one."""
    GIVE_UP = "give_up"


REMEDIES: dict[tuple[Cause, bool], Remedy] = {
    (Cause.PREFILL, False): Remedy.NEXT_PREFILL,
    (Cause.PREFILL, True): Remedy.GIVE_UP,
    (Cause.PREFILL_LOST, False): Remedy.OTHER_PREFILL,
    (Cause.PREFILL_LOST, True): Remedy.GIVE_UP,
    (Cause.DECODE, False): Remedy.OTHER_DECODE,
    (Cause.DECODE, True): Remedy.GIVE_UP,
    (Cause.CAPACITY, False): Remedy.OTHER_PAIR,
    (Cause.CAPACITY, True): Remedy.GIVE_UP,
}
"""(cause, whether a token was delivered) |-> remedy."""

MAX_RETRIES = 1
"""Per room and cause."""

_NO_CAPACITY = frozenset({FailReason.DRAINING, FailReason.OVERLOADED})

_PREFILL_LOST = frozenset({FailReason.PEER_LOST, FailReason.NO_PEER})

_PREFILL_FAULTS = frozenset(
    {
        FailReason.TRANSFER_FAILED,
        FailReason.PEER_LOST,
        FailReason.PEER_FENCED,
        FailReason.STALE_PEER,
        FailReason.INCOMPATIBLE,
        FailReason.NO_PEER,
    }
)


def cause_of(reason: FailReason, retryable: bool) -> Cause | None:
    """Of a failure that decode told of; None: it would fail everywhere."""
    if reason in _NO_CAPACITY:
        return Cause.CAPACITY
    if not retryable:
        return None
    return Cause.PREFILL_LOST if reason in _PREFILL_LOST else Cause.PREFILL


def blame(reason: FailReason) -> Cause | None:
    """Against which half a failure counts; None: the request's own, or honest shedding."""
    if reason in _PREFILL_FAULTS:
        return Cause.PREFILL
    return Cause.DECODE if reason is FailReason.INTERNAL else None


def told(reason: FailReason) -> FailReason:
    """What the client is told. Rooms the front cancelled are over: what is still cancelled, workers lost track of."""
    return FailReason.TRANSFER_FAILED if reason is FailReason.CANCELLED else reason


@dataclass(slots=True)
class Retries:
    """How often a room was submitted again, by cause."""

    used: dict[Cause, int] = field(default_factory=dict)

    def next(self, cause: Cause, started: bool) -> Remedy:
        """The remedy to try now; it counts as used."""
        remedy = REMEDIES[cause, started]
        num_used = self.used.get(cause, 0)
        if remedy is Remedy.GIVE_UP or num_used >= MAX_RETRIES:
            return Remedy.GIVE_UP
        self.used[cause] = num_used + 1
        return remedy
