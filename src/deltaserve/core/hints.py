"""What a client says of the requests to come. Advice: no answer depends on it, and none is refused for it."""

from enum import Enum

import msgspec


class KvHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hints of one request to the trees that hold its pages, on prefill and on decode."""

    done: bool = False
    """No further turn comes: what no other request shares of its path is evicted before all else."""


NO_HINTS = KvHints()


class HintOutcome(Enum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    REFUSED = "refused"


class HintAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decode says of one hint."""

    outcome: HintOutcome
    reason: str = ""
    """Why it was refused."""
