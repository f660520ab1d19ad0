"""SENDER and RECEIVER: the two halves of a ticket's life; STAGED_WRITE and STAGED_LEASE: those of a staged write's.

Read with docs/safety: a timer ends requests, never memory.

Receiver (reader of the pages, who owns them):
    OPEN     the writer may write; pages GRANTED
    LANDED   every chunk was announced; checksums, if any, are being verified
    DONE     pages OWNED by the request                                    (end)
    REVOKED  pages QUARANTINED until a clean Drained, a complete Done or a fence
    CLOSED   pages FREE again                                              (end)
Sender (writer):
    OPEN     chunks may be posted
    CLOSING  gate closed, writes outstanding
    DIRTY    a write failed: bytes may land until this side's endpoint is gone
    SENT     everything was seen DONE                                      (end)
    DRAINED  gate closed, nothing outstanding                              (end)
Staged write (writer; a fence drops it in any state):
    ASKING | LENT | GATHERED   neither lease nor gathered bytes, the one, the other
    WRITING -> WRITTEN | ACKED -> DONE   with both: seen DONE by the transport, and scattered, in either order
    DIRECT   no memory here or there: pages are written without
    FAILED   its buffer may be read until the fence                        (end)
Staged lease (reader; a fence drops it in any state):
    WAITING  for room in the ring
    RESERVED | LENT            told to the writer, ahead of its write or for it; nothing came
    ANNOUNCED  bytes came; whether their ticket was granted these pages is not known yet
    LANDING    it was; the bytes are not known to be there
    SCATTERING they are
    KEPT     refused, and bytes may come yet: nobody's until the fence     (end)
    OVER     given back                                                    (end)
"""

from enum import Enum

from deltaserve.core.machine import Table


class ReceiverState(Enum):
    OPEN = "open"
    LANDED = "landed"
    DONE = "done"
    REVOKED = "revoked"
    CLOSED = "closed"


class ReceiverEvent(Enum):
    COMPLETE = "complete"
    """The coverage is complete."""
    ACCEPT = "accept"
    """Checksums are right, or none were announced."""
    REVOKE = "revoke"
    RELEASE = "release"
    """Clean Drained, or a complete Done while revoked, or the peer is fenced."""


_R, _RE = ReceiverState, ReceiverEvent

RECEIVER: Table[ReceiverState, ReceiverEvent] = {
    _R.OPEN: {_RE.COMPLETE: _R.LANDED, _RE.REVOKE: _R.REVOKED},
    _R.LANDED: {_RE.ACCEPT: _R.DONE, _RE.REVOKE: _R.REVOKED},
    _R.DONE: {},
    _R.REVOKED: {_RE.RELEASE: _R.CLOSED},
    _R.CLOSED: {},
}


class SenderState(Enum):
    OPEN = "open"
    CLOSING = "closing"
    DIRTY = "dirty"
    SENT = "sent"
    DRAINED = "drained"


class SenderEvent(Enum):
    SEND_ALL = "send_all"
    """The last chunk was seen DONE."""
    CLOSE = "close"
    """Revoked, or the request ended here."""
    DRAIN = "drain"
    """Nothing outstanding, everything posted was seen DONE."""
    FAIL = "fail"
    """A write failed, or its state is unknown."""
    FENCE = "fence"
    """This side's endpoint is gone."""


_S, _SE = SenderState, SenderEvent

SENDER: Table[SenderState, SenderEvent] = {
    _S.OPEN: {
        _SE.SEND_ALL: _S.SENT,
        _SE.CLOSE: _S.CLOSING,
        _SE.FAIL: _S.DIRTY,
        _SE.FENCE: _S.DRAINED,
    },
    _S.CLOSING: {
        _SE.SEND_ALL: _S.SENT,
        _SE.CLOSE: _S.CLOSING,
        _SE.DRAIN: _S.DRAINED,
        _SE.FAIL: _S.DIRTY,
        _SE.FENCE: _S.DRAINED,
    },
    _S.DIRTY: {_SE.CLOSE: _S.DIRTY, _SE.FAIL: _S.DIRTY, _SE.DRAIN: _S.DIRTY, _SE.FENCE: _S.DRAINED},
    _S.SENT: {},
    _S.DRAINED: {},
}

SENDER_UNREACHABLE = frozenset(
    {(_S.OPEN, _SE.FENCE), (_S.CLOSING, _SE.CLOSE), (_S.DIRTY, _SE.CLOSE), (_S.DIRTY, _SE.DRAIN)}
)
"""Cells that are safe, and that no control plane ever comes to: prefill ends its rooms before it fences, closes a
ticket once, and a dirty gate never drains clean. The simulator asserts that they are never hit."""


class StagedWriteState(Enum):
    ASKING = "asking"
    LENT = "lent"
    GATHERED = "gathered"
    WRITING = "writing"
    WRITTEN = "written"
    ACKED = "acked"
    DIRECT = "direct"
    FAILED = "failed"
    DONE = "done"


class StagedWriteEvent(Enum):
    LEND = "lend"
    GATHER = "gather"
    """All bytes are in its buffer."""
    FALL_BACK = "fall_back"
    """There is no memory, here or there."""
    COMPLETE = "complete"
    """The transport's write was seen DONE."""
    ACK = "ack"
    FAIL = "fail"


_W, _WE = StagedWriteState, StagedWriteEvent

STAGED_WRITE: Table[StagedWriteState, StagedWriteEvent] = {
    _W.ASKING: {_WE.LEND: _W.LENT, _WE.GATHER: _W.GATHERED, _WE.FALL_BACK: _W.DIRECT},
    _W.LENT: {_WE.GATHER: _W.WRITING, _WE.FALL_BACK: _W.DIRECT},
    _W.GATHERED: {_WE.LEND: _W.WRITING, _WE.FALL_BACK: _W.DIRECT},
    _W.WRITING: {_WE.COMPLETE: _W.WRITTEN, _WE.ACK: _W.ACKED, _WE.FAIL: _W.FAILED},
    _W.WRITTEN: {_WE.ACK: _W.DONE},
    _W.ACKED: {_WE.COMPLETE: _W.DONE, _WE.FAIL: _W.FAILED},
    _W.DIRECT: {_WE.COMPLETE: _W.DONE, _WE.FAIL: _W.FAILED},
    _W.FAILED: {},
    _W.DONE: {},
}


class StagedLeaseState(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    LENT = "lent"
    ANNOUNCED = "announced"
    LANDING = "landing"
    SCATTERING = "scattering"
    KEPT = "kept"
    OVER = "over"


class StagedLeaseEvent(Enum):
    ADMIT = "admit"
    """There is room."""
    ASK = "ask"
    """The write that it is reserved for has begun."""
    ANNOUNCE = "announce"
    GRANT = "grant"
    """Its ticket was granted the pages of its plan."""
    LAND = "land"
    KEEP = "keep"
    END = "end"


_L, _LE = StagedLeaseState, StagedLeaseEvent

STAGED_LEASE: Table[StagedLeaseState, StagedLeaseEvent] = {
    _L.WAITING: {_LE.ADMIT: _L.LENT, _LE.END: _L.OVER},
    _L.RESERVED: {_LE.ASK: _L.LENT, _LE.ANNOUNCE: _L.ANNOUNCED, _LE.END: _L.OVER},
    _L.LENT: {_LE.ANNOUNCE: _L.ANNOUNCED, _LE.END: _L.OVER},
    _L.ANNOUNCED: {_LE.GRANT: _L.LANDING, _LE.KEEP: _L.KEPT, _LE.END: _L.OVER},
    _L.LANDING: {_LE.LAND: _L.SCATTERING, _LE.KEEP: _L.KEPT},
    _L.SCATTERING: {_LE.END: _L.OVER},
    _L.KEPT: {},
    _L.OVER: {},
}
