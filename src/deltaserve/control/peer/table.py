"""The peers of one process: a transition table, boots, heartbeats.

    UNKNOWN --greet--> GREETING --hello--> READY --lose--> LOST --greet--> GREETING
    a Hello may also come first (the other side dialled):  UNKNOWN / LOST --hello--> READY
    refuse (unequal compat fields) leads to REFUSED, which only a Hello of a new boot leaves.

Everything known about a peer dies with its boot. Boots are ordered: a later one is believed at once, and frames of an
earlier one, which may arrive late over another connection, change nothing. Where a start is not known to be over, and
the present one has been silent for long, an earlier number is believed as well: the clock it was made of may have been
set back.

Silence is weak evidence: a machine with too much to do is silent as well, and so is everybody to a process that stood
still itself. So a peer whose connection stands is given long, one whose connection broke little, and time in which this
process did not get its turn counts against nobody (local pause detection: CASSANDRA-9183).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.machine import advance
from deltaserve.core.wire.messages import Envelope, Hello, Message, RankEnd


class PeerState(Enum):
    UNKNOWN = "unknown"
    GREETING = "greeting"
    """Our Hello is on its way; theirs has not come."""
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"


class PeerEvent(Enum):
    GREET = "greet"
    HELLO = "hello"
    REFUSE = "refuse"
    LOSE = "lose"


PEER_TRANSITIONS: dict[PeerState, dict[PeerEvent, PeerState]] = {
    PeerState.UNKNOWN: {
        PeerEvent.GREET: PeerState.GREETING,
        PeerEvent.HELLO: PeerState.READY,
        PeerEvent.REFUSE: PeerState.REFUSED,
    },
    PeerState.GREETING: {
        PeerEvent.GREET: PeerState.GREETING,
        PeerEvent.HELLO: PeerState.READY,
        PeerEvent.REFUSE: PeerState.REFUSED,
        PeerEvent.LOSE: PeerState.LOST,
    },
    PeerState.READY: {
        PeerEvent.GREET: PeerState.GREETING,
        PeerEvent.HELLO: PeerState.READY,
        PeerEvent.REFUSE: PeerState.REFUSED,
        PeerEvent.LOSE: PeerState.LOST,
    },
    PeerState.REFUSED: {
        PeerEvent.HELLO: PeerState.READY,
        PeerEvent.REFUSE: PeerState.REFUSED,
        PeerEvent.LOSE: PeerState.LOST,
    },
    PeerState.LOST: {
        PeerEvent.GREET: PeerState.GREETING,
        PeerEvent.HELLO: PeerState.READY,
        PeerEvent.REFUSE: PeerState.REFUSED,
    },
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How much silence is borne, in seconds."""

    lost_s: float
    """Silence after which a peer is lost whose connection stands, as far as we know."""
    suspect_s: float
    """Silence after which a peer is lost whose connection broke; where it stands, others are preferred to this peer."""


@dataclass(slots=True)
class Peer:
    """What is known of one peer."""

    name: PeerName
    state: PeerState = PeerState.UNKNOWN
    boot: Boot | None = None
    hello: Hello | None = None
    last_heard: float = 0.0
    broken_since: float | None = None
    """When its connection ended; None: it was heard of since."""
    over: Boot | None = None
    """The latest boot that is known to have ended, and with it all before it."""

    @property
    def is_ready(self) -> bool:
        return self.state is PeerState.READY

    @property
    def role(self) -> str:
        """As it said; empty: it said nothing yet."""
        return self.hello.role if self.hello is not None else ""

    @property
    def ends(self) -> tuple[RankEnd, ...]:
        """The ends of its ranks, as it said."""
        return self.hello.ends if self.hello is not None else ()


class PeerTable:
    """All peers of the process `name`, which runs as `boot`."""

    def __init__(self, name: PeerName, boot: Boot, patience: Patience) -> None:
        self.name = name
        self.boot = boot
        self._patience = patience
        self._peers: dict[PeerName, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, name: object) -> bool:
        return name in self._peers

    def get(self, name: PeerName) -> Peer:
        """The peer of that name, made on first use."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name)
        return peer

    def forget(self, name: PeerName) -> None:
        self._peers.pop(name, None)

    def move(self, peer: Peer, event: PeerEvent) -> None:
        """Raises StateError for an event the table has no cell for; nothing changes then."""
        peer.state = advance(PEER_TRANSITIONS, peer.state, event, f"peer {peer.name}")

    def heard(self, peer: Peer, now: float) -> None:
        """A frame of the peer's present life came: its connection stands."""
        peer.last_heard, peer.broken_since = now, None

    def is_over(self, peer: Peer, boot: Boot, now: float) -> bool:
        """Whether a frame of that process start of the peer comes too late: the start is over, as far as we know."""
        if peer.over is not None and boot <= peer.over:
            return True
        is_earlier = peer.boot is not None and boot < peer.boot
        return is_earlier and now - peer.last_heard < self._patience.lost_s

    def rebooted(self, peer: Peer, boot: Boot, now: float) -> None:
        """`boot` is the peer's process start from now on. State UNKNOWN again."""
        peer.boot, peer.hello, peer.state = boot, None, PeerState.UNKNOWN
        self.heard(peer, now)

    def bury(self, peer: Peer) -> None:
        """The peer's current boot is known to be over, and with it all before it: their frames are ignored now."""
        if peer.boot is not None:
            peer.over = peer.boot if peer.over is None else max(peer.over, peer.boot)
            peer.boot, peer.hello = None, None

    def broke(self, peer: PeerName, now: float) -> None:
        """The connection to a peer ended. Later ones may end too, before anything came over them: the first counts."""
        known = self._peers.get(peer)
        if known is not None and known.broken_since is None:
            known.broken_since = now

    def discount_pause(self, pause_s: float, now: float) -> None:
        """Do not count a pause of this process as silence: it heard of nobody meanwhile, and cannot say that nobody
        spoke."""
        for peer in self._peers.values():
            peer.last_heard = min(now, peer.last_heard + pause_s)
            if peer.broken_since is not None:
                peer.broken_since = min(now, peer.broken_since + pause_s)

    def lost_at(self, peer: Peer) -> float:
        """When the peer is lost if it stays silent."""
        when = peer.last_heard + self._patience.lost_s
        return when if peer.broken_since is None else min(when, peer.broken_since + self._patience.suspect_s)

    def is_suspect(self, peer: Peer, now: float) -> bool:
        return now - peer.last_heard > self._patience.suspect_s

    def silent(self, now: float) -> list[Peer]:
        """Peers, ready or in a handshake, that are to be given up."""
        live = (PeerState.READY, PeerState.GREETING)
        return [p for p in self._peers.values() if p.state in live and now >= self.lost_at(p)]

    def seal(self, peer: PeerName, body: Message, closed_below: int = 1) -> Envelope:
        """Address a message: to the peer's known boot; a Hello may go to an unknown one."""
        boot = self.get(peer).boot
        return Envelope(src=self.name, src_boot=self.boot, dst_boot=boot, closed_below=closed_below, body=body)
