"""Transport inside one process: the fake that tests and the fault simulator run on. No threads, no clock, no chance.

All transports of one world share a `Fabric`. A posted write becomes dated events (bytes land, the notification arrives,
the writer is told); they happen when someone calls `Fabric.advance`, or polls at or after their time. What becomes of a
write is decided once, when it is posted, by a policy that returns a `Fate`: plain data, so any disorder that a real
transport has shown (and worse) is one value.

As on the real ones: source memory is read as late as possible until the writer was told DONE or destroyed its endpoint
(from then on the bytes are on their way and still land), and only the receiver's own fence stops what is on its way.
Where readers copy (`Mover.READER`, as transports/local/transport.py does) a stopped reader that goes on reads source
memory also after its writer's fence; what was copied then is not announced.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import (
    Evidence,
    FenceResult,
    Notification,
    RemoteRank,
    RemoteRegion,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.core.transport_bounds import check_ranks, check_write, index_remote


class Mover(Enum):
    """Who moves the bytes of a write: what a fence of the writer does to what it has posted."""

    WRITER = "writer"
    """What has left lands, as it was then."""
    READER = "reader"
    """The bytes are read when they land, whatever is there; but the reader notices and announces nothing."""


class Part(NamedTuple):
    """`after_s` seconds after the post the first `num_copies` copies have landed (None: all of them)."""

    after_s: float
    num_copies: int | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one write. Times in seconds after the post; None: never. The default is the perfect write."""

    lands: tuple[Part, ...] = (Part(0.0),)
    notified_s: float | None = 0.0
    """Arrival of the notification. Before the last part: a notification that overtook its data."""
    told_s: float | None = 0.0
    """When the writer learns `told`. Before the last part: a completion that proves nothing."""
    told: WriteState = WriteState.DONE


@dataclass(frozen=True, slots=True)
class Posted:
    """What a policy may decide by."""

    src: PeerName
    dst: PeerName
    write: WriteId
    num_copies: int
    num_bytes: int
    now: float


Policy = Callable[[Posted], Fate | None]
"""None: the post is refused (TransportError), nothing was started."""


def prompt(posted: Posted) -> Fate:
    """The policy of a healthy link: everything at once, in order."""
    return Fate()


@dataclass(frozen=True, slots=True)
class WriteArrival:
    """Bytes arrived at `dst`. `dropped`: its endpoint was gone, so they did not enter its memory."""

    src: PeerName
    dst: PeerName
    write: WriteId
    copies: tuple[Copy, ...]
    dropped: bool
    reads_source: bool
    """The bytes were read just now, and count: the source had to be in place until here."""
    is_void: bool
    """Whether the reader's copy found that the writer had fenced it: then it counts for nothing."""
    writer: "LoopbackTransport"
    reader: "LoopbackTransport"


Observer = Callable[[WriteArrival], None]
"""Called with every landing, also with those that happen inside a `poll`."""


def ignore(landed: WriteArrival) -> None:
    """The observer of a world nobody watches."""


def nothing() -> None:
    """The wake-up of whoever polls anyway."""


class _What(Enum):
    LAND = "land"
    NOTIFY = "notify"
    TELL = "tell"


@dataclass(slots=True)
class _Endpoint:
    """One side of a pair, from `open` to `fence`."""

    token: int
    owner: "LoopbackTransport"
    peer: PeerName
    fars: "tuple[_Far, ...]" = ()
    """Endpoints of the peer's ranks; empty until attached."""
    is_open: bool = True
    over_at: float | None = None
    """Where readers copy: when its epoch word changed."""
    inbox: list[tuple["_Endpoint", bytes]] = field(default_factory=list)
    """(sender, notification); read only once the sender is attached."""

    def stands(self, now: float) -> bool:
        """What its epoch word says."""
        return self.over_at is None or now < self.over_at


class _Far(NamedTuple):
    """A rank of the peer."""

    endpoint: _Endpoint
    regions: dict[RegionId, RemoteRegion]


@dataclass(slots=True)
class _Write:
    id: WriteId
    near: _Endpoint
    far: _Endpoint
    copies: tuple[Copy, ...]
    notification: bytes | None
    state: WriteState = WriteState.PENDING
    num_landed: int = 0
    payload: tuple[bytes, ...] | None = None
    """The source bytes, once nothing reads the source any more."""
    is_void: bool = False
    """Whether the reader's copy found that the writer had fenced it."""

    def capture(self) -> None:
        if self.payload is None:
            self.payload = tuple(self._source(copy) for copy in self.copies)

    def bytes_of(self, index: int) -> bytes:
        return self._source(self.copies[index]) if self.payload is None else self.payload[index]

    def _source(self, copy: Copy) -> bytes:
        span = copy.src
        return bytes(self.near.owner.memory[span.region][span.offset : span.offset + span.num_bytes])


class _Event(NamedTuple):
    due: float
    seq: int
    what: _What
    write: _Write
    end: int
    """How many copies a LAND brings: [0, end) are there afterwards."""
    told: WriteState


class Fabric:
    """The world between the transports: virtual time and everything that is on its way."""

    def __init__(self, policy: Policy = prompt, observer: Observer = ignore, mover: Mover = Mover.WRITER) -> None:
        self.policy = policy
        """May be replaced at any time; holds for writes posted from then on."""
        self.now = 0.0
        self._observer = observer
        self._mover = mover
        self._events: list[_Event] = []
        self._seq = itertools.count()
        self._tokens = itertools.count(1)
        self._endpoints: dict[int, _Endpoint] = {}

    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`, in order of time, then of posting; time never goes back."""
        while self._events and self._events[0].due <= now:
            self.step()
        self.now = max(self.now, now)

    def step(self) -> None:
        """Let the next event happen, whenever it is due. Raises IndexError when nothing is on its way."""
        event = heapq.heappop(self._events)
        self.now = max(self.now, event.due)
        self._happen(event)

    def next_due(self) -> float | None:
        """Time of the next event; None when nothing is on its way."""
        return self._events[0].due if self._events else None

    def on_its_way(self) -> list[tuple[str, WriteId]]:
        """What will happen to which write, in order."""
        return [(event.what.value, event.write.id) for event in sorted(self._events)]

    def _open(self, owner: "LoopbackTransport", peer: PeerName) -> _Endpoint:
        endpoint = _Endpoint(next(self._tokens), owner, peer)
        self._endpoints[endpoint.token] = endpoint
        return endpoint

    def _find(self, token: int) -> _Endpoint | None:
        return self._endpoints.get(token)

    def _close(self, endpoint: _Endpoint) -> None:
        endpoint.is_open = False
        del self._endpoints[endpoint.token]
        if self._mover is Mover.READER:
            endpoint.over_at = self.now
            return
        for event in self._events:
            if event.write.near is endpoint:
                event.write.capture()

    def hasten(self, reader: "LoopbackTransport", due: float, now: float) -> None:
        """What waited for `due`, when the reader's process was to go on, happens now."""
        waiting = [e for e in self._events if e.write.far.owner is reader and e.due == due > now]
        for event in waiting:
            self._events.remove(event)
        heapq.heapify(self._events)
        for event in sorted(waiting):
            heapq.heappush(self._events, event._replace(due=now))

    def sever(self, owner: "LoopbackTransport", after_s: float) -> None:
        """The process of `owner` is over. What is due within `after_s` had left it and still happens; no more does."""
        last = self.now + after_s
        self._events = [e for e in self._events if e.write.near.owner is not owner or e.due <= last]
        heapq.heapify(self._events)
        for event in self._events:
            if event.write.near.owner is owner:
                event.write.capture()  # its memory stands still from now on
        owner.close()

    def _post(self, write: _Write, fate: Fate) -> None:
        for part in fate.lands:
            end = len(write.copies) if part.num_copies is None else min(part.num_copies, len(write.copies))
            self._schedule(part.after_s, _What.LAND, write, end)
        if fate.notified_s is not None and write.notification is not None:
            self._schedule(fate.notified_s, _What.NOTIFY, write)
        if fate.told_s is not None:
            self._schedule(fate.told_s, _What.TELL, write, told=fate.told)

    def _schedule(
        self, after_s: float, what: _What, write: _Write, end: int = 0, told: WriteState = WriteState.DONE
    ) -> None:
        heapq.heappush(self._events, _Event(self.now + after_s, next(self._seq), what, write, end, told))

    def _happen(self, event: _Event) -> None:
        write = event.write
        stopped_until = write.far.owner.stopped_until
        if self._mover is Mover.READER and stopped_until > self.now:
            heapq.heappush(self._events, event._replace(due=stopped_until, seq=next(self._seq)))
            return
        if event.what is _What.LAND:
            self._land(write, event.end)
        elif event.what is _What.NOTIFY:
            if write.far.is_open and write.notification is not None and not write.is_void:
                write.far.inbox.append((write.near, write.notification))
                write.far.owner.on_news()
        elif write.near.is_open:
            if event.told is WriteState.DONE:
                write.capture()
            write.state = event.told if write.far.is_open else WriteState.ERROR
            write.near.owner.on_news()

    def _land(self, write: _Write, end: int) -> None:
        first, write.num_landed = write.num_landed, max(write.num_landed, end)
        copies = write.copies[first : write.num_landed]
        if not copies:
            return
        far = write.far
        can_stop = far.owner.fence_result is FenceResult.CLOSED or self._mover is Mover.READER
        dropped = not far.is_open and can_stop
        if not dropped:
            for index, copy in enumerate(copies, first):
                span = copy.dst
                far.owner.memory[span.region][span.offset : span.offset + span.num_bytes] = write.bytes_of(index)
        write.is_void = write.payload is None and not write.near.stands(self.now)
        is_copied = self._mover is Mover.WRITER or not dropped
        reads_source = write.payload is None and is_copied and not write.is_void
        near, reader = write.near.owner, far.owner
        arrival = WriteArrival(near.me, reader.me, write.id, copies, dropped, reads_source, write.is_void, near, reader)
        self._observer(arrival)


class LoopbackTransport:
    """`Transport` between bytearrays of one process.

    `fence_result` IMPOSSIBLE plays shared memory with a live writer: bytes land although the endpoint is gone.
    """

    def __init__(
        self,
        me: PeerName,
        fabric: Fabric,
        memory: dict[RegionId, bytearray],
        fence_result: FenceResult = FenceResult.CLOSED,
        evidence: Evidence = Evidence.COMPLETION,
    ) -> None:
        """`memory` holds the bytes of every region that will be registered; region addresses play no part."""
        self.me = me
        self.memory = memory
        self.fence_result = fence_result
        self.evidence = evidence
        self._fabric = fabric
        self._regions: dict[RegionId, Region] = {}
        self._endpoints: dict[PeerName, _Endpoint] = {}
        self._writes: dict[WriteId, _Write] = {}
        self._fenced: set[PeerName] = set()
        self.stopped_until = 0.0
        """Time before which its process does nothing: where readers copy, nothing arrives."""
        self.on_news: Callable[[], None] = nothing
        """Called when a poll would find something."""
        self._write_ids = itertools.count(1)
        self._closed = False

    def go_on(self, now: float) -> None:
        """Let a stopped process go on, perhaps earlier than planned."""
        until, self.stopped_until = self.stopped_until, min(self.stopped_until, now)
        self._fabric.hasten(self, until, now)

    def register(self, region: Region) -> None:
        if self._endpoints:
            raise TransportError(f"register region {region.id}: an endpoint is open already")
        if region.id in self._regions or not 0 < region.num_bytes <= len(self.memory.get(region.id, b"")):
            raise TransportError(f"register region {region.id}: id in use, or no memory")
        self._regions[region.id] = region

    def open(self, peer: PeerName) -> bytes:
        if self._closed or peer in self._endpoints:
            raise TransportError(f"open {peer}: the transport is closed or has an endpoint for it")
        endpoint = self._endpoints[peer] = self._fabric._open(self, peer)
        return b"loopback:%d" % endpoint.token

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.fars:
            raise TransportError(f"attach to {peer}: its endpoint is not open, or attached already")
        check_ranks(peer, ranks)
        endpoint.fars = tuple(self._far(endpoint, rank) for rank in ranks)

    def _far(self, endpoint: _Endpoint, rank: RemoteRank) -> _Far:
        kind, _, token = rank.metadata.partition(b":")
        far = self._fabric._find(int(token)) if kind == b"loopback" and token.isdigit() else None
        if far is None or far is endpoint:
            raise TransportError(f"attach to {endpoint.peer}: this is not the metadata of an open loopback endpoint")
        return _Far(far, index_remote(endpoint.peer, rank.regions))

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not 0 <= rank < len(endpoint.fars):
            raise TransportError(f"write to {peer}: its endpoint is not attached, or has no rank {rank}")
        far = endpoint.fars[rank]
        check_write(peer, copies, notification, self._regions, far.regions)
        write = _Write(WriteId(next(self._write_ids)), endpoint, far.endpoint, tuple(copies), notification)
        num_bytes = sum(copy.src.num_bytes for copy in copies)
        fate = self._fabric.policy(Posted(self.me, peer, write.id, len(copies), num_bytes, self._fabric.now))
        if fate is None:
            raise TransportError(f"write to {peer}: refused")
        self._fabric._post(write, fate)
        self._writes[write.id] = write
        return write.id

    def poll(self, write: WriteId) -> WriteState:
        self._fabric.advance(self._fabric.now)
        posted = self._writes.get(write)
        if posted is None:
            return WriteState.ERROR
        if posted.state is not WriteState.PENDING:
            del self._writes[write]
        return posted.state

    def notifications(self) -> list[Notification]:
        self._fabric.advance(self._fabric.now)
        out: list[Notification] = []
        for peer, endpoint in self._endpoints.items():
            if endpoint.fars and endpoint.inbox:
                ranks = {id(far.endpoint): rank for rank, far in enumerate(endpoint.fars)}
                arrived = ((message, ranks.get(id(sender))) for sender, message in endpoint.inbox)
                out += [Notification(peer, message, rank) for message, rank in arrived if rank is not None]
                endpoint.inbox.clear()
        return out

    def fence(self, peer: PeerName) -> FenceResult:
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            self._writes = {id: write for id, write in self._writes.items() if write.near is not endpoint}
            self._fabric._close(endpoint)
            self._fenced.add(peer)
        return self.fence_result if peer in self._fenced else FenceResult.CLOSED

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.fence(peer)
        self._regions.clear()
        self._closed = True
