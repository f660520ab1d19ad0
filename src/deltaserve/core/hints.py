"""What a client says of the requests to come. Advice: no answer depends on it, and none is refused for it."""

from enum import Enum

import msgspec


class Hint(Enum):
    """Hints, by the names that clients give them."""

    DONE = "done"
    RETAIN = "retain_s"
    PREFETCH = "prefetch"


class KvHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hints of one request to the trees that hold its pages, on prefill and on decode."""

    done: bool = False
    """No further turn comes: what no other request shares of its path is evicted before all else."""
    retain_ms: int = 0
    """The next turn comes within so long: its path is evicted behind what nobody keeps. 0: nothing is said."""
    prefetch: bool = False
    """The prompt is to be ready for requests that begin with it; nobody reads an answer."""

    @property
    def answered(self) -> tuple[Hint, ...]:
        """Those that the client gave: it is told of each."""
        given = {Hint.DONE: self.done, Hint.RETAIN: self.retain_ms > 0, Hint.PREFETCH: self.prefetch}
        return tuple(hint for hint, is_given in given.items() if is_given)


NO_HINTS = KvHints()
MAX_RETAIN_MS = 3_600_000
"""Longest time that a path is kept for; what is asked beyond it is clipped."""


class HintOutcome(Enum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REFUSED = "refused"


class HintAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decode says of one hint."""

    hint: Hint
    outcome: HintOutcome
    reason: str = ""
    """Why it was clipped or refused."""
