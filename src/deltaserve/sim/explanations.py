"""Why a request may fail: the faults that explain a reason. An error that no fault of the run explains is a breach."""

from collections.abc import Container, Mapping

from deltaserve.core.errors import FailReason
from deltaserve.sim.faults import (
    ENDPOINT_FAULTS,
    FRAME_FAULTS,
    LIFE_FAULTS,
    PLAN_FAULTS,
    PROCESS_FAULTS,
    RANK_FAULTS,
    UNPROVEN_FAULTS,
    WRITE_FAULTS,
    FaultKind,
)

STARTS = frozenset({FaultKind.LATE_REGISTRATION, FaultKind.MOVE, FaultKind.MISFIT})
TROUBLE = frozenset(
    {
        *FRAME_FAULTS,
        *WRITE_FAULTS,
        *UNPROVEN_FAULTS,
        *PROCESS_FAULTS,
        *LIFE_FAULTS,
        *RANK_FAULTS,
        *ENDPOINT_FAULTS,
        *PLAN_FAULTS,
        *STARTS,
    }
)
"""Faults of workers and of what is between them. A run without any of it must answer."""

LOSES_BYTES = frozenset(
    {
        *WRITE_FAULTS,
        *PLAN_FAULTS,
        *LIFE_FAULTS,
        *RANK_FAULTS,
        FaultKind.CRASH,
        FaultKind.CRASH_UNSEEN,
        FaultKind.DRAIN,
        FaultKind.MISFIT,
        FaultKind.CLOCK_JUMP,
    }
)
"""After these, what was announced may not come, or not in the time that its reader knows."""

EXPLANATIONS: Mapping[FailReason, frozenset[FaultKind]] = {
    FailReason.TRANSFER_FAILED: TROUBLE,
    FailReason.PEER_LOST: TROUBLE,
    FailReason.PEER_FENCED: TROUBLE,
    FailReason.NO_PEER: TROUBLE,
    FailReason.OVERLOADED: TROUBLE,
    FailReason.DRAINING: frozenset({FaultKind.DRAIN}),
    FailReason.INCOMPATIBLE: frozenset({FaultKind.MISFIT}),
    FailReason.NUMERICAL: frozenset({FaultKind.NON_FINITE}),
}
"""Fail reason |-> faults that explain it. A reason without a row is explained by nothing around a request: a damaged
frame never gets past its checksum, so nobody may take a good grant for a bad one."""

FLAWS: Mapping[FailReason, frozenset[FaultKind]] = {
    FailReason.CANCELLED: frozenset({FaultKind.CLIENT_LEAVES}),
    FailReason.DEADLINE: frozenset({FaultKind.SHORT_DEADLINE}),
    FailReason.OVERLOADED: frozenset({FaultKind.SHORT_DEADLINE}),
    FailReason.TOO_LONG: frozenset({FaultKind.BAD_INPUT}),
}
"""Fail reason |-> what is odd about a request that fails so."""


def is_explained(reason: FailReason, struck: Container[FaultKind], flaws: Container[FaultKind]) -> bool:
    """Whether a failure is explained. `struck`: faults of the run so far; `flaws`: what is odd about the request."""
    around, own = EXPLANATIONS.get(reason, frozenset()), FLAWS.get(reason, frozenset())
    return any(kind in struck for kind in around) or any(kind in flaws for kind in own)
