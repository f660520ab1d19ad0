"""What a control plane (an instance, or the front) and its links say to each other.

Events go in, actions come out; the driver performs every action in order. Nothing here blocks or opens a socket.
"""

from dataclasses import dataclass

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Envelope, PeerAddress


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A decoded frame from any link."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class PeerDied:
    """Tells that a peer's process was seen to end (not a missed heartbeat, which the control plane notices)."""

    peer: PeerName


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The connection dialled to the peer ended. The link dials again by itself: only silence from now on means much."""

    peer: PeerName


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send over the link to `peer` (dialled, or learned from the peer's Hello). Dropped when there is none."""

    peer: PeerName
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to a peer's listener; idempotent. The link reconnects by itself until HangUp."""

    address: PeerAddress


@dataclass(frozen=True, slots=True)
class HangUp:
    """Forget the link to `peer`."""

    peer: PeerName


LinkEvent = FrameIn | PeerDied | LinkBroken
LinkAction = SendFrame | Dial | HangUp
