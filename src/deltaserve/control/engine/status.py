"""Where a room is in its life, per role. Every move goes through `core.machine.advance` on these tables."""

from enum import Enum

from deltaserve.core.machine import Table


class PrefillState(Enum):
    QUEUED = "queued"
    """The offer is accepted; the room holds nothing."""
    COMPUTING = "computing"
    """Has a row and all pages of its prompt."""
    AHEAD = "ahead"
    """Computed, not granted yet: leases its pages in the tree, as long as nobody needs their memory more."""
    SENDING = "sending"
    """Computed and granted: the last chunks are on their way."""
    ENDED = "ended"


class PrefillEvent(Enum):
    START = "start"
    COMPUTE_AHEAD = "compute ahead"
    """The prompt is computed and no grant has come."""
    SEND = "send"
    """Computed and granted, in whichever order."""
    YIELD = "yield"
    """Somebody needs the memory: at its grant it is a cache hit, as far as the tree still has it."""
    END = "end"


PREFILL_TABLE: Table[PrefillState, PrefillEvent] = {
    PrefillState.QUEUED: {PrefillEvent.START: PrefillState.COMPUTING, PrefillEvent.END: PrefillState.ENDED},
    PrefillState.COMPUTING: {
        PrefillEvent.COMPUTE_AHEAD: PrefillState.AHEAD,
        PrefillEvent.SEND: PrefillState.SENDING,
        PrefillEvent.YIELD: PrefillState.QUEUED,
        PrefillEvent.END: PrefillState.ENDED,
    },
    PrefillState.AHEAD: {
        PrefillEvent.SEND: PrefillState.SENDING,
        PrefillEvent.YIELD: PrefillState.QUEUED,
        PrefillEvent.END: PrefillState.ENDED,
    },
    PrefillState.SENDING: {PrefillEvent.END: PrefillState.ENDED},
    PrefillState.ENDED: {},
}


class DecodeState(Enum):
    OFFERED = "offered"
    """Prefix leased, prefill asked (or about to be, once its link is ready)."""
    STARTED = "started"
    """Prefill computes; waits for memory here, or for another room's transfer of the same pages."""
    GRANTED = "granted"
    """A ticket is open: prefill may write."""
    VERIFYING = "verifying"
    """All chunks were announced; their checksums, if there are any, are being compared."""
    QUEUED = "queued"
    """The request is in the scheduler: to be computed here, or landed and waiting for a row."""
    RUNNING = "running"
    RETRACTED = "retracted"
    """Gave its memory back; resumes by a new attempt or by extending here."""
    ENDED = "ended"


class DecodeEvent(Enum):
    OFFER = "offer"
    START = "start"
    GRANT = "grant"
    LAND = "land"
    QUEUE = "queue"
    RUN = "run"
    RETRACT = "retract"
    LOCAL = "local"
    """A resumed room's attempt failed: it is computed here instead."""
    END = "end"


_D, _E = DecodeState, DecodeEvent

DECODE_TABLE: Table[DecodeState, DecodeEvent] = {
    _D.OFFERED: {
        _E.START: _D.STARTED,
        _E.QUEUE: _D.QUEUED,
        _E.LOCAL: _D.RETRACTED,
        _E.END: _D.ENDED,
    },
    _D.STARTED: {_E.GRANT: _D.GRANTED, _E.LOCAL: _D.RETRACTED, _E.END: _D.ENDED},
    _D.GRANTED: {_E.LAND: _D.VERIFYING, _E.LOCAL: _D.RETRACTED, _E.END: _D.ENDED},
    _D.VERIFYING: {_E.QUEUE: _D.QUEUED, _E.LOCAL: _D.RETRACTED, _E.END: _D.ENDED},
    _D.QUEUED: {_E.RUN: _D.RUNNING, _E.END: _D.ENDED},
    _D.RUNNING: {_E.RETRACT: _D.RETRACTED, _E.END: _D.ENDED},
    _D.RETRACTED: {_E.OFFER: _D.OFFERED, _E.QUEUE: _D.QUEUED, _E.END: _D.ENDED},
    _D.ENDED: {},
}
