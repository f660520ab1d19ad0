"""What to do about a room whose half failed: a table, so that a new remedy is a new row.

Decode owns attempts. When prefill fails before the first token, decode says so (`Finished` with `retryable`) and the
front submits the SAME room to the same decode worker with another prefill worker; decode opens the next attempt. When
decode is lost before the first token, or would not take the room, it goes to another one; nothing is live elsewhere.
After the first token both give up. Sampling is counter-based, so a replay of prompt + output on another decode worker
would be exact: it would be the row (DECODE, started).
"""

from dataclasses import dataclass
from enum import Enum

from deltaserve.base.errors import FailReason


class Cause(Enum):
    """Whose failure it was."""

    PREFILL = "prefill"
    DECODE = "decode"


class Remedy(Enum):
    OTHER_PREFILL = "other_prefill"
    """Same decode worker, preferably another prefill worker."""
    OTHER_DECODE = "other_decode"
    """Another decode worker, any prefill worker."""
    GIVE_UP = "give_up"


REMEDIES: dict[tuple[Cause, bool], Remedy] = {
    (Cause.PREFILL, False): Remedy.OTHER_PREFILL,
    (Cause.PREFILL, True): Remedy.GIVE_UP,
    (Cause.DECODE, False): Remedy.OTHER_DECODE,
    (Cause.DECODE, True): Remedy.GIVE_UP,
}
"""(cause, whether a token was delivered) |-> remedy."""

MAX_RETRIES = 1
"""Per room and cause."""

BLAMES_WORKER = frozenset(
    {
        FailReason.TRANSFER_FAILED,
        FailReason.PEER_LOST,
        FailReason.PEER_FENCED,
        FailReason.STALE_PEER,
        FailReason.INCOMPATIBLE,
        FailReason.BAD_EXTENT,
        FailReason.PREFIX_MISMATCH,
        FailReason.INTERNAL,
    }
)
"""Reasons that count against a worker; the others are the request's own, or honest shedding."""

HONEST_REFUSALS = frozenset({FailReason.DRAINING, FailReason.OVERLOADED})
"""Reasons a decode worker does not take a room at all: another one may."""


@dataclass(slots=True)
class Retries:
    """How often a room was submitted again, by cause."""

    num_prefill: int = 0
    num_decode: int = 0

    def next(self, cause: Cause, started: bool) -> Remedy:
        """The remedy to try now; it counts as used."""
        remedy = REMEDIES[cause, started]
        if remedy is Remedy.GIVE_UP:
            return remedy
        if cause is Cause.PREFILL:
            self.num_prefill += 1
            return remedy if self.num_prefill <= MAX_RETRIES else Remedy.GIVE_UP
        self.num_decode += 1
        return remedy if self.num_decode <= MAX_RETRIES else Remedy.GIVE_UP
