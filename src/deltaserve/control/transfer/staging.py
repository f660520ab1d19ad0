"""The staged path: gather -> one bulk write for each window and pair of ranks -> scatter, below the ticket protocol.

A staged write is a write like any other to whoever posts it (endpoint.py): it has an id, it reads PENDING until every
byte is in its page, then DONE, and the notification bound to it is heard after that. So gates, drains, coverage and
fences hold as they are, and no page of a ticket is written after its clean drain:

- DONE is the reader's word that it has *scattered* (StageAck). A clean Drained, which needs every write seen DONE,
  hence says that no scatter of the ticket is left. A chunk counts when its notification is heard: after the scatter,
  from every writing rank (coverage.py), the last one after all others.
- A fence drops the peer's scatters in the same call that destroys the endpoint: nothing is scattered after it, and
  what still lands, lands in nobody's lease. Where a fence is impossible its leases stay taken, as the pages do.

The writer cuts the plan of a window once: page lists and page groups. It asks for memory first and gathers meanwhile;
the plan travels with the bytes. The reader derives from its own plan of the pair how many bytes that is, and scatters
only what fits the lease that it gave, into pages that the write's ticket was granted and that did not come from that
rank before (staged_grants.py). A plan for anything else is refused whole: its lease is over, it is never answered.

The first write of a ticket finds its lease there already: it is asked for when the ticket's gate opens, once, ahead of
the forward that computes the pages, and again after each chunk for the next one. What is so reserved is at most half of
a ring, and is given back when others wait for it: a slow forward pins no memory.

Each rank has one staging region: one half is its ring for what it receives, the other for what it sends (ring.py). A
lease belongs to one write of one pair of ranks, so nobody holds one while waiting for another. A wait for memory ends:
the reader refuses with a reason after `patience_s`; then, as when a window never fits, the writer gives back what it
has and writes directly, counts it and keeps the reason. Where elements must be converted there is no direct write: that
write ends with an error.

Over a transport whose notifications prove nothing (Evidence.CONTENTS) the plan carries a checksum of the bytes, and
they are scattered once it is right: what is announced is looked at again for `patience_s`. A lease whose bytes never
became right, or were not wanted, ends with the fence, for they may come yet. Checksums of pages are on there, too: a
page that is wrong all the same is never used.

`choose` is the one place that says which path a chunk takes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple, Protocol, Self

from deltaserve.control.transfer.commands import ExpectPages, ForgetPages, TicketId
from deltaserve.control.transfer.ring import ALIGNMENT, StagingRing, StagingTooSmall
from deltaserve.control.transfer.staged_grants import PlanVerdict, StagedGrants
from deltaserve.core.errors import ProtocolError
from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, RegionId, TicketSeq
from deltaserve.core.layout.copy_plan import CachePlan, PlacedPages, Route
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.transport import (
    Evidence,
    FenceResult,
    Notification,
    RemoteRank,
    Transport,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.core.wire.staged_frames import (
    StageAck,
    StageAsk,
    StagedData,
    StagedPages,
    StageFrame,
    StageLease,
    StageRecall,
    StageRefusal,
    StageRelease,
    StageReserve,
    decode_stage,
    encode_stage,
    is_stage_frame,
)

STAGING = "staging"
"""Component of the region that holds a rank's staging memory: the last one it announces, if it has any."""
SHORT_RUN_BYTES = 20 << 10
"""A descriptor costs as much as gathering and scattering so many bytes (benchmarks/bench_staging.py)."""
ASKING_BYTES = 4 << 20
"""Asking for memory and hearing of the scatter take as long as gathering and scattering so many bytes: a short prompt
comes sooner without. From before memory was asked for ahead; `benchmarks/bench_unequal.py --asking 200` takes it anew,
on idle cores: on busy ones it found 2 to 16 ms, for each message waits for a core."""
COUNTERS = (
    "staged_writes",
    "staged_ahead",
    "staged_bytes",
    "scattered_bytes",
    "scatter_microseconds",
    "staging_fallbacks",
    "staging_malformed",
    "staging_refused",
)
"""Writes, those whose lease was there already, bytes written by way of staging memory, and scattered here, and how long
that took; writes that went directly in the end; frames that are none, and plans of what was not granted."""
_AGAIN_S = 0.5
"""An ask without an answer, and a lease of which nothing came, is told again so often: one of the two may be lost, or
was overtaken by the news that nobody needs the lease."""
_LOOK_AGAIN_S = 0.005
"""After announced bytes were not right yet: a look reads them."""
_SLICES_PER_TURN = 4
"""Slices of gathers and scatters moved between two turns of whoever polls."""


class StagingMode(Enum):
    AUTO = "auto"
    """Staged where it is cheaper."""
    ON = "on"
    """Staged wherever two ranks hold different heads."""


class StagedPart(NamedTuple):
    """Pages of one page group that go from one rank to another."""

    group: str
    staged: StagedRoute
    src: PlacedPages
    dst: PlacedPages
    tokens: range
    """Tokens of the prompt that both sides hold."""

    @classmethod
    def of(cls, group: str, staged: StagedRoute, src: PlacedPages, dst: PlacedPages) -> Self:
        return cls(group, staged, src, dst, staged.tokens(src, dst))

    def pages(self, first: int, end: int) -> Self:
        """The part of the reader's pages [first, end), and what fills them."""
        dst = PlacedPages(self.dst.region, self.dst.first + first, self.dst.pages[first:end])
        route = self.staged.route
        start, stop = dst.first * route.dst.page_size, (dst.first + len(dst.pages)) * route.dst.page_size
        tokens = range(max(start, self.tokens.start), min(stop, self.tokens.stop))
        src_first, src_end = tokens.start // route.src.page_size, -(-tokens.stop // route.src.page_size)
        src_pages = self.src.pages[src_first - self.src.first : src_end - self.src.first]
        return self._replace(src=PlacedPages(self.src.region, src_first, src_pages), dst=dst, tokens=tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes in a buffer, where the next part starts at whole elements of any dtype."""
        return -(-self.staged.num_bytes(len(self.tokens)) // ALIGNMENT) * ALIGNMENT


class StagedWindow(NamedTuple):
    """What one bulk write moves."""

    region: RegionId
    """Region of the reader's staging memory."""
    parts: tuple[StagedPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def can_be_direct(self) -> bool:
        return not any(part.staged.route.needs_staging for part in self.parts)

    def direct(self) -> list[Copy]:
        return [copy for part in self.parts for copy in part.staged.route.copies(part.src, part.dst)]


Window = tuple[Copy, ...] | StagedWindow
"""What one post moves: copies between pages, or a bulk write."""


class StagingMemory(Protocol):
    """A rank's pages and its staging region. Each step of an iterator moves a few MiB."""

    def gather(self, group: str, staged: StagedRoute, src: PlacedPages, tokens: range, offset: int) -> Iterator[int]:
        """Copy from pages to the bytes of the staging region from `offset` on; yields after each slice."""
        ...

    def scatter(self, group: str, staged: StagedRoute, offset: int, dst: PlacedPages, tokens: range) -> Iterator[int]:
        """Copy from the staging region to pages; yields after each slice."""
        ...

    def scatter_microseconds(self) -> int:
        """Microseconds that all scatters took so far, without what was done between their slices."""
        ...

    def num_pages(self, group: str) -> int:
        """Pages in the arena of a page group."""
        ...

    def checksum(self, offset: int, num_bytes: int) -> int:
        """crc32 of bytes of the staging region."""
        ...


def ring_bytes(region_bytes: int) -> int:
    """Bytes of each of the two rings of a staging region."""
    return region_bytes // (2 * ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StagingConfig:
    region: RegionId
    num_bytes: int
    """Bytes of the region: one half to receive, one to send."""
    mode: StagingMode = StagingMode.AUTO
    patience_s: float = 2.0
    """A wait for memory may take so long. Less than a write may, or that ends it."""
    setting: str = "--staging-memory-mib"

    @property
    def ring_bytes(self) -> int:
        return ring_bytes(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Staging:
    config: StagingConfig
    memory: StagingMemory


def choose(mode: StagingMode, routes: Sequence[Route], num_copies: int, num_bytes: int) -> bool:
    """Whether a chunk between two ranks that both have staging memory is staged; a direct write takes `num_copies`."""
    if any(route.is_recut for route in routes):
        return True
    if all(route.is_whole or route.has_nothing for route in routes):  # equal sizes, or a latent: runs of whole pages
        return False
    return mode is StagingMode.ON or num_bytes + ASKING_BYTES < num_copies * SHORT_RUN_BYTES


def cut_staged(region: RegionId, pools: Sequence[Sequence[StagedPart]], window_bytes: int) -> deque[Window]:
    """Windows of at most `window_bytes`, or a page of the reader.

    `pools`: parts of one pool have the same pages in all groups.
    """
    windows: deque[Window] = deque()
    for parts in pools:
        num_pages = len(parts[0].dst.pages) if parts else 0
        page_bytes = sum(part.staged.num_bytes(len(part.tokens)) for part in parts) // max(1, num_pages)
        pages = max(1, window_bytes // max(1, page_bytes))
        for first in range(0, num_pages, pages):
            windows.append(StagedWindow(region, tuple(part.pages(first, first + pages) for part in parts)))
    return windows


class _Plain(NamedTuple):
    """A write that only passes through."""

    peer: PeerName
    posted: WriteId


class _Sender(NamedTuple):
    """A rank of a peer, in one life of our endpoint for it."""

    peer: PeerName
    life: int
    rank: int


class _LeaseKey(NamedTuple):
    sender: _Sender
    write: int


class _AheadKey(NamedTuple):
    """The next write of a ticket to a rank of the peer."""

    peer: PeerName
    rank: int
    ticket: TicketId


@dataclass(slots=True)
class _Ahead:
    """Memory asked for before there is anything to send."""

    write: WriteId
    num_bytes: int
    lease: StageLease | None = None
    """Memory that was lent; None: not yet."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A staged write of ours."""

    write: WriteId
    peer: PeerName
    rank: int
    ticket: TicketId
    window: StagedWindow
    note: bytes | None
    ask_at: float
    """When to ask again, while there is no answer."""
    gather: Iterator[int] | None = None
    """The gather while it is under way. None: not begun, or over."""
    offset: int | None = None
    """Where its buffer begins in our region; None: it has none yet."""
    is_gathered: bool = False
    lease: StageLease | None = None
    posted: WriteId | None = None
    """The bulk write, or the direct one that took its place."""
    is_direct: bool = False
    is_written: bool = False
    is_scattered: bool = False
    has_failed: bool = False

    @property
    def waits_for_answer(self) -> bool:
        return self.lease is None and not self.is_direct and not self.has_failed

    def ask(self) -> StageAsk:
        return StageAsk(write=self.write, num_bytes=self.window.num_bytes)


@dataclass(slots=True, eq=False)
class _Incoming:
    """Bytes that were announced and wait to be scattered."""

    key: _LeaseKey
    data: StagedData
    num_bytes: int
    slices: Iterator[int]
    """The scatter, one step per slice."""
    has_landed: bool
    """Whether it is known that the bytes are here."""
    give_up_at: float
    look_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Early:
    """Bytes that arrived before this rank heard of their ticket."""

    data: StagedData
    give_up_at: float


@dataclass(slots=True)
class _Peer:
    life: int
    incoming: CachePlan | None = None


def _ticket_of(data: StagedData) -> TicketId:
    return TicketId(Boot(data.reader_boot), Boot(data.writer_boot), TicketSeq(data.ticket))


class StagedTransport:
    """A Transport, over another one, that can also write by way of staging memory. For one thread."""

    def __init__(
        self,
        transport: Transport,
        staging: Staging,
        rank: int,
        pools: Mapping[str, PoolId],
        counters: Counter[str],
    ) -> None:
        """`rank`: of this side. `pools`: of each page group. `counters`: COUNTERS."""
        self._transport = transport
        self._proves = transport.evidence is Evidence.COMPLETION
        self._memory = staging.memory
        self._config = staging.config
        self._rank = rank
        self._now = 0.0
        self._writes = count(1)
        self._plain: dict[WriteId, _Plain] = {}
        self._outgoing: dict[WriteId, _Outgoing] = {}
        self._incoming: deque[_Incoming] = deque()
        self._early: dict[_LeaseKey, _Early] = {}
        self._grants = StagedGrants(pools)
        self._ahead: dict[_AheadKey, _Ahead] = {}
        self._reserved: dict[_LeaseKey, float] = {}
        """Leases lent ahead and not in use yet |-> when they may be wanted back (again)."""
        self._lent: dict[_LeaseKey, float] = {}
        """Leases that nothing came for yet |-> when they are told again."""
        self._peers: dict[PeerName, _Peer] = {}
        self._lives = count(1)
        self._frames: deque[WriteId] = deque()
        """Writes of ours that only carry a frame and are not seen DONE."""
        config = staging.config
        self.receiving: StagingRing[_LeaseKey] = StagingRing(config.ring_bytes, config.patience_s, config.setting)
        self.sending: StagingRing[WriteId] = StagingRing(config.ring_bytes, config.patience_s, config.setting)
        self.counters = counters
        self.last_reason = ""
        """Why a write went directly, the last time."""

    # ------------------------------------------------------------ the transport below

    @property
    def name(self) -> str:
        return self._transport.name

    @property
    def evidence(self) -> Evidence:
        return self._transport.evidence

    def register(self, region: Region) -> None:
        self._transport.register(region)

    def open(self, peer: PeerName) -> bytes:
        metadata = self._transport.open(peer)
        self._peers[peer] = _Peer(next(self._lives))
        return metadata

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        self._transport.attach(peer, ranks)

    def expect(self, peer: PeerName, incoming: CachePlan) -> None:
        """What the ranks of an attached peer send ours."""
        self._peers[peer].incoming = incoming

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        posted = self._transport.write(peer, copies, notification, rank)
        write = WriteId(next(self._writes))
        self._plain[write] = _Plain(peer, posted)
        return write

    def poll(self, write: WriteId) -> WriteState:
        outgoing = self._outgoing.get(write)
        if outgoing is not None:
            return self._poll_staged(outgoing)
        plain = self._plain.get(write)
        if plain is None:
            return WriteState.ERROR
        state = self._transport.poll(plain.posted)
        if state is not WriteState.PENDING:
            del self._plain[write]
        return state

    def fence(self, peer: PeerName) -> FenceResult:
        result = self._transport.fence(peer)
        self._peers.pop(peer, None)
        self._plain = {write: plain for write, plain in self._plain.items() if plain.peer != peer}
        self._incoming = deque(i for i in self._incoming if i.key.sender.peer != peer)
        self._early = {key: early for key, early in self._early.items() if key.sender.peer != peer}
        self._grants.drop_peer(peer)
        self._ahead = {key: ahead for key, ahead in self._ahead.items() if key.peer != peer}
        self._reserved = {key: at for key, at in self._reserved.items() if key.sender.peer != peer}
        self._lent = {key: at for key, at in self._lent.items() if key.sender.peer != peer}
        for outgoing in [o for o in self._outgoing.values() if o.peer == peer]:
            del self._outgoing[outgoing.write]
            if result is FenceResult.CLOSED or self.sending.is_waiting(outgoing.write):
                self._free_buffer(outgoing)
            elif self.sending.lease_of(outgoing.write) is not None:
                self.sending.lose(outgoing.write)
        for key in [key for key in self.receiving.waiting() if key.sender.peer == peer]:
            self.receiving.give_back(key)
        for key in [key for key in self.receiving if key.sender.peer == peer]:
            if result is FenceResult.CLOSED:
                self.receiving.give_back(key)
            else:
                self.receiving.lose(key)
        return result

    def close(self) -> None:
        self._transport.close()

    # ------------------------------------------------------------ turns

    def advance(self, now: float) -> None:
        """Time goes on; what waits is looked at with the next `notifications`."""
        self._now = now

    def notifications(self) -> list[Notification]:
        """Drives gathers, scatters and waits, and the transport below between their slices."""
        heard: list[Notification] = []
        for _ in range(_SLICES_PER_TURN):
            for notification in self._transport.notifications():
                if is_stage_frame(notification.data):
                    self._hear(notification)
                else:
                    heard.append(notification)
            self._wait()
            if not self._move_a_slice(heard):
                break
        self._frames = deque(w for w in self._frames if self._transport.poll(w) is WriteState.PENDING)
        return heard

    def _move_a_slice(self, heard: list[Notification]) -> bool:
        """Move a slice of the oldest scatter and of the oldest gather. False: there was nothing to move."""
        is_busy = False
        incoming = next((i for i in list(self._incoming) if self._has_landed(i)), None)
        if incoming is not None:
            is_busy = True
            moved = next(incoming.slices, None)
            self.counters["scattered_bytes"] += moved or 0
            self.counters["scatter_microseconds"] = self._memory.scatter_microseconds()
            if moved is None:
                self._incoming.remove(incoming)
                self._give_back(incoming.key)
                self._scattered(incoming, heard)
        gathering = next((o for o in self._outgoing.values() if o.gather is not None), None)
        if gathering is not None and gathering.gather is not None:
            is_busy = True
            if next(gathering.gather, None) is None:
                gathering.gather, gathering.is_gathered = None, True
                self._post(gathering)
        return is_busy

    def _has_landed(self, incoming: _Incoming) -> bool:
        """Whether the bytes are here: where no notification proves it, once they are those that the writer sent."""
        lease = self.receiving.lease_of(incoming.key)
        if incoming.has_landed or lease is None or self._now < incoming.look_at:
            return incoming.has_landed
        incoming.has_landed = self._memory.checksum(lease.offset, incoming.num_bytes) == incoming.data.checksum
        if not incoming.has_landed and self._now >= incoming.give_up_at:
            self._incoming.remove(incoming)
            self._refuse(incoming.key)
        incoming.look_at = self._now + _LOOK_AGAIN_S
        return incoming.has_landed

    def _wait(self) -> None:
        now = self._now
        for owner, reason in self.receiving.give_up(now):
            self._tell(owner.sender.peer, owner.sender.rank, StageRefusal(write=owner.write, reason=reason))
        for owner, _ in self.receiving.admit(now):
            self._lend(owner)
        for write, reason in self.sending.give_up(now):
            self._withdraw(self._outgoing[write], reason)
        for write, lease in self.sending.admit(now):
            self._begin(self._outgoing[write], lease.offset)
        for outgoing in self._outgoing.values():
            if outgoing.waits_for_answer and now >= outgoing.ask_at:
                self._ask(outgoing)
        for owner in [owner for owner, at in self._lent.items() if now >= at]:
            self._lend(owner)
        for owner in [owner for owner, at in self._reserved.items() if self.receiving.num_waiting and now >= at]:
            self._reserved[owner] = now + _AGAIN_S
            self._tell(owner.sender.peer, owner.sender.rank, StageRecall(write=owner.write))
        for owner in [owner for owner, early in self._early.items() if now >= early.give_up_at]:
            del self._early[owner]
            self._refuse(owner)

    def _hear(self, notification: Notification) -> None:
        peer = self._peers.get(notification.peer)
        if peer is None:
            return
        sender = _Sender(notification.peer, peer.life, notification.rank)
        try:
            frame = decode_stage(notification.data)
        except ProtocolError:
            self.counters["staging_malformed"] += 1
            return
        match frame:
            case StageReserve():
                self._reserve(_LeaseKey(sender, frame.write), frame.num_bytes)
            case StageRecall():
                self._recalled(sender, frame.write)
            case StageAsk():
                self._answer(_LeaseKey(sender, frame.write), frame.num_bytes)
            case StagedData():
                self._arrived(_LeaseKey(sender, frame.write), frame, peer.incoming)
            case StageRelease():
                self._released(_LeaseKey(sender, frame.write))
            case StageLease() | StageRefusal() | StageAck():
                outgoing = self._outgoing.get(WriteId(frame.write))
                if outgoing is not None and (outgoing.peer, outgoing.rank) == (sender.peer, sender.rank):
                    self._answered(outgoing, frame)
                elif isinstance(frame, StageLease):
                    self._lent_ahead(sender, frame)

    def _tell(self, peer: PeerName, rank: int, frame: StageFrame) -> None:
        try:
            self._frames.append(self._transport.write(peer, (), encode_stage(frame), rank))
        except TransportError:  # the peer is gone: its writes fail, and so do ours
            return

    # ------------------------------------------------------------ the writer's side

    def write_staged(
        self, peer: PeerName, ticket: TicketId, window: StagedWindow, notification: bytes | None, rank: int
    ) -> WriteId:
        """Start a staged write. Raises TransportError if nothing was started."""
        ahead = self._ahead.pop(_AheadKey(peer, rank, ticket), None)
        if ahead is not None and ahead.num_bytes < window.num_bytes:
            self._tell(peer, rank, StageRelease(write=ahead.write))
            ahead = None
        write = WriteId(next(self._writes)) if ahead is None else ahead.write
        outgoing = _Outgoing(write, peer, rank, ticket, window, notification, self._now + _AGAIN_S)
        if ahead is not None and ahead.lease is not None:
            outgoing.lease = ahead.lease
            self.counters["staged_ahead"] += 1
        else:
            self._frames.append(self._transport.write(peer, (), encode_stage(outgoing.ask()), rank))
        self._outgoing[write] = outgoing
        self.counters["staged_writes"] += 1
        try:
            lease = self.sending.ask(write, window.num_bytes, self._now)
        except StagingTooSmall as error:
            self._withdraw(outgoing, str(error))
            return write
        if lease is not None:
            self._begin(outgoing, lease.offset)
        return write

    def reserve(self, peer: PeerName, rank: int, ticket: TicketId, num_bytes: int) -> None:
        """Ask for the lease of the ticket's next write, which has at most so many bytes. Once until it is used."""
        key = _AheadKey(peer, rank, ticket)
        if key not in self._ahead:
            ahead = self._ahead[key] = _Ahead(WriteId(next(self._writes)), num_bytes)
            self._tell(peer, rank, StageReserve(write=ahead.write, num_bytes=num_bytes))

    def reserve_no_more(self, ticket: TicketId) -> None:
        """No write of the ticket comes any more."""
        for key in [key for key in self._ahead if key.ticket == ticket]:
            ahead = self._ahead.pop(key)
            self._tell(key.peer, key.rank, StageRelease(write=ahead.write))

    def _lent_ahead(self, sender: _Sender, lease: StageLease) -> None:
        """Take memory lent for a write that has not begun; give it back where the write is over, as its ask came
        late."""
        key = self._find_ahead(sender, lease.write)
        if key is None:
            self._tell(sender.peer, sender.rank, StageRelease(write=lease.write))
        else:
            self._ahead[key].lease = lease

    def _recalled(self, sender: _Sender, write: int) -> None:
        key = self._find_ahead(sender, write)
        if key is not None:
            del self._ahead[key]
            self._tell(sender.peer, sender.rank, StageRelease(write=write))

    def _find_ahead(self, sender: _Sender, write: int) -> _AheadKey | None:
        of_rank = ((key, ahead) for key, ahead in self._ahead.items() if key[:2] == (sender.peer, sender.rank))
        return next((key for key, ahead in of_rank if ahead.write == write), None)

    def _ask(self, outgoing: _Outgoing) -> None:
        outgoing.ask_at = self._now + _AGAIN_S
        self._tell(outgoing.peer, outgoing.rank, outgoing.ask())

    def _begin(self, outgoing: _Outgoing, offset: int) -> None:
        outgoing.offset = self._config.ring_bytes + offset
        outgoing.gather = self._gather(outgoing.window.parts, outgoing.offset)

    def _gather(self, parts: Sequence[StagedPart], offset: int) -> Iterator[int]:
        for part in parts:
            yield from self._memory.gather(part.group, part.staged, part.src, part.tokens, offset)
            offset += part.num_bytes

    def _answered(self, outgoing: _Outgoing, frame: StageLease | StageRefusal | StageAck) -> None:
        match frame:
            case StageLease():
                if outgoing.waits_for_answer:
                    outgoing.lease = frame
                    self._post(outgoing)
                elif outgoing.lease != frame:  # given again, after the first one's bytes were scattered; or too late
                    self._tell(outgoing.peer, outgoing.rank, StageRelease(write=frame.write))
            case StageRefusal():
                if outgoing.waits_for_answer:
                    self._fall_back(outgoing, frame.reason)
            case StageAck():
                outgoing.is_scattered = outgoing.posted is not None and not outgoing.is_direct

    def _post(self, outgoing: _Outgoing) -> None:
        """The bulk write, when both its buffer and its lease are there."""
        if outgoing.lease is None or not outgoing.is_gathered or outgoing.offset is None:
            return
        window, lease = outgoing.window, outgoing.lease
        plan = StagedData(
            write=outgoing.write,
            round=lease.round,
            offset=lease.offset,
            ticket=outgoing.ticket.seq,
            reader_boot=outgoing.ticket.reader_boot,
            writer_boot=outgoing.ticket.writer_boot,
            parts=tuple(
                StagedPages(
                    group=part.group,
                    first=part.dst.first,
                    num_tokens=len(part.tokens),
                    pages=pack_u32(part.dst.pages),
                )
                for part in window.parts
            ),
            note=outgoing.note or b"",
            checksum=None if self._proves else self._memory.checksum(outgoing.offset, window.num_bytes),
        )
        here = Span(self._config.region, outgoing.offset, window.num_bytes)
        copy = Copy(here, Span(window.region, lease.offset, window.num_bytes))
        try:
            outgoing.posted = self._transport.write(outgoing.peer, [copy], encode_stage(plan), outgoing.rank)
            self.counters["staged_bytes"] += window.num_bytes
        except TransportError:
            outgoing.has_failed = True

    def _withdraw(self, outgoing: _Outgoing, reason: str) -> None:
        """There is no memory here: the reader's lease, given or not yet, is not needed."""
        self._tell(outgoing.peer, outgoing.rank, StageRelease(write=outgoing.write))
        self._fall_back(outgoing, reason)

    def _fall_back(self, outgoing: _Outgoing, reason: str) -> None:
        """Write directly, with no memory of this write left here or there."""
        self.counters["staging_fallbacks"] += 1
        self.last_reason = reason
        outgoing.is_direct = True
        self._free_buffer(outgoing)
        if not outgoing.window.can_be_direct:
            outgoing.has_failed = True
            return
        try:
            copies = outgoing.window.direct()
            outgoing.posted = self._transport.write(outgoing.peer, copies, outgoing.note, outgoing.rank)
        except TransportError:
            outgoing.has_failed = True

    def _poll_staged(self, outgoing: _Outgoing) -> WriteState:
        """ERROR keeps its buffer until the fence: bytes of it may still be read."""
        if outgoing.has_failed:
            return WriteState.ERROR
        if outgoing.posted is not None and not outgoing.is_written:
            state = self._transport.poll(outgoing.posted)
            outgoing.has_failed = state is WriteState.ERROR
            if state is not WriteState.DONE:
                return state
            outgoing.is_written = True
            self._free_buffer(outgoing)
        if not outgoing.is_written or not (outgoing.is_scattered or outgoing.is_direct):
            return WriteState.PENDING
        del self._outgoing[outgoing.write]
        return WriteState.DONE

    def _free_buffer(self, outgoing: _Outgoing) -> None:
        outgoing.gather = None
        if self.sending.lease_of(outgoing.write) is not None or self.sending.is_waiting(outgoing.write):
            self.sending.give_back(outgoing.write)

    # ------------------------------------------------------------ the reader's side

    def _reserve(self, key: _LeaseKey, num_bytes: int) -> None:
        """Lend ahead what nobody waits for, up to half of the ring."""
        leases = [self.receiving.lease_of(reserved) for reserved in self._reserved]
        num_reserved = sum(lease.num_bytes for lease in leases if lease is not None)
        if num_reserved + num_bytes > self.receiving.num_bytes // 2:
            return
        if self.receiving.take(key, num_bytes) is not None:
            self._reserved[key] = self._now
            self._lend(key)

    def _answer(self, key: _LeaseKey, num_bytes: int) -> None:
        self._reserved.pop(key, None)
        try:
            lease = self.receiving.ask(key, num_bytes, self._now)
        except StagingTooSmall as error:
            self._tell(key.sender.peer, key.sender.rank, StageRefusal(write=key.write, reason=str(error)))
            return
        if lease is not None and not self._is_in_use(key):
            self._lend(key)

    def _lend(self, key: _LeaseKey) -> None:
        lease = self.receiving.lease_of(key)
        if lease is not None:
            self._lent[key] = self._now + _AGAIN_S
            frame = StageLease(write=key.write, round=lease.round, offset=lease.offset)
            self._tell(key.sender.peer, key.sender.rank, frame)

    def _is_in_use(self, key: _LeaseKey) -> bool:
        """Bytes came by the lease and are not scattered yet."""
        return key in self._early or any(incoming.key == key for incoming in self._incoming)

    def _give_back(self, key: _LeaseKey) -> None:
        self._lent.pop(key, None)
        self._reserved.pop(key, None)
        self.receiving.give_back(key)

    def _arrived(self, key: _LeaseKey, data: StagedData, plan: CachePlan | None) -> None:
        lease = self.receiving.lease_of(key)
        if lease is None or plan is None or self._is_in_use(key):
            return  # over, or said before
        if (data.round, data.offset) != (lease.round, lease.offset):  # by a lease that is over
            self.counters["staging_malformed"] += 1
            return
        self._lent.pop(key, None)
        self._reserved.pop(key, None)
        parts = self._parts(key.sender.rank, data, plan)
        num_bytes = sum(part.num_bytes for part in parts or ())
        if parts is None or num_bytes > lease.num_bytes:
            self._refuse(key)
            return
        match self._grants.take(key.sender.peer, key.sender.rank, _ticket_of(data), data.parts):
            case PlanVerdict.GRANTED:
                slices, give_up_at = self._scatter(parts, lease.offset), self._now + self._config.patience_s
                self._incoming.append(_Incoming(key, data, num_bytes, slices, self._proves, give_up_at))
            case PlanVerdict.UNKNOWN:
                self._early[key] = _Early(data, self._now + self._config.patience_s)
            case PlanVerdict.REFUSED:
                self._refuse(key)

    def follow(self, command: ExpectPages | ForgetPages) -> None:
        """What an attached peer was granted, or a ticket that is over."""
        if isinstance(command, ForgetPages):
            self._grants.forget(command.ticket)
            return
        self._grants.expect(command)
        plan = self._peers[command.peer].incoming
        for key, early in list(self._early.items()):
            if _ticket_of(early.data) == command.ticket:
                del self._early[key]
                self._arrived(key, early.data, plan)

    def _refuse(self, key: _LeaseKey) -> None:
        """Refuse bytes that are not wanted. The write is never answered, so it fails. Where they may come yet, its peer
        is fenced before the lease is anybody else's."""
        self.counters["staging_refused"] += 1
        if self._proves:
            self._give_back(key)

    def _parts(self, writer: int, data: StagedData, plan: CachePlan) -> list[StagedPart] | None:
        """What the writer says it sent, by our plan of the pair. None: it cannot be."""
        parts = []
        for said in data.parts:
            if said.group not in plan.routes or writer >= plan.num_writers or len(said.pages) % 4 or said.first < 0:
                return None
            route = plan.route(said.group, writer, self._rank)
            pages = unpack_u32(said.pages)
            if any(page >= self._memory.num_pages(said.group) for page in pages):
                return None
            staged, page_size = StagedRoute.of(route), route.dst.page_size
            if -(-said.num_tokens // page_size) != len(pages) or said.num_tokens % staged.granule:
                return None
            placed = PlacedPages(RegionId(0), said.first, tuple(map(PageId, pages)))
            start = said.first * page_size
            parts.append(StagedPart(said.group, staged, placed, placed, range(start, start + said.num_tokens)))
        return parts

    def _scatter(self, parts: Sequence[StagedPart], offset: int) -> Iterator[int]:
        for part in parts:
            yield from self._memory.scatter(part.group, part.staged, offset, part.dst, part.tokens)
            offset += part.num_bytes

    def _scattered(self, incoming: _Incoming, heard: list[Notification]) -> None:
        sender = incoming.key.sender
        if incoming.data.note:
            heard.append(Notification(sender.peer, incoming.data.note, sender.rank))
        self._tell(sender.peer, sender.rank, StageAck(write=incoming.key.write))

    def _released(self, key: _LeaseKey) -> None:
        has_any = self.receiving.lease_of(key) is not None or self.receiving.is_waiting(key)
        if has_any and not self._is_in_use(key):
            self._give_back(key)

    # ------------------------------------------------------------ views

    @property
    def is_moving(self) -> bool:
        """The next turn gathers or scatters something."""
        return bool(self._incoming) or any(o.gather is not None for o in self._outgoing.values())

    @property
    def is_waiting(self) -> bool:
        """Something here needs turns, though nothing of this side's is in flight."""
        return bool(self._incoming or self._early or self._lent) or self.receiving.num_waiting > 0

    @property
    def is_quiet(self) -> bool:
        """Nothing is leased, waits or moves."""
        rings = (self.receiving, self.sending)
        is_leased = any(ring.num_leased_bytes or ring.num_waiting for ring in rings)
        return not (is_leased or self._incoming or self._early or self._outgoing or self._ahead)

    def check_integrity(self) -> None:
        self.receiving.check_integrity()
        self.sending.check_integrity()
