"""The reading side of the staged path: lends memory of its ring, and scatters what comes by a lease to pages.

The reader derives from its own plan of the pair of ranks how many bytes a write's plan is, and scatters only what fits
the lease that it gave, into pages that the write's ticket was granted and that did not come from that rank before
(staged_grants.py). A plan for anything else is refused whole: its lease is over, it is never answered. The states of a
lease are STAGED_LEASE (tables.py).

What is reserved ahead of a write is at most half of the ring, and is given back when others wait for it: a slow forward
pins no memory. A wait for memory ends: after the patience it is refused with a reason.

A fence drops the peer's scatters in the same call that destroys the endpoint: nothing is scattered after it, and what
still lands, lands in nobody's lease. Where a fence is impossible its leases stay taken, as the pages do.

Over a transport whose notifications prove nothing (Evidence.CONTENTS) the plan carries a checksum of the bytes, and
they are scattered once it is right: what is announced is looked at again until the patience ends. A lease whose bytes
never became right, or were not wanted, ends with the fence, for they may come yet. Checksums of pages are on there,
too: a page that is wrong all the same is never used.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from deltaserve.control.transfer.commands import ExpectPages, ForgetPages, TicketId
from deltaserve.control.transfer.ring import StagingRing, StagingTooSmall
from deltaserve.control.transfer.staged_grants import PlanVerdict, StagedGrants
from deltaserve.control.transfer.staging import AGAIN_S, StagedPart, StagingRank
from deltaserve.control.transfer.tables import STAGED_LEASE, StagedLeaseEvent, StagedLeaseState
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, RegionId, TicketSeq
from deltaserve.core.layout.copy_plan import CachePlan, PlacedPages
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.machine import advance
from deltaserve.core.tokens import unpack_u32
from deltaserve.core.transport import FenceResult, Notification
from deltaserve.core.wire.staged_frames import (
    FrameOfWriter,
    StageAck,
    StageAsk,
    StagedData,
    StageLease,
    StageRecall,
    StageRefusal,
    StageRelease,
    StageReserve,
)

_LOOK_AGAIN_S = 0.005
"""After announced bytes were not right yet: a look reads them."""
_UNUSED = frozenset({StagedLeaseState.RESERVED, StagedLeaseState.LENT})
"""Leases that nothing came for yet."""


class LeaseKey(NamedTuple):
    """A write of a rank of a peer, in one life of our endpoint for it."""

    peer: PeerName
    life: int
    rank: int
    write: int


@dataclass(slots=True, eq=False)
class _Came:
    """Bytes that were announced and are not scattered yet."""

    data: StagedData
    num_bytes: int
    slices: Iterator[int]
    """The scatter, one step per slice."""
    give_up_at: float
    look_at: float = 0.0

    @property
    def ticket(self) -> TicketId:
        data = self.data
        return TicketId(Boot(data.reader_boot), Boot(data.writer_boot), TicketSeq(data.ticket))


@dataclass(slots=True, eq=False)
class _Lease:
    """Memory that a write of a peer has, or waits for."""

    key: LeaseKey
    state: StagedLeaseState
    recall_at: float
    """When it may be wanted back (again), while it is reserved."""
    tell_at: float = 0.0
    """When it is told again, while nothing came for it."""


@dataclass(slots=True)
class _Peer:
    life: int
    incoming: CachePlan | None = None


class StagedReader:
    """All leases of a rank, and what came by them. For one thread."""

    def __init__(self, here: StagingRank, rank: int, pools: Mapping[str, PoolId]) -> None:
        """`rank`: of this side. `pools`: of each page group."""
        self._here = here
        self._rank = rank
        self._peers: dict[PeerName, _Peer] = {}
        self._lives = count(1)
        self._grants = StagedGrants(pools)
        self._leases: dict[LeaseKey, _Lease] = {}
        self._came: dict[LeaseKey, _Came] = {}
        """Bytes of leases that are ANNOUNCED, LANDING or SCATTERING, in the order of their scatters."""
        self.ring: StagingRing[LeaseKey] = here.ring()
        """Memory to receive in."""
        self.moves: Counter[tuple[StagedLeaseState, StagedLeaseEvent]] = Counter()

    # ------------------------------------------------------------ peers and tickets

    def open(self, peer: PeerName) -> None:
        self._peers[peer] = _Peer(next(self._lives))

    def knows(self, peer: PeerName) -> bool:
        """Whether there is an endpoint for it."""
        return peer in self._peers

    def expect(self, peer: PeerName, incoming: CachePlan) -> None:
        """What the ranks of an attached peer send ours."""
        self._peers[peer].incoming = incoming

    def follow(self, command: ExpectPages | ForgetPages) -> None:
        """What an attached peer was granted, or a ticket that is over."""
        if isinstance(command, ForgetPages):
            self._grants.forget(command.ticket)
            return
        self._grants.expect(command)
        for key, came in list(self._came.items()):
            lease = self._leases[key]
            if lease.state is StagedLeaseState.ANNOUNCED and came.ticket == command.ticket:
                self._judge(lease, came)

    def fence(self, peer: PeerName, result: FenceResult) -> None:
        """The peer's endpoint is gone, or cannot be: then its leases, too, are nobody else's."""
        self._peers.pop(peer, None)
        self._grants.drop_peer(peer)
        self._leases = {key: lease for key, lease in self._leases.items() if key.peer != peer}
        self._came = {key: came for key, came in self._came.items() if key.peer != peer}
        for key in [key for key in self.ring.waiting() if key.peer == peer]:
            self.ring.give_back(key)
        for key in [key for key in self.ring if key.peer == peer]:
            if result is FenceResult.CLOSED:
                self.ring.give_back(key)
            else:
                self.ring.lose(key)

    # ------------------------------------------------------------ lending

    def hear(self, peer: PeerName, rank: int, frame: FrameOfWriter) -> None:
        """`peer` is known."""
        of_peer = self._peers[peer]
        key = LeaseKey(peer, of_peer.life, rank, frame.write)
        lease = self._leases.get(key)
        match frame:
            case StageReserve():
                self._reserve(key, frame.num_bytes)
            case StageAsk():
                self._answer(key, lease, frame.num_bytes)
            case StagedData() if lease is not None and of_peer.incoming is not None:
                self._arrived(lease, frame, of_peer.incoming)
            case StageRelease() if lease is not None:
                if lease.state in _UNUSED or lease.state is StagedLeaseState.WAITING:
                    self._end(lease)

    def _reserve(self, key: LeaseKey, num_bytes: int) -> None:
        """Lend ahead what nobody waits for, up to half of the ring."""
        reserved = [lease.key for lease in self._leases.values() if lease.state is StagedLeaseState.RESERVED]
        places = [self.ring.lease_of(key) for key in reserved]
        num_reserved = sum(place.num_bytes for place in places if place is not None)
        if num_reserved + num_bytes > self.ring.num_bytes // 2:
            return
        if self.ring.take(key, num_bytes) is not None:
            lease = self._leases[key] = _Lease(key, StagedLeaseState.RESERVED, self._here.now)
            self._lend(lease)

    def _answer(self, key: LeaseKey, lease: _Lease | None, num_bytes: int) -> None:
        if lease is None:
            try:
                place = self.ring.ask(key, num_bytes, self._here.now)
            except StagingTooSmall as error:
                self._here.tell(key.peer, key.rank, StageRefusal(write=key.write, reason=str(error)))
                return
            lease = self._leases[key] = _Lease(key, StagedLeaseState.WAITING, self._here.now)
            if place is not None:
                self._move(lease, StagedLeaseEvent.ADMIT)
        elif lease.state is StagedLeaseState.RESERVED:
            self._move(lease, StagedLeaseEvent.ASK)
        if lease.state is StagedLeaseState.LENT:
            self._lend(lease)

    def _lend(self, lease: _Lease) -> None:
        key, place = lease.key, self.ring.lease_of(lease.key)
        if place is not None:
            lease.tell_at = self._here.now + AGAIN_S
            self._here.tell(key.peer, key.rank, StageLease(write=key.write, round=place.round, offset=place.offset))

    def _end(self, lease: _Lease) -> None:
        self._forget(lease)
        self.ring.give_back(lease.key)

    def _forget(self, lease: _Lease) -> None:
        self._move(lease, StagedLeaseEvent.END)
        self._came.pop(lease.key, None)
        del self._leases[lease.key]

    # ------------------------------------------------------------ what comes

    def _arrived(self, lease: _Lease, data: StagedData, plan: CachePlan) -> None:
        key, place = lease.key, self.ring.lease_of(lease.key)
        if lease.state not in _UNUSED or place is None:
            return  # said before
        if (data.round, data.offset) != (place.round, place.offset):  # by a lease that is over
            self._here.counters["staging_malformed"] += 1
            return
        self._move(lease, StagedLeaseEvent.ANNOUNCE)
        parts = self._parts(key.rank, data, plan)
        num_bytes = sum(part.num_bytes for part in parts or ())
        if parts is None or num_bytes > place.num_bytes:
            self._refuse(lease)
            return
        slices, give_up_at = self._scatter(parts, data.offset), self._here.now + self._here.config.patience_s
        came = self._came[key] = _Came(data, num_bytes, slices, give_up_at)
        self._judge(lease, came)

    def _judge(self, lease: _Lease, came: _Came) -> None:
        """Whether the ticket covers what came; where this rank has not heard of it, that is said later."""
        key = lease.key
        match self._grants.take(key.peer, key.rank, came.ticket, came.data.parts):
            case PlanVerdict.GRANTED:
                came.give_up_at = self._here.now + self._here.config.patience_s
                self._came[key] = self._came.pop(key)  # behind those granted before
                self._move(lease, StagedLeaseEvent.GRANT)
                if self._here.proves:
                    self._move(lease, StagedLeaseEvent.LAND)
            case PlanVerdict.REFUSED:
                self._refuse(lease)

    def _refuse(self, lease: _Lease) -> None:
        """Refuse bytes that are not wanted. The write is never answered, so it fails. Where they may come yet, its peer
        is fenced before the lease is anybody else's."""
        self._here.counters["staging_refused"] += 1
        if self._here.proves:
            self._end(lease)
            return
        self._move(lease, StagedLeaseEvent.KEEP)
        self._came.pop(lease.key, None)

    def _parts(self, writer: int, data: StagedData, plan: CachePlan) -> list[StagedPart] | None:
        """What the writer says it sent, by our plan of the pair. None: it cannot be."""
        parts = []
        for said in data.parts:
            if said.group not in plan.routes or writer >= plan.num_writers or len(said.pages) % 4 or said.first < 0:
                return None
            route = plan.route(said.group, writer, self._rank)
            pages = unpack_u32(said.pages)
            if any(page >= self._here.memory.num_pages(said.group) for page in pages):
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
            yield from self._here.memory.scatter(part.group, part.staged, offset, part.dst, part.tokens)
            offset += part.num_bytes

    # ------------------------------------------------------------ turns

    def wait(self) -> None:
        """Look at what waits: for memory, for bytes, for a ticket."""
        now, here = self._here.now, self._here
        for key, reason in self.ring.give_up(now):
            here.tell(key.peer, key.rank, StageRefusal(write=key.write, reason=reason))
            self._forget(self._leases[key])
        for key, _ in self.ring.admit(now):
            self._move(self._leases[key], StagedLeaseEvent.ADMIT)
            self._lend(self._leases[key])
        for lease in self._leases.values():
            if lease.state in _UNUSED and now >= lease.tell_at:
                self._lend(lease)
        for lease in self._leases.values():
            is_wanted = lease.state is StagedLeaseState.RESERVED and self.ring.num_waiting > 0
            if is_wanted and now >= lease.recall_at:
                lease.recall_at = now + AGAIN_S
                here.tell(lease.key.peer, lease.key.rank, StageRecall(write=lease.key.write))
        for key, came in list(self._came.items()):
            if self._leases[key].state is StagedLeaseState.ANNOUNCED and now >= came.give_up_at:
                self._refuse(self._leases[key])

    def move_a_slice(self, heard: list[Notification]) -> bool:
        """Move a slice of the oldest scatter; one that is over adds its note to `heard`. False: there is none."""
        for key, came in list(self._came.items()):
            lease = self._leases[key]
            if not self._has_landed(lease, came):
                continue
            moved = next(came.slices, None)
            self._here.counters["scattered_bytes"] += moved or 0
            self._here.counters["scatter_microseconds"] = self._here.memory.scatter_microseconds()
            if moved is None:
                self._end(lease)
                self._scattered(key, came.data, heard)
            return True
        return False

    def _has_landed(self, lease: _Lease, came: _Came) -> bool:
        """Whether the bytes are here: where no notification proves it, once they are those that the writer sent."""
        now = self._here.now
        if lease.state is StagedLeaseState.LANDING and now >= came.look_at:
            came.look_at = now + _LOOK_AGAIN_S
            if self._here.memory.checksum(came.data.offset, came.num_bytes) == came.data.checksum:
                self._move(lease, StagedLeaseEvent.LAND)
            elif now >= came.give_up_at:
                self._refuse(lease)
        return lease.state is StagedLeaseState.SCATTERING

    def _scattered(self, key: LeaseKey, data: StagedData, heard: list[Notification]) -> None:
        if data.note:
            heard.append(Notification(key.peer, data.note, key.rank))
        self._here.tell(key.peer, key.rank, StageAck(write=key.write))

    def _move(self, lease: _Lease, event: StagedLeaseEvent) -> None:
        self.moves[lease.state, event] += 1
        lease.state = advance(STAGED_LEASE, lease.state, event, f"staged lease {lease.key}")

    # ------------------------------------------------------------ views

    @property
    def is_moving(self) -> bool:
        """The next turn scatters something, or looks for it."""
        return any(self._leases[key].state is not StagedLeaseState.ANNOUNCED for key in self._came)

    @property
    def is_waiting(self) -> bool:
        """Something here needs turns, though nothing of this side's is in flight."""
        return any(lease.state is not StagedLeaseState.KEPT for lease in self._leases.values())

    @property
    def is_quiet(self) -> bool:
        """Nothing is leased, waits or moves."""
        return not (self.ring.num_leased_bytes or self.ring.num_waiting)
