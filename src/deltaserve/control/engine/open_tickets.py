"""Tickets that one reader handed out: whose they are, what they bring, what our ranks were told, how they end."""

from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.table import Peer
from deltaserve.control.transfer.commands import ExpectPages, ForgetPages, Landed, TicketId
from deltaserve.control.transfer.receiver import Heard, Receiver, Ticket
from deltaserve.control.transfer.staging import STAGING
from deltaserve.core.ids import Attempt, Boot, PeerName, PoolId, Room, TicketSeq
from deltaserve.core.layout.copy_plan import RankPair, plan_cache
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Component, Drained, Draining, Grant, Revoke

Holder = TypeVar("Holder")
"""What waits for the pages of a ticket."""


class OpenTickets(Generic[Holder]):
    """All tickets of one reader that are under way."""

    def __init__(
        self, config: InstanceConfig, links: PeerLinks, receiver: Receiver, state_pools: Sequence[PoolId] = ()
    ) -> None:
        """`state_pools`: pools of recurrent states."""
        self._config = config
        self._links = links
        self._receiver = receiver
        self._page_bytes = config.page_bytes
        self._state_pools = state_pools
        self._pairs_from: dict[int, tuple[RankPair, ...]] = {}
        """Number of ranks that write |-> the pairs of ranks that pages move between."""
        self._holders: dict[Ticket, tuple[Holder, bytes]] = {}
        """Ticket |-> who waits for it, and the key of the first page that it brings."""
        self._coming: Counter[bytes] = Counter()
        """Key of the first page that a ticket brings |-> tickets."""
        self._expected: set[TicketId] = set()
        """Tickets whose pages the ranks were told of."""

    # ------------------------------------------------------------ open

    def grant(self, peer: PeerName, room: Room, attempt: Attempt, missing: Sequence[range]) -> Ticket | None:
        """A ticket for pages that a peer is to write, per pool; None where it is not there, or not so many are free."""
        known = self._links.table.get(peer)
        if known.boot is None or not self._links.is_ready(peer):
            return None
        pairs = self._pairs(len(known.ends))
        return self._receiver.grant(peer, known.boot, room, attempt, missing, pairs)

    def _pairs(self, num_writers: int) -> tuple[RankPair, ...]:
        """The ranks between which the pages of a worker of so many will go."""
        pairs = self._pairs_from.get(num_writers)
        if pairs is None:
            cache = self._config.cache
            pairs = self._pairs_from[num_writers] = plan_cache(cache, num_writers, cache, self._config.tp_size).pairs
        return pairs

    def open(self, ticket: Ticket, holder: Holder, first_key: bytes, turn: EngineTurn) -> None:
        """Tell the ranks what to scatter, before the grant goes out: a rank scatters nothing but what it was told
        of."""
        self._holders[ticket] = holder, first_key
        self._coming[first_key] += 1
        ends = self._links.table.get(ticket.peer).ends
        if any(region.component == STAGING for end in ends for region in end.regions):
            self._expected.add(ticket.id)
            firsts = tuple(missing.start for missing in ticket.coverage.missing)
            turn.do(ExpectPages(ticket.peer, ticket.id, firsts, ticket.pages))

    def landed(self, report: Landed, turn: EngineTurn) -> tuple[Ticket | None, Heard]:
        """The ticket that something has landed of, and what that means for it."""
        ticket, heard = self._receiver.landed(report.peer, report.done, report.pair)
        if ticket is not None and heard is Heard.RELEASED:
            self.over(ticket, turn)
        return ticket, heard

    # ------------------------------------------------------------ end

    def forget(self, ticket: Ticket) -> None:
        """The holder's pages are here, or will not come by this ticket."""
        _, key = self._holders.pop(ticket, (None, None))
        if key is not None:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def over(self, ticket: Ticket, turn: EngineTurn) -> None:
        """A ticket is over: its pages are the holder's, or free."""
        if ticket.id in self._expected:
            self._expected.discard(ticket.id)
            turn.do(ForgetPages(ticket.peer, ticket.id))

    def withdraw(self, ticket: Ticket, turn: EngineTurn) -> None:
        """Nobody waits for it any more: its pages are free once nothing can write there."""
        self.forget(ticket)
        if self._receiver.revoke(ticket, turn.now) is Heard.RELEASED:
            self.over(ticket, turn)
        else:
            self._revoke(ticket, turn)

    def repeat_revokes(self, turn: EngineTurn) -> None:
        for ticket in self._receiver.quarantined():
            if self._links.is_ready(ticket.peer):
                self._revoke(ticket, turn)

    def _revoke(self, ticket: Ticket, turn: EngineTurn) -> None:
        """Tell the process that holds the ticket; another life of that name would answer for numbers of its own.

        Nor is one asked about that was handed out under an earlier boot of ours: its writer has been fenced.
        """
        theirs = self._links.table.get(ticket.peer).boot
        if (self._config.boot, theirs) == (ticket.id.reader_boot, ticket.id.writer_boot):
            self._links.send(ticket.peer, Revoke(ticket=ticket.id.seq), turn)

    def drains(self, peer: Peer, message: Draining | Drained, turn: EngineTurn) -> bool:
        """What a writer says of a revoked ticket; whether it has to be fenced for it."""
        ticket = self.told_of(peer, message.ticket)
        if ticket is None:
            return False
        if isinstance(message, Draining):
            self._receiver.draining(ticket.id, message.bytes_outstanding, turn.now)
            return False
        heard = self._receiver.drained(ticket.id, message.outcome)
        if heard is Heard.RELEASED:
            self.over(ticket, turn)
        return heard is Heard.FENCE

    def fenced(self, peer: PeerName, result: FenceResult, turn: EngineTurn) -> None:
        """No byte of the peer can land any more; or that cannot be had, and its pages stay in quarantine."""
        settle = self._receiver.fenced if result is FenceResult.CLOSED else self._receiver.strand
        for ticket in settle(peer):
            self.over(ticket, turn)

    # ------------------------------------------------------------ views

    def told_of(self, peer: Peer, number: int) -> Ticket | None:
        """The ticket of this number that the peer's present life holds."""
        ticket = self._receiver.get(TicketId(Boot(self._config.boot), peer.boot or Boot(0), TicketSeq(number)))
        return ticket if ticket is not None and ticket.peer == peer.name else None

    def holder_of(self, ticket: Ticket | None) -> Holder | None:
        """Who waits for a ticket."""
        known = None if ticket is None else self._holders.get(ticket)
        return None if known is None else known[0]

    def is_coming(self, key: bytes) -> bool:
        """Whether a ticket brings the page of this key first."""
        return key in self._coming

    def num_bytes(self, ticket: Ticket) -> int:
        """Bytes of the pages that the ticket covers."""
        return self.bytes_of([len(pages) for pages in ticket.pages])

    def bytes_of(self, num_pages: Sequence[int]) -> int:
        """Bytes of so many pages of each pool."""
        return sum(count * size for count, size in zip(num_pages, self._page_bytes, strict=True))

    def num_state_bytes(self, ticket: Ticket) -> int:
        """The part of it that recurrent states are."""
        return sum(len(ticket.pages[pool]) * self._page_bytes[pool] for pool in self._state_pools)


def grant_of(ticket: Ticket) -> Grant:
    """What the writer is told of a ticket."""
    coverage = tuple(
        Component(pool=pool, first=missing.start, pages=pack_u32(pages))
        for pool, (missing, pages) in enumerate(zip(ticket.coverage.missing, ticket.pages, strict=True))
    )
    return Grant(room=ticket.room, attempt=ticket.attempt, ticket=ticket.id.seq, coverage=coverage)
