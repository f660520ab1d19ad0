"""The invariants of a run, checked from outside the production objects. A breach raises IntegrityError with its name.

I1 pages are conserved, I2 each has one owner (request, ticket or tree node), I3 locks and I4 counters equal what is
recomputed: the workers' own self-checks. Here besides:
    I5  no write lands on a page that its ticket does not hold (any more)
    I9  one open ticket per room and attempt, and only for a peer whose link is up
    I10 the transport reads pinned pages only
    I15 what is staged lies in a lease of its own from the gather to the scatter; the mark of a ring never moves back
    I16 no lease of another namespace
    I19 a state in the tree is that of exactly the tokens up to its node's end
    I22 whatever was admitted fits every pool
    I35 what is loaded from the file under a tree comes from pinned slots
I6 (every page read is the row's own) is checked by the oracle, I20 by the endpoint, I7, I8 and I11 by the rig.
Memory that changes hands is poisoned in most runs: whoever reads it without having written it is found out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PAGE_TRANSITIONS, PageEvent, PageState
from deltaserve.control.engine.core import EngineCore
from deltaserve.control.transfer.commands import SlotCopy, TicketId
from deltaserve.control.transfer.receiver import Ticket
from deltaserve.control.transfer.ring import RingLease, RingPosition, StagingRing
from deltaserve.control.transfer.staged_transport import StagedTransport
from deltaserve.core.errors import IntegrityError
from deltaserve.core.extents import Span
from deltaserve.core.ids import PageId, PeerName, PoolId, Role
from deltaserve.core.lifetime import Lifetime
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.sim.loopback import WriteArrival
from deltaserve.sim.oracle import Chain, is_state_of, of_revision
from deltaserve.sim.process import SimFront, SimProcess, SimWorker
from deltaserve.sim.situations import Sightings, Situation
from deltaserve.sim.wiring import SimTransport

_FREE = PageState.FREE.value


@dataclass(slots=True)
class _Pages:
    """A pool as it stood after the last event."""

    pool: PagePool
    num_moved: int = 0
    states: bytes = b""
    generations: list[int] = field(default_factory=list)


class _Rank(NamedTuple):
    """The rank whose transport it is."""

    worker: SimWorker
    staged: StagedTransport | None

    def has_staging(self, span: Span) -> bool:
        return span.region >= self.worker.config.cache.num_pools

    def is_lent(self, span: Span, peer: PeerName) -> bool:
        """Staging memory that a peer may write to now."""
        if self.staged is None:
            return False
        ring = self.staged.reader.ring
        leases = [ring.lease_of(owner) for owner in ring if owner.peer == peer]
        return any(lease is not None and _covers(lease, span.offset, span.num_bytes) for lease in leases)

    def is_held(self, span: Span) -> bool:
        """Staging memory that a transfer of ours has now."""
        if self.staged is None:
            return False
        ring = self.staged.writer.ring
        leases, offset = [ring.lease_of(owner) for owner in ring], span.offset - ring.num_bytes
        return any(lease is not None and _covers(lease, offset, span.num_bytes) for lease in leases)


def _covers(lease: RingLease, offset: int, num_bytes: int) -> bool:
    return lease.offset <= offset and offset + num_bytes <= lease.offset + lease.num_bytes


class Watch:
    """Looks at every process that has dealt with something, and at every landing."""

    def __init__(self, full_every: int = 32, poisons: bool = True) -> None:
        """`full_every`: touches of a process between two complete recounts of it."""
        self._full_every = full_every
        self._poisons = poisons
        self._pools: dict[SimWorker, list[_Pages]] = {}
        self._touches: Counter[SimProcess] = Counter()
        self._retractions: Counter[SimWorker] = Counter()
        self._ranks: dict[SimTransport, _Rank] = {}
        self._marks: dict[StagingRing[Any], RingPosition] = {}
        self.seen = Sightings()

    def touched(self, process: SimProcess) -> None:
        self._touches[process] += 1
        if isinstance(process, SimWorker):
            self._look(process)
        if self._touches[process] % self._full_every == 0 or self._has_retracted(process):
            self.check(process)

    def _has_retracted(self, process: SimProcess) -> bool:
        """Whether memory was taken from a request since the last look: rare, and its books are soon made anew."""
        if not isinstance(process, SimWorker):
            return False
        former = self._retractions[process]
        self._retractions[process] = now = process.instance.parts.scheduler.running.num_retractions
        return now != former

    # ------------------------------------------------------------ after every event

    def _look(self, worker: SimWorker) -> None:
        known = self._pools.get(worker)
        if known is None:
            parts = worker.instance.parts
            known = self._pools[worker] = [_Pages(pool) for pool in parts.pools]
            self._ranks |= {rank.transport: _Rank(worker, rank.endpoint.staged) for rank in worker.ranks}
            for rank in worker.ranks:
                if rank.staged is not None:
                    rank.staged.on_gather = partial(_check_gathered, worker)
                    rank.staged.on_scatter = partial(_check_scattered, worker)
                if rank.slots is not None:
                    rank.slots.on_store = partial(_check_gathered, worker)
                    rank.slots.on_load = partial(_check_loaded, worker)
        for rank in worker.ranks:
            if rank.endpoint.staged is not None:
                self._look_at_rings(rank.endpoint.staged)
        for index, pages in enumerate(known):
            if pages.num_moved != pages.pool.num_moved:
                pages.num_moved = pages.pool.num_moved
                self._changed(worker, index, pages)

    def _look_at_rings(self, staged: StagedTransport) -> None:
        for ring in (staged.reader.ring, staged.writer.ring):
            former, mark = self._marks.get(ring), ring.mark
            _claim(former is None or former <= mark, "I15", f"the mark of a ring moves back from {former} to {mark}")
            self._marks[ring] = mark

    def _changed(self, worker: SimWorker, index: int, pages: _Pages) -> None:
        pool = pages.pool
        counted = sum(pool.count(state) for state in PageState) + pool.num_held
        _claim(counted == pool.num_pages, "I1", f"{worker.name} pool {index}: {counted} of {pool.num_pages} pages")
        if not self._poisons:
            return
        states, generations = pool.states(), pool.generations()
        old = pages.states or bytes(pool.num_pages)
        old_generations = pages.generations or [0] * pool.num_pages
        for page in range(pool.num_pages):
            freed = states[page] == _FREE != old[page] and not pool.is_pinned(PageId(page))
            if freed or generations[page] != old_generations[page]:
                worker.memory.poison(PoolId(index), PageId(page))
        pages.states, pages.generations = states, generations

    # ------------------------------------------------------------ complete recount

    def check(self, process: SimProcess) -> None:
        if isinstance(process, SimFront):
            process.core.check_integrity()
        elif isinstance(process, SimWorker):
            process.instance.check_integrity()
            self._check_requests(process)
            _check_tickets(process.instance)
            self.seen.note(Situation.STATE_RECOUNTED, _check_states(process) > 0)
            for rank in process.ranks:
                if rank.endpoint.staged is not None:
                    rank.endpoint.staged.check_integrity()

    def _check_requests(self, worker: SimWorker) -> None:
        parts, size = worker.instance.parts, worker.config.cache.page_size
        for request in parts.scheduler.running:
            total = request.prompt_len + request.sampling.max_tokens
            longest, ahead = min(total, worker.config.max_context_len), worker.config.options.sched.chunk_len
            needed = (kept.most_pages(longest, ahead, size) for kept in worker.config.cache.pools)
            fits = all(need <= pool.num_pages for need, pool in zip(needed, parts.pools, strict=True))
            _claim(fits, "I22", f"{total} tokens admitted")
            lease = request.lease
            _claim(lease is None or lease.namespace == request.namespace, "I16", "a lease of another namespace")

    # ------------------------------------------------------------ landings

    def landed(self, landed: WriteArrival) -> None:
        """Check a write that has landed: the fabric's observer."""
        writer, reader = landed.writer, landed.reader
        if not isinstance(writer, SimTransport) or not isinstance(reader, SimTransport):
            return
        key = writer.tickets.get(landed.write)
        source, target = self._ranks.get(writer), self._ranks.get(reader)
        if landed.reads_source and source is not None and source.worker.is_alive:
            for copy in landed.copies:
                _check_source(source, copy.src)
        self.seen.note(Situation.FENCED_BYTES, landed.dropped)
        self.seen.note(Situation.COPIED_AFTER_FENCE, landed.is_void and not landed.dropped)
        if not landed.dropped and target is not None and target.worker.is_alive:
            self.seen.note(Situation.WRITES_OF_THE_DEAD, source is not None and not source.worker.is_alive)
            self.seen.note(Situation.WRITTEN_BACK, target.worker.instance.role is Role.PREFILL)
            for copy in landed.copies:
                _check_landing(target, landed.src, key, copy.dst)


def _check_landing(rank: _Rank, writer: PeerName, key: TicketId | None, span: Span) -> None:
    reader = rank.worker
    where = f"{reader.name} region {span.region} offset {span.offset}"
    if rank.has_staging(span):
        _claim(rank.is_lent(span, writer), "I15", f"bytes of {writer} land in no lease of its own: {where}")
        return
    if key is None:  # not staged in the end
        held = [ticket for ticket in reader.instance.serving.receiver if ticket.peer == writer]
        _claim(_holds(held, reader, span), "I5", f"{writer} writes pages it was not granted: {where}")
        return
    ticket = reader.instance.serving.receiver.get(key)
    if ticket is None:
        raise IntegrityError(f"I5: bytes of ticket {key.seq}, which is over, land in {where}")
    _claim(_holds([ticket], reader, span), "I5", f"ticket {key.seq} writes pages it was not granted: {where}")


def _holds(tickets: Sequence[Ticket], reader: SimWorker, span: Span) -> bool:
    return set(_pages_of(reader, span)) <= {page for ticket in tickets for page in ticket.pages[span.region]}


def _pages_of(worker: SimWorker, span: Span) -> range:
    size = worker.memory.rank_page_bytes
    return range(span.offset // size, -(-(span.offset + span.num_bytes) // size))


def _check_source(rank: _Rank, span: Span) -> None:
    if rank.has_staging(span):
        _claim(rank.is_held(span), "I15", f"{rank.worker.name} sends staging memory that holds no transfer")
        return
    for page in _pages_of(rank.worker, span):
        _check_gathered(rank.worker, PoolId(span.region), PageId(page))


def _check_gathered(writer: SimWorker, pool: PoolId, page: PageId) -> None:
    is_pinned = writer.instance.parts.pools[pool].is_pinned(page)
    _claim(is_pinned, "I10", f"{writer.name} sends page {page}, which is not pinned")


def _check_scattered(reader: SimWorker, pool: PoolId, page: PageId) -> None:
    is_granted = any(page in ticket.pages[pool] for ticket in reader.instance.serving.receiver)
    _claim(is_granted, "I5", f"{reader.name} scatters to page {page} of pool {pool}, which no ticket holds")


def _check_loaded(reader: SimWorker, copy: SlotCopy) -> None:
    tiering = reader.instance.parts.tiering
    if tiering is None:
        raise IntegrityError(f"I5: {reader.name}, which has no file, loads page {copy.page}")
    is_owned, is_pinned = copy.page in tiering.owned(copy.pool), tiering.tiers[copy.pool].is_pinned(copy.slot)
    _claim(is_owned, "I5", f"{reader.name} loads page {copy.page} of no load")
    _claim(is_pinned, "I35", f"{reader.name} reads slot {copy.slot} of pool {copy.pool} unpinned")


def _check_states(worker: SimWorker) -> int:
    """Check every state that a worker keeps; how many there were."""
    num_states = 0
    for index, kept in enumerate(worker.config.cache.pools):
        if kept.lifetime is not Lifetime.STATE:
            continue
        for namespace, tokens, slot in worker.instance.parts.cache.states(index):
            stood = worker.memory.pages(PoolId(index), [slot])
            where = f"{worker.name} keeps slot {slot} of pool {index} behind {len(tokens) // TOKEN_BYTES} tokens"
            start = Chain(index, of_revision(namespace, worker.config.fingerprint))
            _claim(is_state_of(stood, start, tokens), "I19", where)
            num_states += 1
    return num_states


def _check_tickets(instance: EngineCore) -> None:
    links = instance.links
    held = [ticket for ticket in instance.serving.receiver if not ticket.is_revoked]
    attempts = Counter((_asker(instance, ticket), ticket.room, ticket.attempt) for ticket in held)
    _claim(all(count == 1 for count in attempts.values()), "I9", "two open tickets of one attempt")
    live = [(ticket.peer, ticket.id, ticket.id.writer_boot) for ticket in held]
    live += [(sent.peer, sent.id, sent.id.reader_boot) for sent in instance.outflow.sender if sent.is_open]
    for peer, ticket_id, boot in live:
        is_up = links.is_ready(peer) and links.table.get(peer).boot == boot
        _claim(is_up, "I9", f"ticket {ticket_id.seq} is open, and the link to {peer} is not up")


def _asker(instance: EngineCore, ticket: Ticket) -> PeerName:
    """Whose numbers the attempts of a ticket's room have: two decode workers that a room was tried on, one behind the
    other, may both have their answers written back (seed 17958784844182)."""
    return ticket.peer if instance.role is Role.PREFILL else instance.config.name


def _claim(holds: bool, invariant: str, breach: str) -> None:
    if not holds:
        raise IntegrityError(f"{invariant}: {breach}")


def page_moves(worker: SimWorker) -> Counter[tuple[PageState, PageEvent]]:
    """Pages moved by event since the worker's start, over all its pools."""
    from_state = {event: state for state, cells in PAGE_TRANSITIONS.items() for event in cells}
    moves: Counter[tuple[PageState, PageEvent]] = Counter()
    for pool in worker.instance.parts.pools:
        for event, count in pool.moves.items():
            moves[from_state[event], event] += count
    return moves
