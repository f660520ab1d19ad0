"""What a frame is to the process that it reached, by boots, Hellos and answers of "not ready".

    of a process start that is over                    STALE          nothing
    for a start of ours that is over, and no Hello     MISADDRESSED   its sender hears who is here now
    a Hello                                            HELLO          take it, answer it, or refuse it
    of somebody we are not ready with                  UNGREETED      it hears that, or is greeted
    the same, and it is not ready either               BOTH_UNREADY   no answer: it would be answered with the same
    "not ready", of one that we are ready with         LEFT           it has forgotten us: greet it again
    anything else                                      CURRENT        whoever owns what it is about deals with it

A frame of a start that is not known yet begins a new life of its peer: what was held for the former one is over.
"""

from enum import Enum
from typing import NamedTuple

from deltaserve.control.peer.table import Peer, PeerState, PeerTable
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import Envelope, Heartbeat, Hello, Message

NOT_READY = Heartbeat(is_ready=False)


class Saying(Enum):
    """What kind of message a frame holds."""

    HELLO = "hello"
    NOT_READY = "not_ready"
    ELSE = "else"


class Reception(Enum):
    """What a frame is: see above."""

    STALE = "stale"
    MISADDRESSED = "misaddressed"
    HELLO = "hello"
    UNGREETED = "ungreeted"
    BOTH_UNREADY = "both_unready"
    LEFT = "left"
    CURRENT = "current"


_UNREADY = {
    Saying.HELLO: Reception.HELLO,
    Saying.NOT_READY: Reception.BOTH_UNREADY,
    Saying.ELSE: Reception.UNGREETED,
}
RECEPTIONS: dict[PeerState, dict[Saying, Reception]] = {
    PeerState.UNKNOWN: _UNREADY,
    PeerState.GREETING: _UNREADY,
    PeerState.READY: {
        Saying.HELLO: Reception.HELLO,
        Saying.NOT_READY: Reception.LEFT,
        Saying.ELSE: Reception.CURRENT,
    },
    PeerState.REFUSED: _UNREADY,
    PeerState.LOST: _UNREADY,
}
"""Frames that are neither stale nor misaddressed: state of their peer |-> what they say |-> what they are."""


class Received(NamedTuple):
    """A frame's peer, and what the frame is."""

    peer: Peer
    reception: Reception
    is_new: bool = False
    """It is the first one of this process start."""
    former_role: str | None = None
    """What the peer was in its former life, which is over; empty: it never said. None: it had none, or is in it."""
    was_broken: bool = False
    """The connection to the peer had ended: frames of both sides may be lost."""

    @property
    def is_gone(self) -> bool:
        """Whether everything held for the peer's former life is over."""
        return self.former_role is not None


def _saying(body: Message) -> Saying:
    if isinstance(body, Hello):
        return Saying.HELLO
    return Saying.NOT_READY if body == NOT_READY else Saying.ELSE


class Handshake:
    """Receives the frames of all peers of one process."""

    def __init__(self, table: PeerTable) -> None:
        self.table = table
        self.num_ignored = 0
        """Frames that are stale, misaddressed, or of strangers."""

    def ignore(self) -> None:
        """A frame is not looked at, whatever it is."""
        self.num_ignored += 1

    def receive(self, envelope: Envelope, now: float) -> Received:
        """Judge a frame; a new life of its peer has begun when this returns."""
        peer, saying = self.table.get(PeerName(envelope.src)), _saying(envelope.body)
        was_broken = peer.broken_since is not None
        boot = Boot(envelope.src_boot)
        if self.table.is_over(peer, boot, now):
            self.ignore()
            return Received(peer, Reception.STALE)
        if envelope.dst_boot != self.table.boot and saying is not Saying.HELLO:
            self.ignore()
            return Received(peer, Reception.MISADDRESSED)
        is_new, former_role = peer.boot != boot, None
        if is_new:
            former_role = peer.role if peer.boot is not None else None
            self.table.rebooted(peer, boot, now)
        else:
            self.table.heard(peer, now)
        return Received(peer, RECEPTIONS[peer.state][saying], is_new, former_role, was_broken)
