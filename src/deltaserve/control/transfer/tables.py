"""SENDER and RECEIVER: the two halves of a ticket's life. Read with docs/safety: a timer ends requests, never memory.

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
