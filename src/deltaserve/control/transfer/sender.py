"""The writer's half of the ticket protocol: what may be posted, which pages are pinned by it, how a revoke is answered.

Source pages stay pinned from the post until their bytes were seen DONE, or the gate drained cleanly, or this side's
endpoint for the peer is gone. A dirty ticket waits for that last one.
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, cast

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.transfer.commands import PagePairs, PostChunk, TicketId
from deltaserve.control.transfer.tables import SENDER, SenderEvent, SenderState
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, Room, TicketSeq
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.machine import advance
from deltaserve.core.tokens import unpack_u32
from deltaserve.core.transport import Evidence
from deltaserve.core.wire.messages import Drain, Grant

_Pins = tuple[tuple[PageId, ...], ...]


@dataclass(slots=True, eq=False)
class SendTicket:
    """A grant received, and what was posted under it."""

    id: TicketId
    peer: PeerName
    room: Room
    prompt: PromptPages
    """Indexes below count the reader's pages of it."""
    firsts: tuple[int, ...]
    """Per pool: index in the prompt of the first page it covers."""
    pages: tuple[tuple[PageId, ...], ...]
    """Per pool: the reader's pages, in order of the prompt."""
    cursors: list[int]
    """Per pool: index in the prompt of the next page to post; only moves forward."""
    state: SenderState = SenderState.OPEN
    next_chunk: int = 0
    pins: dict[int, _Pins] = field(default_factory=dict)
    answer_revoke: bool = False

    def sources(self, pool: PoolId, end: int) -> range:
        """Pages of this side that the next chunk is read from, if it goes up to the reader's page `end`."""
        return self.prompt.sources(self.cursors[pool], end)

    @property
    def is_open(self) -> bool:
        return self.state is SenderState.OPEN


class GrantVerdict(Enum):
    OPENED = "opened"
    REPEATED = "repeated"
    CLOSED = "closed"
    """Below the mark, revoked before it came, or over: must not be opened (again)."""


class _Tombstone(NamedTuple):
    """How a ticket ended, for a repeated question about it."""

    outcome: Drain
    """DIRTY: with writes that were never seen DONE, they may still land."""
    is_sent: bool = False
    """Every byte of it was posted and seen DONE."""


_CLEAN = _Tombstone(Drain.CLEAN)


@dataclass(slots=True)
class _Pair:
    """What is remembered of one reader's boot: its mark, and tickets that must never open."""

    closed_below: int = 1
    tombstones: dict[int, _Tombstone] = field(default_factory=dict)
    """Ticket number |-> how it ended."""


class Sender:
    """All tickets this writer holds."""

    def __init__(self, boot: Boot, pools: Sequence[PagePool], evidence: Evidence = Evidence.COMPLETION) -> None:
        self._boot = boot
        self._evidence = evidence
        self._pools = tuple(pools)
        self._tickets: dict[TicketId, SendTicket] = {}
        self._pairs: dict[tuple[PeerName, Boot], _Pair] = {}
        self.moves: Counter[tuple[SenderState, SenderEvent]] = Counter()

    # ------------------------------------------------------------ grants

    def accept(
        self, peer: PeerName, reader_boot: Boot, grant: Grant, prompt: PromptPages
    ) -> tuple[SendTicket | None, GrantVerdict]:
        """Open a grant's ticket, once. The caller has checked that its coverage fits the room's prompt."""
        key = TicketId(reader_boot, self._boot, TicketSeq(grant.ticket))
        known = self._tickets.get(key)
        if known is not None:
            return known, GrantVerdict.REPEATED
        pair = self._pair(peer, reader_boot)
        if grant.ticket < pair.closed_below or grant.ticket in pair.tombstones:
            return None, GrantVerdict.CLOSED
        coverage = sorted(grant.coverage, key=lambda component: component.pool)
        firsts = tuple(component.first for component in coverage)
        ticket = SendTicket(
            id=key,
            peer=peer,
            room=Room(grant.room),
            prompt=prompt,
            firsts=firsts,
            pages=tuple(cast(tuple[PageId, ...], unpack_u32(component.pages)) for component in coverage),
            cursors=list(firsts),
        )
        self._tickets[key] = ticket
        return ticket, GrantVerdict.OPENED

    def advance_mark(self, peer: PeerName, reader_boot: Boot, closed_below: int) -> None:
        """The reader says every ticket below is over: forget tombstones."""
        if closed_below <= 1:
            return
        pair = self._pair(peer, reader_boot)
        before, pair.closed_below = pair.closed_below, max(pair.closed_below, closed_below)
        if closed_below - before > len(pair.tombstones):  # a mark may leap, by any number
            pair.tombstones = {seq: end for seq, end in pair.tombstones.items() if seq >= closed_below}
            return
        for seq in range(before, closed_below):
            pair.tombstones.pop(seq, None)

    def _pair(self, peer: PeerName, reader_boot: Boot) -> _Pair:
        return self._pairs.setdefault((peer, reader_boot), _Pair())

    # ------------------------------------------------------------ posting

    def post(
        self, ticket: SendTicket, ends: Sequence[int], src: Sequence[tuple[PageId, ...]], payload: bytes | None
    ) -> PostChunk:
        """The coverage up to the reader's pages `ends`, per pool; `payload` makes it the last chunk.

        `src`: per pool, the pages that `ticket.sources` names. They are pinned.
        """
        for pool, pages in zip(self._pools, src, strict=True):
            pool.pin(pages)
        chunk = ticket.next_chunk
        ticket.pins[chunk] = tuple(src)
        ticket.next_chunk += 1
        pools = enumerate(zip(ends, src, strict=True))
        pairs = tuple(self._pairs_of(ticket, PoolId(pool), end, pages) for pool, (end, pages) in pools if pages)
        return PostChunk(ticket.peer, ticket.id, chunk, pairs, payload)

    @staticmethod
    def _pairs_of(ticket: SendTicket, pool: PoolId, end: int, src: tuple[PageId, ...]) -> PagePairs:
        """The next pages of a pool and where they come from."""
        first, start, src_first = ticket.cursors[pool], ticket.firsts[pool], ticket.sources(pool, end).start
        ticket.cursors[pool] = end
        return PagePairs(pool, first, src_first, src, ticket.pages[pool][first - start : end - start])

    # ------------------------------------------------------------ reports

    def chunk_sent(self, key: TicketId, chunk: int) -> SendTicket | None:
        """Every byte of a chunk was seen DONE. The ticket, or None if it is over already."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return None
        self._unpin(ticket, chunk)
        return ticket

    def sent_all(self, ticket: SendTicket) -> Drain:
        """The last chunk was seen DONE. Returns what a revoke is answered with from now on."""
        self._move(ticket, SenderEvent.SEND_ALL)
        outcome = self._after_done(ticket)
        self._forget(ticket, _Tombstone(outcome, is_sent=True))
        return outcome

    def _after_done(self, ticket: SendTicket) -> Drain:
        """What may be said of a ticket whose every post was seen DONE."""
        is_proven = self._evidence is Evidence.COMPLETION or not ticket.next_chunk
        return Drain.CLEAN if is_proven else Drain.DIRTY

    def failed(self, key: TicketId) -> SendTicket | None:
        """A write failed: dirty until this side's endpoint is gone."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._move(ticket, SenderEvent.FAIL)
        return ticket

    def close(self, ticket: SendTicket) -> None:
        """No further posts; CloseGate is due."""
        self._move(ticket, SenderEvent.CLOSE)

    def revoked(self, peer: PeerName, reader_boot: Boot, seq: int) -> SendTicket | None:
        """The reader withdraws a ticket. None: unknown or over; it can never open now and `drain_of` is the answer."""
        key = TicketId(reader_boot, self._boot, TicketSeq(seq))
        ticket = self._tickets.get(key)
        if ticket is None or ticket.peer != peer:
            pair = self._pair(peer, reader_boot)
            if seq >= pair.closed_below:
                pair.tombstones.setdefault(seq, _CLEAN)
            return None
        ticket.answer_revoke = True
        return ticket

    def drain_of(self, peer: PeerName, reader_boot: Boot, seq: int) -> Drain:
        """What is known of a ticket's writes when it is not here (any more)."""
        return self._pair(peer, reader_boot).tombstones.get(seq, _CLEAN).outcome

    def was_sent(self, peer: PeerName, reader_boot: Boot, seq: int) -> bool:
        """Whether a ticket that is over ended with every byte seen DONE."""
        return self._pair(peer, reader_boot).tombstones.get(seq, _CLEAN).is_sent

    def gate_drained(self, key: TicketId, outcome: Drain) -> SendTicket | None:
        """Gate closed, nothing outstanding. A clean one unpins; a dirty one keeps its pins until the fence."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return None
        if outcome is Drain.DIRTY:
            self._move(ticket, SenderEvent.FAIL)
        else:
            self._move(ticket, SenderEvent.DRAIN)
            if ticket.state is SenderState.DRAINED:
                self._forget(ticket)
        return ticket

    def fenced(self, peer: PeerName) -> list[SendTicket]:
        """Note that this side's endpoint for `peer` is gone: nothing reads its source pages any more.

        It does not stop what has left them: a ticket with writes not seen DONE is remembered as dirty.
        """
        over = self.of_peer(peer)
        for ticket in over:
            self._move(ticket, SenderEvent.FENCE)
            self._forget(ticket, _Tombstone(Drain.DIRTY if ticket.pins else self._after_done(ticket)))
        return over

    def _forget(self, ticket: SendTicket, tombstone: _Tombstone = _CLEAN) -> None:
        for chunk in list(ticket.pins):
            self._unpin(ticket, chunk)
        pair = self._pair(ticket.peer, ticket.id.reader_boot)
        if ticket.id.seq >= pair.closed_below:
            pair.tombstones[ticket.id.seq] = tombstone
        del self._tickets[ticket.id]

    def _unpin(self, ticket: SendTicket, chunk: int) -> None:
        for pool, pages in zip(self._pools, ticket.pins.pop(chunk, ()), strict=False):
            pool.unpin(pages)

    def _move(self, ticket: SendTicket, event: SenderEvent) -> None:
        self.moves[ticket.state, event] += 1
        ticket.state = advance(SENDER, ticket.state, event, f"ticket {ticket.id.seq} for {ticket.peer}")

    # ------------------------------------------------------------ views

    def __iter__(self) -> Iterator[SendTicket]:
        return iter(list(self._tickets.values()))

    def __len__(self) -> int:
        return len(self._tickets)

    def get(self, key: TicketId) -> SendTicket | None:
        return self._tickets.get(key)

    def of_peer(self, peer: PeerName) -> list[SendTicket]:
        return [t for t in self._tickets.values() if t.peer == peer]

    def forget_boots(self, peer: PeerName, current: Boot | None) -> None:
        """Marks and tombstones of readers that are over; those of `current` stay."""
        for key in [k for k in self._pairs if k[0] == peer and k[1] != current]:
            del self._pairs[key]

    def forget_strangers(self, known: Container[PeerName]) -> None:
        """The same of all that nobody remembers any more."""
        for key in [key for key in self._pairs if key[0] not in known]:
            del self._pairs[key]

    def num_tombstones_of(self, peer: PeerName) -> int:
        return sum(len(pair.tombstones) for (name, _), pair in self._pairs.items() if name == peer)

    @property
    def num_tombstones(self) -> int:
        return sum(len(pair.tombstones) for pair in self._pairs.values())
