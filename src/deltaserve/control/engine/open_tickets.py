"""Tickets that rooms of fronts wait for: whose they are, what they bring, and what our ranks were told of them."""

from collections import Counter
from collections.abc import Sequence

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.rooms import DecodeRoom
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.table import PeerTable
from deltaserve.control.transfer.commands import ExpectPages, ForgetPages, TicketId
from deltaserve.control.transfer.receiver import Ticket
from deltaserve.control.transfer.staging import STAGING
from deltaserve.core.ids import PoolId
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.layout.shard import Shard


class OpenTickets:
    """All tickets of one reader that are under way."""

    def __init__(self, config: InstanceConfig, peers: PeerTable, state_pools: Sequence[PoolId]) -> None:
        """`state_pools`: pools of recurrent states."""
        self._peers = peers
        of_rank = pool_page_bytes(config.cache, Shard(0, config.tp_size))
        self._page_bytes = tuple(size * config.tp_size for size in of_rank)
        self._state_pools = state_pools
        self._rooms: dict[Ticket, tuple[DecodeRoom, bytes]] = {}
        """Ticket |-> its room, and the key of the first page that it brings."""
        self._coming: Counter[bytes] = Counter()
        """Key of the first page that a ticket brings |-> tickets."""
        self._expected: set[TicketId] = set()
        """Tickets whose pages the ranks were told of."""

    def open(self, ticket: Ticket, room: DecodeRoom, first_key: bytes, turn: EngineTurn) -> None:
        """Tell the ranks what to scatter, before the grant goes out: a rank scatters nothing but what it was told
        of."""
        self._rooms[ticket] = room, first_key
        self._coming[first_key] += 1
        ends = self._peers.get(ticket.peer).ends
        if any(region.component == STAGING for end in ends for region in end.regions):
            self._expected.add(ticket.id)
            firsts = tuple(missing.start for missing in ticket.coverage.missing)
            turn.do(ExpectPages(ticket.peer, ticket.id, firsts, ticket.pages))

    def forget(self, ticket: Ticket) -> None:
        """The room's pages are here, or will not come by this ticket."""
        _, key = self._rooms.pop(ticket, (None, None))
        if key is not None:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def over(self, ticket: Ticket, turn: EngineTurn) -> None:
        """A ticket is over: its pages are the room's, or free."""
        if ticket.id in self._expected:
            self._expected.discard(ticket.id)
            turn.do(ForgetPages(ticket.peer, ticket.id))

    def room_of(self, ticket: Ticket | None) -> DecodeRoom | None:
        """The room that waits for a ticket."""
        known = None if ticket is None else self._rooms.get(ticket)
        return None if known is None else known[0]

    def is_coming(self, key: bytes) -> bool:
        """Whether a ticket brings the page of this key first."""
        return key in self._coming

    def num_bytes(self, ticket: Ticket) -> int:
        """Bytes of the pages that the ticket covers."""
        return sum(len(pages) * size for pages, size in zip(ticket.pages, self._page_bytes, strict=True))

    def num_state_bytes(self, ticket: Ticket) -> int:
        """The part of it that recurrent states are."""
        return sum(len(ticket.pages[pool]) * self._page_bytes[pool] for pool in self._state_pools)
