"""The reader's half of the ticket protocol: which pages a peer may write, and when they may be used again.

Pages leave a ticket in three ways only: Done (to the request), a clean drain, a fence that makes late writes
impossible. Timers never free: they trigger a fence. A writer that drains may take its time, as long as it says so.

    grant -> landed ... -> (LANDED) -> accept -> pages belong to the request
          -> revoke -> drained(CLEAN) | landed(complete) | fenced -> pages free
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PageState
from deltaserve.control.transfer.commands import PageCheck, TicketId, VerifyPages
from deltaserve.control.transfer.coverage import ALONE, Coverage, Landing
from deltaserve.control.transfer.tables import RECEIVER, ReceiverEvent, ReceiverState
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Attempt, Boot, PageId, PeerName, PoolId, Room, TicketSeq
from deltaserve.core.layout.copy_plan import RankPair
from deltaserve.core.machine import advance
from deltaserve.core.transport import Evidence
from deltaserve.core.wire.messages import Done, Drain, Piece

_CHECKSUM_BYTES = 4
_TERMINAL = (ReceiverState.DONE, ReceiverState.CLOSED)


@dataclass(slots=True, eq=False)
class Ticket:
    """A permission handed out, and the pages behind it."""

    id: TicketId
    peer: PeerName
    room: Room
    attempt: Attempt
    pages: tuple[tuple[PageId, ...], ...]
    """Per pool, in order of the prompt."""
    coverage: Coverage
    is_refuted: bool = False
    """What was announced had not landed: a complete coverage proves nothing."""
    state: ReceiverState = ReceiverState.OPEN
    revoked_at: float = 0.0
    """When it was revoked; 0 before."""
    heard_at: float = 0.0
    """When its writer last said that it drains; when revoked, before that."""
    bytes_outstanding: int = 0
    """Bytes outstanding, as its writer said when it was last heard."""
    is_stranded: bool = False
    """Revoked, and its peer could not be fenced: no further fence is tried for it."""

    def pages_of(self, piece: Piece) -> tuple[PageId, ...]:
        """The reader's pages that a piece fills."""
        start = self.coverage.missing[piece.pool].start
        return self.pages[piece.pool][piece.first - start : piece.end - start]

    @property
    def is_revoked(self) -> bool:
        return self.state is ReceiverState.REVOKED


class Heard(Enum):
    """What a frame or notification meant for its ticket."""

    NOTHING = "nothing"
    """Unknown, repeated or incomplete: no effect."""
    COMPLETE = "complete"
    """Everything was announced: verify it, or accept it."""
    RELEASED = "released"
    """The revoked ticket's pages are free."""
    BREACH = "breach"
    """The peer announced what it was not granted: fail the ticket."""
    FENCE = "fence"
    """The peer cannot vouch for its writes: fence it."""


class Receiver:
    """All tickets this reader handed out in this boot. Nothing here but a fence costs more for more open tickets."""

    def __init__(
        self,
        boot: Boot,
        pools: Sequence[PagePool],
        drain_timeout_s: float,
        evidence: Evidence = Evidence.COMPLETION,
        inherited: Iterable[Ticket] = (),
    ) -> None:
        """`inherited`: tickets of a former boot in quarantine, whose pages nobody gives back: they are this receiver's.
        They bear that boot and its numbers, so no mark counts them and no peer is asked about them.
        """
        self._boot = boot
        self._evidence = evidence
        self._pools = tuple(pools)
        self._drain_timeout_s = drain_timeout_s
        self._next_seq: dict[tuple[PeerName, Boot], int] = {}
        self._open: dict[tuple[PeerName, Boot], OrderedDict[int, None]] = {}
        """Numbers of the tickets of a pair that are not over, ascending."""
        self._tickets: dict[TicketId, Ticket] = {ticket.id: ticket for ticket in inherited}
        self._quarantined: OrderedDict[TicketId, Ticket] = OrderedDict(self._tickets)
        """Revoked ones, in that order."""
        self._unanswered: OrderedDict[TicketId, Ticket] = OrderedDict()
        """Revoked tickets whose peer may still answer, in order of when it was heard last."""
        self.moves: Counter[tuple[ReceiverState, ReceiverEvent]] = Counter()
        self.late_dones = 0
        """Announcements without a live ticket: dropped and counted."""
        self.quarantine_age_s = 0.0
        """Seconds since the oldest revoked ticket was revoked, when `overdue` was asked last."""

    # ------------------------------------------------------------ granting

    def grant(
        self,
        peer: PeerName,
        writer_boot: Boot,
        room: Room,
        attempt: Attempt,
        missing: Sequence[range],
        pairs: Sequence[RankPair] = (ALONE,),
    ) -> Ticket | None:
        """Open a ticket for the prompt's pages `missing`, per pool; None if any pool has not so many free.

        `pairs`: the ranks between which pages will go, all of which must announce them.
        """
        if any(pool.num_free < len(pages) for pool, pages in zip(self._pools, missing, strict=True)):
            return None
        seq = self._next_seq.get((peer, writer_boot), 1)
        self._next_seq[peer, writer_boot] = seq + 1
        self._open.setdefault((peer, writer_boot), OrderedDict())[seq] = None
        granted = zip(self._pools, missing, strict=True)
        pages = tuple(pool.grant(len(indexes)) or () for pool, indexes in granted)
        ticket = Ticket(
            id=TicketId(self._boot, writer_boot, TicketSeq(seq)),
            peer=peer,
            room=room,
            attempt=attempt,
            pages=pages,
            coverage=Coverage(missing, pairs),
        )
        self._tickets[ticket.id] = ticket
        return ticket

    def closed_below(self, peer: PeerName, writer_boot: Boot) -> int:
        """Every ticket of the pair below this number is over for good."""
        return next(iter(self._open.get((peer, writer_boot), ())), self._next_seq.get((peer, writer_boot), 1))

    # ------------------------------------------------------------ what arrives

    def landed(self, peer: PeerName, done: Done, pair: RankPair = ALONE) -> tuple[Ticket | None, Heard]:
        """A chunk's notification. For a revoked ticket a complete coverage counts as a clean drain."""
        key = TicketId(Boot(done.reader_boot), Boot(done.writer_boot), TicketSeq(done.ticket))
        ticket = self._tickets.get(key)
        if ticket is None or ticket.peer != peer:
            self.late_dones += 1
            return None, Heard.NOTHING
        landing = ticket.coverage.land(done, pair) if self._checksums_fit(done) else Landing.REFUSED
        if landing is Landing.REFUSED:
            return ticket, Heard.NOTHING if ticket.is_revoked else Heard.BREACH
        if landing is Landing.REPEATED or not ticket.coverage.is_complete:
            return ticket, Heard.NOTHING
        if ticket.is_revoked:
            if not self._has_landed(ticket):
                return ticket, Heard.NOTHING
            self._release(ticket)
            return ticket, Heard.RELEASED
        self._move(ticket, ReceiverEvent.COMPLETE)
        return ticket, Heard.COMPLETE

    def _checksums_fit(self, done: Done) -> bool:
        """One of every page; or none at all, where the announcement is proof enough."""
        if not any(piece.checksums for piece in done.pieces):
            return self._evidence is Evidence.COMPLETION or not done.pieces
        return all(len(piece.checksums) == (piece.end - piece.first) * _CHECKSUM_BYTES for piece in done.pieces)

    def draining(self, key: TicketId, bytes_outstanding: int, now: float) -> None:
        """The writer has closed the gate and waits for writes: its silence counts anew from here."""
        ticket = self._unanswered.get(key)
        if ticket is not None:
            ticket.heard_at, ticket.bytes_outstanding = now, bytes_outstanding
            self._unanswered.move_to_end(key)

    def drained(self, key: TicketId, outcome: Drain) -> Heard:
        """Answer to a Revoke. Dirty: only a fence can give the pages back."""
        ticket = self._tickets.get(key)
        if ticket is None or not ticket.is_revoked:
            return Heard.NOTHING
        if outcome is Drain.DIRTY:
            return Heard.NOTHING if ticket.is_stranded else Heard.FENCE
        self._release(ticket)
        return Heard.RELEASED

    # ------------------------------------------------------------ how a ticket ends

    def verification(self, ticket: Ticket, num_tokens: int) -> VerifyPages | None:
        """What to check once everything of a prompt was announced; None when it came without checksums."""
        checks = tuple(
            PageCheck(pair, PoolId(piece.pool), piece.first, ticket.pages_of(piece), piece.checksums)
            for pair, done in ticket.coverage.dones()
            for piece in done.pieces
            if piece.checksums
        )
        return VerifyPages(ticket.peer, ticket.id, checks, num_tokens) if checks else None

    def accept(self, ticket: Ticket) -> tuple[tuple[PageId, ...], ...]:
        """Done: the pages are OWNED from now on and the caller's."""
        self._move(ticket, ReceiverEvent.ACCEPT)
        for pool, pages in zip(self._pools, ticket.pages, strict=True):
            pool.land(pages)
        self._forget(ticket)
        return ticket.pages

    def revoke(self, ticket: Ticket, now: float) -> Heard:
        """Withdraw the permission. RELEASED: everything had landed, the pages are free already."""
        self._move(ticket, ReceiverEvent.REVOKE)
        ticket.revoked_at = ticket.heard_at = now
        for pool, pages in zip(self._pools, ticket.pages, strict=True):
            pool.revoke(pages)
        self._quarantined[ticket.id] = self._unanswered[ticket.id] = ticket
        if self._has_landed(ticket):
            self._release(ticket)
            return Heard.RELEASED
        return Heard.NOTHING

    def _has_landed(self, ticket: Ticket) -> bool:
        """Whether no byte of the ticket is on its way any more, as far as its notifications prove that."""
        return ticket.coverage.is_complete and not ticket.is_refuted and self._evidence is Evidence.COMPLETION

    def fenced(self, peer: PeerName) -> list[Ticket]:
        """No byte of `peer` can land any more: its revoked tickets' pages are free. Returns them."""
        freed = [t for t in self._tickets.values() if t.peer == peer and t.is_revoked]
        for ticket in freed:
            self._release(ticket)
        return freed

    def fencing(self, peer: PeerName) -> None:
        """A fence is under way, and will be answered: the silence of `peer` asks for no second one meanwhile."""
        for ticket in self.of_peer(peer):
            self._unanswered.pop(ticket.id, None)

    def strand(self, peer: PeerName) -> list[Ticket]:
        """The peer cannot be fenced: its revoked tickets keep their pages, and trigger no further fence.

        One without pages, of a prompt that was all here, keeps nothing: it is over. Returns these.
        """
        released = []
        for ticket in self.of_peer(peer):
            if ticket.is_revoked and not any(ticket.pages):
                self._release(ticket)
                released.append(ticket)
            elif ticket.is_revoked:
                ticket.is_stranded = True
                self._unanswered.pop(ticket.id, None)
        return released

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way that will be accepted, drained or fenced: what is left stays in quarantine."""
        return all(ticket.is_stranded for ticket in self._tickets.values())

    def _release(self, ticket: Ticket) -> None:
        self._move(ticket, ReceiverEvent.RELEASE)
        for pool, pages in zip(self._pools, ticket.pages, strict=True):
            pool.drain(pages)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.id]
        if ticket.id.reader_boot == self._boot:
            del self._open[ticket.peer, ticket.id.writer_boot][ticket.id.seq]
        self._quarantined.pop(ticket.id, None)
        self._unanswered.pop(ticket.id, None)

    def _move(self, ticket: Ticket, event: ReceiverEvent) -> None:
        self.moves[ticket.state, event] += 1
        ticket.state = advance(RECEIVER, ticket.state, event, f"ticket {ticket.id.seq} of {ticket.peer}")

    # ------------------------------------------------------------ views

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def __len__(self) -> int:
        return len(self._tickets)

    def get(self, key: TicketId) -> Ticket | None:
        return self._tickets.get(key)

    def of_peer(self, peer: PeerName) -> list[Ticket]:
        return [t for t in self._tickets.values() if t.peer == peer]

    def quarantined(self) -> list[Ticket]:
        """Revoked and not released, in order of revocation."""
        return list(self._quarantined.values())

    def overdue(self, now: float) -> set[PeerName]:
        """Peers silent about a revoked ticket for too long: to be fenced."""
        oldest = next(iter(self._quarantined.values()), None)
        self.quarantine_age_s = 0.0 if oldest is None else now - oldest.revoked_at
        late = takewhile(lambda t: now >= t.heard_at + self._drain_timeout_s, self._unanswered.values())
        return {ticket.peer for ticket in late}

    def check_integrity(self) -> None:
        """Pages of live tickets are exactly the GRANTED and QUARANTINED ones, each in one ticket."""
        for index, pool in enumerate(self._pools):
            held: dict[PageState, list[PageId]] = {PageState.GRANTED: [], PageState.QUARANTINED: []}
            for ticket in self._tickets.values():
                if ticket.state in _TERMINAL:
                    raise IntegrityError(f"ticket {ticket.id} is {ticket.state.value} and still listed")
                state = PageState.QUARANTINED if ticket.is_revoked else PageState.GRANTED
                held[state].extend(ticket.pages[index])
            for state, pages in held.items():
                if len(set(pages)) != len(pages) or len(pages) != pool.count(state):
                    raise IntegrityError(
                        f"pool {index}: {len(pages)} {state.name} by tickets, {pool.count(state)} there"
                    )
