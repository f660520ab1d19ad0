"""The data-plane half of a rank: performs transfer commands over a Transport and reports what happened.

Called from one thread only (the transfer thread; the simulator's loop). It decides nothing: tickets, leases and pages
are the control plane's; here are gates, windows and notifications. See gate.py for the write gate.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltaserve.control.transfer.chunk_cutter import ChunkCutter, FarReader
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
    LoadPages,
    OpenEndpoint,
    OpenGate,
    PeerFenced,
    PostChunk,
    StagingUsed,
    StorePages,
    TicketId,
    TransferCommand,
    TransferReport,
    VerifyPages,
    WriteFailed,
)
from deltaserve.control.transfer.endpoint_config import MAX_WINDOWS, EndpointConfig, Memory
from deltaserve.control.transfer.gate import ChunkJob, ChunkTotal, Gate, bytes_of
from deltaserve.control.transfer.landings import Landings
from deltaserve.control.transfer.staged_transport import StagedTransport
from deltaserve.control.transfer.staging import (
    COUNTERS,
    StagedWindow,
    Staging,
    Window,
)
from deltaserve.core.errors import ProtocolError, StateError
from deltaserve.core.ids import PeerName
from deltaserve.core.layout.copy_plan import CachePlan, RankPair, plan_cache
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
from deltaserve.core.wire.codec import decode_done
from deltaserve.core.wire.messages import Drain, RankEnd

_SLOW_BYTES_PER_S = 4e6
_TELL_STAGING_EVERY_S = 0.2
"""Pause between two reports of what staging memory was used for."""
_TELL_EVERY_S = 0.5
"""Pause between two reports that a closed gate still waits. Well below the reader's patience with a silent writer."""


@dataclass(frozen=True, slots=True)
class _Posted:
    """A write that was posted and has not ended."""

    job: ChunkJob
    num_bytes: int
    give_up_at: float


@dataclass(slots=True)
class _Link:
    """A peer's side of things: its ranks, and what is queued for them."""

    readers: tuple[FarReader, ...] = ()
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
        self._cutter = ChunkCutter(config, memory, None if staging is None else staging.config.mode)
        self._links: dict[PeerName, _Link] = {}
        self._landings = Landings(config, memory, transport.evidence)
        self.counters: Counter[str] = Counter()
        """bytes_sent, writes_posted, writes_failed, malformed_notifications; and those of staging.py."""
        self._staging = staging
        self.staged: StagedTransport | None = None
        """Staging between this endpoint and the transport; None: this rank has no staging memory."""
        if staging is not None:
            cache = config.cache
            pools = {group.name: cache.pool_of(group) for group in cache.groups}
            self.staged = StagedTransport(transport, staging, config.shard.rank, pools, self.counters)
        self._transport = self.staged or transport
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
                link = self._links.get(command.peer)
                return self._landings.verify(command, None if link is None else link.incoming, now)
            case ExpectPages() | ForgetPages():
                if self.staged is not None and command.peer in self._links:  # else fenced meanwhile
                    self.staged.reader.follow(command)
                return []
            case FencePeer():
                return [self._fence(command.peer)]
            case StorePages() | LoadPages():  # see tier_plane.py
                raise StateError("there is no file under the tree of this rank")

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
        return [*reports, *self._landings.poll(now), *self._staging_used(now)]

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
            readers = self._cutter.readers(peer, theirs, far)
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

    def _fence(self, peer: PeerName) -> PeerFenced:
        self._links.pop(peer, None)
        self._landings.drop_peer(peer)
        try:
            result = self._transport.fence(peer)
        except TransportError:
            result = FenceResult.IMPOSSIBLE
        return PeerFenced(peer, result)

    def writes_rows(self, peer: PeerName) -> bool:
        """Whether pages for an attached peer go in rows: they are cut otherwise there, and nothing stages them."""
        link = self._links.get(peer)
        return link is not None and any(map(self._cutter.writes_rows, link.readers))

    # ------------------------------------------------------------ writing

    def _open_gate(self, command: OpenGate) -> None:
        link = self._links.get(command.peer)
        if link is None:
            return  # fenced meanwhile
        gate = link.gates[command.ticket] = Gate(command.ticket)
        for reader in link.readers:
            if num_bytes := self._cutter.ahead_bytes(reader, command.num_pages):
                gate.ahead[reader.rank] = num_bytes
                self._reserve(command.peer, gate, reader.rank)

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
        jobs = self._jobs(link, command)
        gate.jobs += jobs
        gate.unsent[command.chunk] = ChunkTotal(len(jobs), sum(job.num_bytes for job in jobs))
        link.ready.setdefault(command.ticket)
        return []

    def _jobs(self, link: _Link, command: PostChunk) -> list[ChunkJob]:
        return [self._cutter.job(command, reader) for reader in link.readers]

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
        while link.ready and len(link.writes) < MAX_WINDOWS:
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
        allowed_s = self._config.stall_s + num_bytes / _SLOW_BYTES_PER_S
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


def _remote_rank(end: RankEnd) -> RemoteRank:
    return RemoteRank(end.metadata, tuple(RemoteRegion(r.id, r.base, r.num_bytes, r.device) for r in end.regions))
