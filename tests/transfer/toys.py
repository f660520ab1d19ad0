"""Both halves of the ticket protocol over small pools, and the frames between them."""

from collections.abc import Sequence

from deltaserve.base.ids import Attempt, Boot, PageId, PeerName, PoolId, Room
from deltaserve.base.tokens import pack_u32
from deltaserve.cache.allocator import PagePool
from deltaserve.cache.pages import PageState
from deltaserve.transfer.receiver import Receiver, Ticket
from deltaserve.transfer.sender import Sender
from deltaserve.transport.base import Evidence
from deltaserve.wire.messages import Component, Done, Grant

PREFILL, DECODE = PeerName("prefill-0"), PeerName("decode-0")
PREFILL_BOOT, DECODE_BOOT = Boot(101), Boot(202)
ROOM = Room(b"r" * 16)
DRAIN_TIMEOUT_S = 1.0
PAYLOAD = b"first token"


class DecodeSide:
    """A receiver with its pools."""

    def __init__(self, num_pages: Sequence[int] = (32,), evidence: Evidence = Evidence.COMPLETION) -> None:
        self.pools = tuple(PagePool(count) for count in num_pages)
        self.receiver = Receiver(DECODE_BOOT, self.pools, DRAIN_TIMEOUT_S, evidence)

    def grant(self, num_pages: int, room: Room = ROOM, peer: PeerName = PREFILL, boot: Boot = PREFILL_BOOT) -> Ticket:
        ticket = self.receiver.grant(peer, boot, room, Attempt(1), num_pages)
        assert ticket is not None
        return ticket

    def message(self, ticket: Ticket) -> Grant:
        """The Grant as decode sends it."""
        coverage = tuple(
            Component(
                writer=0,
                reader=0,
                pool=pool,
                pages=pack_u32(pages),
                generations=pack_u32(self.receiver.generations(ticket, PoolId(pool))),
            )
            for pool, pages in enumerate(ticket.pages)
        )
        return Grant(
            room=ticket.room,
            attempt=ticket.attempt,
            ticket=ticket.id.seq,
            prefix_len=0,
            prefix_key=b"",
            coverage=coverage,
            remaining_ms=1000,
        )

    def states(self, pages: Sequence[Sequence[PageId]]) -> set[PageState]:
        """States of some pages, over all pools."""
        return {pool.state(page) for pool, of_pool in zip(self.pools, pages, strict=True) for page in of_pool}

    @property
    def all_free(self) -> bool:
        return all(pool.num_free == pool.num_pages for pool in self.pools)

    def check(self) -> None:
        self.receiver.check_integrity()
        for pool in self.pools:
            pool.check_integrity()


class PrefillSide:
    """A sender with its pools."""

    def __init__(self, num_pages: Sequence[int] = (32,)) -> None:
        self.pools = tuple(PagePool(count) for count in num_pages)
        self.sender = Sender(PREFILL_BOOT, self.pools)

    def allocate(self, num_pages: int) -> tuple[tuple[PageId, ...], ...]:
        taken = tuple(pool.allocate(num_pages) for pool in self.pools)
        assert all(pages is not None for pages in taken)
        return tuple(pages or () for pages in taken)

    @property
    def num_pinned(self) -> int:
        return sum(pool.num_pinned for pool in self.pools)

    def check(self) -> None:
        for pool in self.pools:
            pool.check_integrity()


def done(
    ticket: Ticket,
    chunk: int,
    first: int,
    num_pages: int,
    is_last: bool = False,
    checksums: tuple[bytes, ...] = (),
) -> Done:
    """A chunk's notification."""
    return Done(
        ticket=ticket.id.seq,
        decode_boot=ticket.id.decode_boot,
        prefill_boot=ticket.id.prefill_boot,
        chunk=chunk,
        first_page=first,
        num_pages=num_pages,
        checksums=checksums,
        payload=PAYLOAD if is_last else None,
    )
