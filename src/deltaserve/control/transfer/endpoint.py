"""The data-plane half of a rank: performs transfer commands over a Transport and reports what happened.

Called from one thread only (the transfer thread; the simulator's loop). It decides nothing: tickets, leases and pages
are the control plane's; here are gates, windows and notifications. See gate.py for the write gate.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    ChunkSent,
    CloseGate,
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    ExpectPages,
    FencePeer,
    ForgetPages,
    GateDrained,
    GateDraining,
    Landed,
    OpenEndpoint,
    OpenGate,
    PageCheck,
    PagePairs,
    PagesVerified,
    PeerFenced,
    PostChunk,
    StagingUsed,
    TicketId,
    TransferCommand,
    TransferReport,
    VerifyPages,
    WriteFailed,
)
from deltaserve.control.transfer.gate import ChunkJob, ChunkTotal, Gate, bytes_of, cut_windows
from deltaserve.control.transfer.ring import ALIGNMENT
from deltaserve.control.transfer.staged_transport import StagedTransport
from deltaserve.control.transfer.staging import (
    COUNTERS,
    STAGING,
    StagedPart,
    StagedWindow,
    Staging,
    Window,
    choose,
    cut_staged,
    ring_bytes,
)
from deltaserve.core.errors import ProtocolError
from deltaserve.core.extents import Copy
from deltaserve.core.ids import PageId, PeerName, PoolId, RegionId
from deltaserve.core.layout.copy_plan import CachePlan, PageSlice, PlacedPages, RankPair, Route, plan_cache
from deltaserve.core.layout.prompt_pages import PromptPages, tokens_before
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.transport import (
    Evidence,
    FenceResult,
    RemoteRank,
    RemoteRegion,
    Transport,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.core.wire.codec import decode_done, encode_done
from deltaserve.core.wire.messages import Done, Drain, Piece, RankEnd, RegionInfo

WRONG_CONTENTS = "checksum of pages"
"""How a verdict about pages begins."""
_MAX_RANKS = 64
"""Most ranks of a peer."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
"""Pause between two looks at pages that have not landed: ever longer, a look costs as much as reading them."""
_TELL_STAGING_EVERY_S = 0.2
"""Pause between two reports of what staging memory was used for."""
_TELL_EVERY_S = 0.5
"""Pause between two reports that a closed gate still waits. Well below the reader's patience with a silent writer."""


class Memory(Protocol):
    """What the endpoint needs of its rank's memory besides moving it. Called for pages that no step writes."""

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        """Packed uint32 crc32 of each page, over the given slices of each group of the pool, in order."""
        ...

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        """Checksums of the pages `dst` as a reader has them, once what `src` holds is copied: of what is written there.

        `routes`: of each group of the pool, in order.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """This rank's memory, as the transport knows it."""

    cache: CacheSpec
    """Layout of the whole model's cache, not of this rank's part."""
    regions: tuple[RegionInfo, ...]
    """One of each page group, named as the group."""
    shard: Shard = Shard()
    """This rank's number and the number of ranks."""
    window_bytes: int = 8 << 20
    """Most bytes of one post: what another ticket of the same peer waits for, times the tickets before it."""
    max_windows: int = 2
    """Posts in flight per peer."""
    checksums: bool = False
    stall_s: float = 5.0
    """A write may take so long, and the time its bytes take at `slow_bytes_per_s`; then it counts as failed."""
    slow_bytes_per_s: float = 4e6
    landing_s: float = 2.0
    """Where completions prove nothing: announced pages are looked at again for so long before they count as wrong."""


@dataclass(frozen=True, slots=True)
class _Posted:
    """A write that was posted and has not ended."""

    job: ChunkJob
    num_bytes: int
    give_up_at: float


@dataclass(slots=True)
class _Landing:
    """Announced pages whose checksums are not right yet."""

    command: VerifyPages
    checks: list[PageCheck]
    """Checks that failed when the pages were last looked at."""
    give_up_at: float
    look_at: float
    pause_s: float = _FIRST_LOOK_S

    def look_later(self, now: float) -> None:
        self.look_at = min(now + self.pause_s, self.give_up_at)
        self.pause_s = min(2 * self.pause_s, _LONGEST_LOOK_S)


@dataclass(frozen=True, slots=True)
class _FarReader:
    """A reading rank of the peer: where its regions are, and what this rank sends it of each page group."""

    rank: int
    regions: Mapping[str, RegionId]
    routes: Mapping[str, Route]
    staged_bytes: int
    """Most bytes of a staged write, where a page is not larger: both rings hold two such writes."""


@dataclass(slots=True)
class _Link:
    """A peer's side of things: its ranks, and what is queued for them."""

    readers: tuple[_FarReader, ...] = ()
    """Ranks of the peer that this rank sends something; they hear of every chunk."""
    incoming: CachePlan | None = None
    """What its ranks send ours. None: not attached."""
    gates: dict[TicketId, Gate] = field(default_factory=dict)
    ready: OrderedDict[TicketId, None] = field(default_factory=OrderedDict)
    """Tickets that may have a window to post; the one whose turn it is comes first."""
    closing: dict[TicketId, float] = field(default_factory=dict)
    """Tickets whose gate was closed and is not reported drained |-> when that is reported again."""
    writes: dict[WriteId, _Posted] = field(default_factory=dict)


class Endpoint:
    """All links of one rank over one transport."""

    def __init__(
        self, config: EndpointConfig, transport: Transport, memory: Memory, staging: Staging | None = None
    ) -> None:
        """`staging`: its region is one of `config.regions`, named STAGING. None: all writes are direct."""
        self._config = config
        self._memory = memory
        self._links: dict[PeerName, _Link] = {}
        self._landings: dict[TicketId, _Landing] = {}
        self._regions = {region.component: RegionId(region.id) for region in config.regions}
        self.counters: Counter[str] = Counter()
        """bytes_sent, writes_posted, writes_failed, malformed_notifications; and those of staging.py."""
        self._staging = staging
        self.staged: StagedTransport | None = None
        """Staging between this endpoint and the transport; None: this rank has no staging memory."""
        if staging is not None:
            cache = config.cache
            pools = {group.name: cache.pool_of(group) for group in cache.groups}
            self.staged = StagedTransport(transport, staging, config.shard.rank, pools, self.counters)
        self._transport: Transport = self.staged or transport
        self._told: Counter[str] = Counter()
        """Values of `counters` that the control plane knows."""
        self._tell_staging_at = 0.0

    # ------------------------------------------------------------ commands

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        """Execute one command; returns the reports that are ready at once. Never raises for a peer's fault."""
        match command:
            case OpenEndpoint():
                return self._open(command)
            case AttachEndpoint():
                return self._attach(command, command.theirs)
            case OpenGate():
                self._open_gate(command)
                return []
            case PostChunk():
                return [*self._enqueue(command), *self._advance(command.peer, now)]
            case CloseGate():
                return self._close_gate(command, now)
            case VerifyPages():
                return self._verify(command, now)
            case ExpectPages() | ForgetPages():
                if self.staged is not None and command.peer in self._links:  # else fenced meanwhile
                    self.staged.reader.follow(command)
                return []
            case FencePeer():
                return [self._fence(command.peer)]

    def poll(self, now: float) -> list[TransferReport]:
        """Drive progress: completions, further windows, notifications."""
        reports: list[TransferReport] = []
        if self.staged is not None:
            self.staged.advance(now)
        for peer in list(self._links):
            reports += self._advance(peer, now)
        for peer, data, rank in self._transport.notifications():
            try:
                reports.append(Landed(peer, RankPair(rank, self._config.shard.rank), decode_done(data)))
            except ProtocolError:
                self.counters["malformed_notifications"] += 1
        for landing in list(self._landings.values()):
            if now >= landing.look_at:
                reports += self._look(landing, now)
        return [*reports, *self._staging_used(now)]

    def _staging_used(self, now: float) -> list[TransferReport]:
        grown = self._untold()
        if not grown or now < self._tell_staging_at:
            return []
        self._tell_staging_at = now + _TELL_STAGING_EVERY_S
        self._told.update(dict(grown))
        return [StagingUsed(grown)]

    def _untold(self) -> tuple[tuple[str, int], ...]:
        counts = ((name, self.counters[name] - self._told[name]) for name in COUNTERS)
        return tuple((name, count) for name, count in counts if count)

    def is_idle(self) -> bool:
        """Nothing posted here waits for completion. (A reader's open tickets are the control plane's to know.)"""
        if self._landings or self._untold() or (self.staged is not None and self.staged.reader.is_waiting):
            return False
        return not any(link.writes or link.ready for link in self._links.values())

    # ------------------------------------------------------------ endpoints

    def _open(self, command: OpenEndpoint) -> list[TransferReport]:
        if command.peer in self._links:
            self._fence(command.peer)
        try:
            metadata = self._transport.open(command.peer)
        except TransportError as error:
            return [EndpointFailed(command.peer, command.greeting, str(error))]
        self._links[command.peer] = _Link()
        end = RankEnd(metadata=metadata, regions=self._config.regions)
        opened: list[TransferReport] = [EndpointOpened(command.peer, command.greeting, (end,))]
        if command.theirs is not None:
            opened += self._attach(command, command.theirs)
        return opened

    def _attach(self, command: OpenEndpoint | AttachEndpoint, theirs: Sequence[RankEnd]) -> list[TransferReport]:
        peer, greeting, ours = command.peer, command.greeting, self._config.cache
        try:
            far = ours if command.terms is None else ours.under(command.terms)
            readers = self._readers(peer, theirs, far)
            incoming = plan_cache(far, len(theirs), ours, self._config.shard.size)
            self._transport.attach(peer, [_remote_rank(end) for end in theirs])
        except (TransportError, ValueError) as error:
            self._fence(peer)
            return [EndpointFailed(peer, greeting, str(error))]
        link = self._links.setdefault(peer, _Link())
        link.readers, link.incoming = readers, incoming
        if self.staged is not None:
            self.staged.reader.expect(peer, incoming)
        return [EndpointAttached(peer, greeting)]

    def _readers(self, peer: PeerName, theirs: Sequence[RankEnd], far: CacheSpec) -> tuple[_FarReader, ...]:
        """Raises TransportError for an impossible number of ranks, or one that announced no region of a page group."""
        if not 0 < len(theirs) <= _MAX_RANKS:
            raise TransportError(f"{peer} announced {len(theirs)} ranks; possible are 1 to {_MAX_RANKS}")
        rank, groups = self._config.shard.rank, self._config.cache.groups
        plan = plan_cache(self._config.cache, self._config.shard.size, far, len(theirs))
        regions = [{region.component: RegionId(region.id) for region in end.regions} for end in theirs]
        kept = {group.name for group in far.groups}
        missing = sorted({name for name in kept for of_rank in regions if name not in of_rank})
        if missing:
            raise TransportError(f"{peer} announced no region for {', '.join(missing)}")
        return tuple(
            _FarReader(
                reader,
                regions[reader],
                {group.name: plan.route(group.name, rank, reader) for group in groups},
                self._staged_bytes(theirs[reader]),
            )
            for reader in plan.readers_of(rank)
        )

    def _staged_bytes(self, theirs: RankEnd) -> int:
        """Memory of either side may be less than that of two windows."""
        ours = self._config.regions
        rings = (ring_bytes(region.num_bytes) for region in (*ours, *theirs.regions) if region.component == STAGING)
        return max(ALIGNMENT, min((self._config.window_bytes, *(ring // 2 for ring in rings))))

    def _fence(self, peer: PeerName) -> PeerFenced:
        self._links.pop(peer, None)
        self._landings = {ticket: of for ticket, of in self._landings.items() if of.command.peer != peer}
        try:
            result = self._transport.fence(peer)
        except TransportError:
            result = FenceResult.IMPOSSIBLE
        return PeerFenced(peer, result)

    def writes_rows(self, peer: PeerName) -> bool:
        """Whether pages for an attached peer go in rows: they are cut otherwise there, and nothing stages them."""
        link = self._links.get(peer)
        readers = link.readers if link is not None else ()
        return any(
            any(route.is_recut for route in reader.routes.values())
            and (self._staging is None or STAGING not in reader.regions)
            for reader in readers
        )

    # ------------------------------------------------------------ writing

    def _open_gate(self, command: OpenGate) -> None:
        link = self._links.get(command.peer)
        if link is None:
            return  # fenced meanwhile
        gate = link.gates[command.ticket] = Gate(command.ticket)
        for reader in link.readers:
            if num_bytes := self._ahead_bytes(reader, command.num_pages):
                gate.ahead[reader.rank] = num_bytes
                self._reserve(command.peer, gate, reader.rank)

    def _ahead_bytes(self, reader: _FarReader, num_pages: tuple[int, ...]) -> int:
        """Most bytes of a ticket's first write; 0 where it is not staged."""
        if self._staging is None or STAGING not in reader.regions:
            return 0
        num_copies, num_bytes = 0, 0
        for pool, count in enumerate(num_pages):
            for group in self._config.cache.groups_of(PoolId(pool)):
                route = reader.routes[group.name]
                num_copies += count * len(route.heads)
                num_bytes += count * StagedRoute.of(route).num_bytes(route.dst.page_size)
        routes = list(reader.routes.values())
        if not any(route.is_recut for route in routes) and not choose(
            self._staging.config.mode, routes, num_copies, num_bytes
        ):
            return 0
        return min(num_bytes, reader.staged_bytes) + ALIGNMENT * len(routes) if num_bytes else 0

    def _reserve(self, peer: PeerName, gate: Gate, reader: int) -> None:
        """The round trip for memory is over before there is something to send."""
        num_bytes = gate.ahead.get(reader)
        if self.staged is not None and num_bytes is not None and gate.is_open and not gate.is_dirty:
            self.staged.writer.reserve(peer, reader, gate.ticket, num_bytes)

    def _reserve_no_more(self, gate: Gate) -> None:
        if self.staged is not None and gate.ahead:
            self.staged.writer.reserve_no_more(gate.ticket)

    def _enqueue(self, command: PostChunk) -> list[TransferReport]:
        link = self._links.get(command.peer)
        gate = link.gates.get(command.ticket) if link else None
        if link is None or gate is None or not gate.is_open or gate.is_dirty:
            return []  # closed meanwhile: GateDrained or PeerFenced answers for it
        if not link.readers:  # other ranks hold the same heads and send them
            return [self._sent(link, gate, command, 0)]
        jobs = [self._job(command, reader) for reader in link.readers]
        gate.jobs += jobs
        gate.unsent[command.chunk] = ChunkTotal(len(jobs), sum(job.num_bytes for job in jobs))
        link.ready.setdefault(command.ticket)
        return []

    def _job(self, command: PostChunk, reader: _FarReader) -> ChunkJob:
        windows = self._windows(reader, command)
        num_bytes = sum(map(bytes_of, windows)) + len(command.payload or b"")
        return ChunkJob(command, reader.rank, windows, encode_done(self._done(reader, command)), num_bytes)

    def _windows(self, reader: _FarReader, command: PostChunk) -> deque[Window]:
        region = reader.regions.get(STAGING)
        if region is not None and self._is_staged(reader, command):
            pools = [self._staged_parts(reader, pair) for pair in command.pairs]
            return cut_staged(region, pools, reader.staged_bytes)
        return deque(cut_windows(self._copies(reader, command), self._config.window_bytes))

    def _is_staged(self, reader: _FarReader, command: PostChunk) -> bool:
        """Whether to stage, by the copies that a direct write would take: counted, not made, there may be thousands."""
        if self._staging is None:
            return False
        num_copies, num_bytes = 0, 0
        for pair in command.pairs:
            for group in self._config.cache.groups_of(pair.pool):
                slices = reader.routes[group.name].src_slices
                num_copies += len(pair.src) * len(slices)
                num_bytes += len(pair.src) * sum(each.num_bytes for each in slices)
        return choose(self._staging.config.mode, list(reader.routes.values()), num_copies, num_bytes)

    def _staged_parts(self, reader: _FarReader, pair: PagePairs) -> list[StagedPart]:
        return [
            StagedPart.of(
                group.name,
                StagedRoute.of(reader.routes[group.name]),
                PlacedPages(self._regions[group.name], pair.src_first, pair.src),
                PlacedPages(reader.regions[group.name], pair.first, pair.dst),
            )
            for group in self._config.cache.groups_of(pair.pool)
            if not reader.routes[group.name].has_nothing
        ]

    def _copies(self, reader: _FarReader, command: PostChunk) -> list[Copy]:
        copies: list[Copy] = []
        for pair in command.pairs:
            for group in self._config.cache.groups_of(pair.pool):
                if reader.routes[group.name].has_nothing:
                    continue
                src = PlacedPages(self._regions[group.name], pair.src_first, pair.src)
                dst = PlacedPages(reader.regions[group.name], pair.first, pair.dst)
                copies += reader.routes[group.name].copies(src, dst)
        return copies

    def _done(self, reader: _FarReader, command: PostChunk) -> Done:
        return Done(
            ticket=command.ticket.seq,
            reader_boot=command.ticket.reader_boot,
            writer_boot=command.ticket.writer_boot,
            chunk=command.chunk,
            pieces=tuple(self._piece(reader, pairs) for pairs in command.pairs),
            payload=command.payload,
        )

    def _piece(self, reader: _FarReader, pairs: PagePairs) -> Piece:
        checksums = b""
        if self._config.checksums:
            groups = self._config.cache.groups_of(pairs.pool)
            routes = [reader.routes[group.name] for group in groups]
            if any(route.is_recut for route in routes):
                src = PlacedPages(RegionId(0), pairs.src_first, pairs.src)
                dst = PlacedPages(RegionId(0), pairs.first, pairs.dst)
                checksums = self._memory.checksums_there(pairs.pool, routes, src, dst)
            else:
                checksums = self._memory.checksums(pairs.pool, pairs.src, [route.src_slices for route in routes])
        return Piece(pool=pairs.pool, first=pairs.first, end=pairs.first + len(pairs.dst), checksums=checksums)

    def _advance(self, peer: PeerName, now: float) -> list[TransferReport]:
        """Look at what completed, then post what may be posted."""
        link = self._links.get(peer)
        if link is None:
            return []
        reports: list[TransferReport] = []
        for write, posted in list(link.writes.items()):
            state = self._transport.poll(write)
            if state is WriteState.DONE:
                self._completed(link, write, reports)
            elif state is WriteState.ERROR or now >= posted.give_up_at:
                problem = "the transport reports an error" if state is WriteState.ERROR else "it never completed"
                self._failed(link, self._settle(link, write), problem, reports)
        self._post_windows(link, now, reports)
        self._report_drained(link, now, reports)
        return reports

    def _settle(self, link: _Link, write: WriteId) -> ChunkJob:
        """A write is no longer in flight, as far as this side can know."""
        posted = link.writes.pop(write)
        posted.job.in_flight.discard(write)
        gate = link.gates[posted.job.command.ticket]
        gate.num_in_flight -= 1
        gate.bytes_in_flight -= posted.num_bytes
        return posted.job

    def _completed(self, link: _Link, write: WriteId, reports: list[TransferReport]) -> None:
        job = self._settle(link, write)
        ticket = job.command.ticket
        gate = link.gates[ticket]
        if not job.in_flight and job.announced:
            gate.jobs.remove(job)
            if not job.is_last:
                self._reserve(job.command.peer, gate, job.reader)
            total = gate.unsent[job.command.chunk]
            total.num_left -= 1
            if not total.num_left:
                del gate.unsent[job.command.chunk]
                reports.append(self._sent(link, gate, job.command, total.num_bytes))
        elif not job.in_flight and (not gate.is_open or gate.is_dirty):
            gate.jobs.remove(job)
        if gate.jobs:
            link.ready[ticket] = None

    def _sent(self, link: _Link, gate: Gate, command: PostChunk, num_bytes: int) -> ChunkSent:
        """All readers have the chunk."""
        self.counters["bytes_sent"] += num_bytes
        is_last = command.payload is not None
        if is_last:
            self._reserve_no_more(gate)
        if is_last and command.ticket not in link.closing:
            del link.gates[command.ticket]
        return ChunkSent(command.ticket, command.chunk, num_bytes, is_last)

    def _failed(self, link: _Link, job: ChunkJob, message: str, reports: list[TransferReport]) -> None:
        """The ticket is dirty: nothing more of it is posted, what is out stays out."""
        ticket = job.command.ticket
        gate = link.gates[ticket]
        self.counters["writes_failed"] += 1
        gate.drop_jobs()
        self._reserve_no_more(gate)
        if not gate.is_dirty:
            gate.is_dirty = True
            reports.append(WriteFailed(job.command.peer, ticket, message))

    def _post_windows(self, link: _Link, now: float, reports: list[TransferReport]) -> None:
        """One window of each ticket in turn, so that a long transfer does not hold up a short one."""
        while link.ready and len(link.writes) < self._config.max_windows:
            ticket, _ = link.ready.popitem(last=False)
            gate = link.gates.get(ticket)
            job = None if gate is None else gate.next_job()
            if gate is not None and job is not None:
                self._post_next(link, gate, job, now, reports)
                link.ready[ticket] = None

    def _post_next(self, link: _Link, gate: Gate, job: ChunkJob, now: float, reports: list[TransferReport]) -> None:
        closes = len(job.windows) <= 1
        window = job.windows.popleft() if job.windows else ()
        gate.has_posted = True
        try:
            notification = job.notification if closes else None
            write = self._post(job, window, notification)
        except TransportError as error:
            self._failed(link, job, str(error), reports)
            return
        self.counters["writes_posted"] += 1
        num_bytes = bytes_of(window)
        gate.num_in_flight += 1
        gate.bytes_in_flight += num_bytes
        job.announced = closes
        job.in_flight.add(write)
        allowed_s = self._config.stall_s + num_bytes / self._config.slow_bytes_per_s
        if self._staging is not None and isinstance(window, StagedWindow):
            allowed_s += 2 * self._staging.config.patience_s  # it may wait for memory on either side
        link.writes[write] = _Posted(job, num_bytes, now + allowed_s)

    def _post(self, job: ChunkJob, window: Window, notification: bytes | None) -> WriteId:
        if not isinstance(window, StagedWindow):
            return self._transport.write(job.command.peer, window, notification, job.reader)
        if self.staged is None:
            raise TransportError("no staging memory here")
        return self.staged.writer.write(job.command.peer, job.command.ticket, window, notification, job.reader)

    def _close_gate(self, command: CloseGate, now: float) -> list[TransferReport]:
        link = self._links.get(command.peer)
        gate = link.gates.get(command.ticket) if link else None
        if link is None:
            return []  # fenced meanwhile: PeerFenced answers for it
        if gate is None:  # this rank has sent everything
            is_proven = self._transport.evidence is Evidence.COMPLETION
            return [GateDrained(command.ticket, Drain.CLEAN if is_proven else Drain.DIRTY)]
        gate.is_open = False
        gate.drop_jobs()
        self._reserve_no_more(gate)
        link.closing[command.ticket] = now
        reports: list[TransferReport] = []
        self._report_drained(link, now, reports)
        return reports

    def _report_drained(self, link: _Link, now: float, reports: list[TransferReport]) -> None:
        for ticket, tell_at in list(link.closing.items()):
            gate = link.gates[ticket]
            if gate.num_in_flight == 0:
                reports.append(GateDrained(ticket, self._outcome(gate)))
                del link.closing[ticket], link.gates[ticket]
            elif now >= tell_at:
                reports.append(GateDraining(ticket, gate.bytes_in_flight))
                link.closing[ticket] = now + _TELL_EVERY_S

    def _outcome(self, gate: Gate) -> Drain:
        """What may be said of a closed gate with nothing outstanding."""
        is_proven = self._transport.evidence is Evidence.COMPLETION or not gate.has_posted
        return Drain.CLEAN if is_proven and not gate.is_dirty else Drain.DIRTY

    # ------------------------------------------------------------ reading

    def _verify(self, command: VerifyPages, now: float) -> list[TransferReport]:
        """The answer, if there is one: where completions prove nothing, what is not right yet may be on its way."""
        waits = self._transport.evidence is Evidence.CONTENTS
        give_up_at = now + self._config.landing_s if waits else now
        landing = self._landings[command.ticket] = _Landing(command, list(command.checks), give_up_at, now)
        return self._look(landing, now)

    def _look(self, landing: _Landing, now: float) -> list[TransferReport]:
        command = landing.command
        link = self._links.get(command.peer)
        if link is None or link.incoming is None:
            problem = f"{command.peer} was fenced"
        else:
            plan = link.incoming
            num_tokens = command.num_tokens
            landing.checks = [check for check in landing.checks if not self._is_right(plan, check, num_tokens)]
            if landing.checks and now < landing.give_up_at:
                landing.look_later(now)
                return []
            problem = None
            if landing.checks:
                problem = f"{WRONG_CONTENTS} in pool {landing.checks[0].pool} differs from the writer's"
        del self._landings[command.ticket]
        return [PagesVerified(command.ticket, problem)]

    def _is_right(self, plan: CachePlan, check: PageCheck, num_tokens: int) -> bool:
        """The prompt's last page may have been written in part: as far as the writer's last one goes."""
        routes = [plan.route(group.name, *check.pair) for group in self._config.cache.groups_of(check.pool)]
        src, dst = routes[0].src.page_size, routes[0].dst.page_size
        end = PromptPages(num_tokens, src, dst).end
        written = tokens_before(end, check.first, len(check.pages), dst)
        num_whole = written.count(dst)
        sums = self._memory.checksums(check.pool, check.pages[:num_whole], [route.dst_slices for route in routes])
        for page, num_written in zip(check.pages[num_whole:], written[num_whole:], strict=True):
            slices = [route.arriving(num_written) for route in routes]
            sums += self._memory.checksums(check.pool, (page,), slices)
        return sums == check.checksums


def _remote_rank(end: RankEnd) -> RemoteRank:
    return RemoteRank(end.metadata, tuple(RemoteRegion(r.id, r.base, r.num_bytes, r.device) for r in end.regions))
