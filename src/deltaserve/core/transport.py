"""The seam between the transfer protocol and whatever moves bytes.

A transport only moves bytes. It never decides, retries, times out or frees. Everything about tickets, gates, windows
and failure exists once, above it (control/transfer). All methods are called from one thread, the transfer thread.

One *endpoint* per peer: destroying it is the fence against that peer and disturbs no other (measured; see
docs/safety of the project: removing a peer's metadata or deregistering memory is NOT a fence). A peer is a worker: it
may have several ranks, processes with an endpoint and regions each. Ours is attached to all of them, and its end is
the fence against all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType, Protocol

from deltaserve.core.errors import DeltaserveError
from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import PeerName

WriteId = NewType("WriteId", int)
"""One posted write, unique within a transport object."""

MAX_METADATA_BYTES = 64 << 10
"""What `open` returns, and the most `attach` accepts."""
MAX_NOTIFICATION_BYTES = 1 << 20
"""A Done frame is far smaller; the wire's limit for one is the same."""


class TransportError(DeltaserveError):
    """The library refused or failed; the text names peer and operation."""


class WriteState(Enum):
    """What is known of a posted write. ERROR proves nothing about the bytes: they may still land."""

    PENDING = "pending"
    DONE = "done"
    ERROR = "error"


class FenceResult(Enum):
    """CLOSED: from now on no byte of that peer can land. IMPOSSIBLE: the pages must stay quarantined."""

    CLOSED = "closed"
    IMPOSSIBLE = "impossible"


class Evidence(Enum):
    """What proves that bytes have landed.

    COMPLETION: a write seen DONE has landed in full, and so has the data before its notification.
    CONTENTS: neither is taken as proof: pages count as landed when their checksums are right, and only a fence gives
    back what a posted write may still touch. A page may hold the very bytes already, from an earlier life: where a
    notification can overtake its data a reader must wipe what it grants.
    """

    COMPLETION = "completion"
    CONTENTS = "contents"


class Sharing(Enum):
    """Who may map a block of CPU memory. The kernel gives huge pages to private memory more readily."""

    PRIVATE = "private"
    PROCESSES = "processes"
    """Also a process to which the block's file is handed: a transport whose library runs in a child process."""
    READERS = "readers"
    """Processes to which the block's file is handed, but to read only; nobody can change its size."""


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region as announced in its Hello."""

    id: int
    base: int
    num_bytes: int
    device: str


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """One rank of a peer: what its endpoint's `open` returned, and where we may write."""

    metadata: bytes
    regions: tuple[RemoteRegion, ...] = ()


class Notification(NamedTuple):
    """Announced with a write of a peer."""

    peer: PeerName
    data: bytes
    rank: int = 0
    """Rank of the peer whose endpoint wrote, as the transport knows it."""


class Transport(Protocol):
    """Moves bytes from this side's regions into a peer's regions.

    Life of an endpoint: `open` (returns metadata for the peer) -> `attach` (the peer's metadata) -> `write` ... ->
    `fence`. After `fence` the same name may be opened again.
    """

    @property
    def evidence(self) -> Evidence:
        """What this transport's DONE and notifications are worth."""
        ...

    def register(self, region: Region) -> None:
        """Make a region reachable. Called before the first `open`; the memory outlives the transport."""
        ...

    def open(self, peer: PeerName) -> bytes:
        """Create this side's endpoint for `peer`; returns opaque metadata (<= 64 KiB) the peer needs to attach.

        Raises TransportError if one is open: fence it first. After a fence the peer needs the new metadata: neither
        side can go on with what it knew of the old endpoint.
        """
        ...

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        """Tell the endpoint who is on the other side, once: all ranks of the peer, in order.

        Raises TransportError if any of the metadata is unusable; then nobody is attached.
        """
        ...

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        """Start writing to a rank of the peer, in its regions. When all bytes are visible there, that rank receives
        `notification` (None: no announcement).

        Never waits for the peer, but may move bytes while the wire takes them: a call has lasted 70 ms for 64 MiB on a
        busy machine, with the interpreter lock released; `poll` likewise.

        Zero copies are legal: only the notification travels. Raises TransportError if nothing was started: also for
        spans outside a region, unequal lengths, an empty notification, neither copies nor a notification. If it is not
        known whether anything was started, the returned write reads ERROR.
        """
        ...

    def poll(self, write: WriteId) -> WriteState:
        """State of a write; also drives progress. Never raises. DONE and ERROR are final and forget the write.

        A write that is not known (no longer: it was reported final, or its endpoint is gone) reads ERROR.
        """
        ...

    def notifications(self) -> list[Notification]:
        """Notifications that arrived, each after its data; also drives progress (over TCP nothing lands without)."""
        ...

    def fence(self, peer: PeerName) -> FenceResult:
        """Destroy this side's endpoint for `peer` and wait until it is gone. Idempotent; never raises.

        CLOSED holds for both directions: no byte of the peer lands here, and nothing that is read of source memory from
        now on counts for anything at the peer.
        Pending writes to the peer read ERROR. IMPOSSIBLE is remembered: fencing that name again says it again.
        """
        ...

    def close(self) -> None:
        """Destroy all endpoints and deregister all regions."""
        ...
