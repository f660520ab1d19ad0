"""Both halves of the ticket protocol over small pools, and the frames between them."""

from collections.abc import Sequence

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PageState
from deltaserve.control.transfer.receiver import Receiver, Ticket
from deltaserve.control.transfer.sender import Sender
from deltaserve.core.ids import Attempt, Boot, PageId, PeerName, Room
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import Evidence
from deltaserve.core.wire.messages import Component, Done, Grant, Piece

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
        """Equally many pages of every pool, from the prompt's first on."""
        return self.grant_each([range(num_pages)] * len(self.pools), room, peer, boot)

    def grant_each(
        self, missing: Sequence[range], room: Room = ROOM, peer: PeerName = PREFILL, boot: Boot = PREFILL_BOOT
    ) -> Ticket:
        ticket = self.receiver.grant(peer, boot, room, Attempt(1), missing)
        assert ticket is not None
        return ticket

    def message(self, ticket: Ticket) -> Grant:
        """The Grant as decode sends it."""
        coverage = tuple(
            Component(pool=pool, first=missing.start, pages=pack_u32(pages))
            for pool, (missing, pages) in enumerate(zip(ticket.coverage.missing, ticket.pages, strict=True))
        )
        return Grant(
            room=ticket.room,
            attempt=ticket.attempt,
            ticket=ticket.id.seq,
            coverage=coverage,
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
    """A chunk's notification: pages [first, first + num_pages) of every pool; `checksums` per pool."""
    pools = range(len(ticket.pages) if num_pages else 0)
    pieces = (
        Piece(pool=p, first=first, end=first + num_pages, checksums=checksums[p] if checksums else b"") for p in pools
    )
    return done_of(ticket, chunk, tuple(pieces), is_last)


def done_of(ticket: Ticket, chunk: int, pieces: tuple[Piece, ...], is_last: bool = False) -> Done:
    return Done(
        ticket=ticket.id.seq,
        reader_boot=ticket.id.reader_boot,
        writer_boot=ticket.id.writer_boot,
        chunk=chunk,
        pieces=pieces,
        payload=PAYLOAD if is_last else None,
    )
