"""Prefill's half: a ticket opens once, chunks go out once, source pages stay pinned until nothing reads them."""

import pytest

from deltaserve.control.transfer.commands import PagePairs, PostChunk
from deltaserve.control.transfer.sender import GrantVerdict, SendTicket
from deltaserve.control.transfer.tables import SenderState
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Boot, PageId, PoolId
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.wire.messages import Drain
from tests.control.transfer.toys import DECODE, DECODE_BOOT, DecodeSide, PrefillSide

PROMPT = PromptPages(24, 4, 4)
"""Longer than what is granted of it."""


class Pair:
    """An accepted grant of `num_pages` pages, and pages to send."""

    def __init__(self, num_pages: int = 4, pools: tuple[int, ...] = (32,)) -> None:
        self.decode, self.prefill = DecodeSide(pools), PrefillSide(pools)
        self.granted = self.decode.grant(num_pages)
        self.grant = self.decode.message(self.granted)
        ticket, verdict = self.prefill.sender.accept(DECODE, DECODE_BOOT, self.grant, PROMPT)
        assert verdict is GrantVerdict.OPENED
        assert ticket is not None
        self.ticket: SendTicket = ticket
        self.sender = self.prefill.sender
        self.source = self.prefill.allocate(num_pages)

    def post(self, first: int, end: int, payload: bytes | None = None) -> PostChunk:
        return self.sender.post(
            self.ticket, [end] * len(self.source), tuple(pages[first:end] for pages in self.source), payload
        )


def test_chunks_follow_the_coverage_and_are_pinned() -> None:
    pair = Pair(5, (32, 40))
    first = pair.post(0, 3)
    assert (first.chunk, first.payload) == (0, None)
    for pool, pairs in enumerate(first.pairs):
        assert pairs == PagePairs(PoolId(pool), 0, 0, pair.source[pool][:3], pair.granted.pages[pool][:3])
    last = pair.post(3, 5, b"payload")
    assert (last.chunk, [(p.first, len(p.src)) for p in last.pairs]) == (1, [(3, 2), (3, 2)])
    assert last.payload == b"payload"
    assert pair.prefill.num_pinned == 10
    pair.sender.chunk_sent(pair.ticket.id, 0)
    assert pair.prefill.num_pinned == 4
    pair.sender.chunk_sent(pair.ticket.id, 1)
    pair.sender.sent_all(pair.ticket)
    assert pair.ticket.state is SenderState.SENT
    assert pair.prefill.num_pinned == 0
    assert len(pair.sender) == 0
    pair.prefill.check()


def test_each_pool_goes_on_from_where_its_own_pages_ended() -> None:
    """Pool 0 from page 2 of the prompt on, pool 1 from page 4 on."""
    decode, prefill = DecodeSide((32, 40)), PrefillSide((32, 40))
    granted = decode.grant_each([range(2, 6), range(4, 6)])
    ticket, _ = prefill.sender.accept(DECODE, DECODE_BOOT, decode.message(granted), PROMPT)
    assert ticket is not None
    source = prefill.allocate(6)
    first = prefill.sender.post(ticket, (4, 4), (source[0][2:4], ()), None)
    assert first.pairs == (PagePairs(PoolId(0), 2, 2, source[0][2:4], granted.pages[0][:2]),)
    last = prefill.sender.post(ticket, (6, 6), (source[0][4:], source[1][4:]), b"payload")
    assert last.pairs == (
        PagePairs(PoolId(0), 4, 4, source[0][4:], granted.pages[0][2:]),
        PagePairs(PoolId(1), 4, 4, source[1][4:], granted.pages[1]),
    )


def test_a_zero_page_ticket_still_sends_its_last_chunk() -> None:
    pair = Pair(0)
    last = pair.post(0, 0, b"payload")
    assert last.pairs == ()
    assert last.payload == b"payload"


def test_pinned_pages_are_out_of_reach_though_their_owner_freed_them() -> None:
    pair = Pair(4)
    pair.post(0, 4)
    pool = pair.prefill.pools[0]
    pool.free(pair.source[0])
    assert pool.num_free == 28
    pair.sender.chunk_sent(pair.ticket.id, 0)
    assert pool.num_free == 32


def test_a_grant_opens_once() -> None:
    pair = Pair()
    assert pair.sender.accept(DECODE, DECODE_BOOT, pair.grant, PROMPT) == (pair.ticket, GrantVerdict.REPEATED)
    pair.sender.close(pair.ticket)
    assert pair.sender.accept(DECODE, DECODE_BOOT, pair.grant, PROMPT) == (pair.ticket, GrantVerdict.REPEATED)
    pair.sender.gate_drained(pair.ticket.id, Drain.CLEAN)
    assert pair.sender.accept(DECODE, DECODE_BOOT, pair.grant, PROMPT) == (None, GrantVerdict.CLOSED)


def test_a_revoke_that_overtakes_its_grant_keeps_it_from_opening() -> None:
    decode, prefill = DecodeSide(), PrefillSide()
    grant = decode.message(decode.grant(2))
    assert prefill.sender.revoked(DECODE, DECODE_BOOT, grant.ticket) is None
    assert prefill.sender.accept(DECODE, DECODE_BOOT, grant, PROMPT) == (None, GrantVerdict.CLOSED)
    assert prefill.sender.num_tombstones == 1


def test_the_mark_forgets_tombstones_and_goes_forward_only() -> None:
    prefill, decode = PrefillSide(), DecodeSide()
    grants = [decode.message(decode.grant(0)) for _ in range(4)]
    for seq in (1, 2, 4):
        prefill.sender.revoked(DECODE, DECODE_BOOT, seq)
    prefill.sender.advance_mark(DECODE, DECODE_BOOT, 3)
    assert prefill.sender.num_tombstones == 1
    prefill.sender.advance_mark(DECODE, DECODE_BOOT, 1)
    assert prefill.sender.revoked(DECODE, DECODE_BOOT, 2) is None  # below the mark: nothing to remember
    assert prefill.sender.num_tombstones == 1
    verdicts = [prefill.sender.accept(DECODE, DECODE_BOOT, grant, PROMPT)[1] for grant in grants]
    assert verdicts == [GrantVerdict.CLOSED, GrantVerdict.CLOSED, GrantVerdict.OPENED, GrantVerdict.CLOSED]


@pytest.mark.parametrize("mark", [7, 1 << 70])
def test_a_mark_may_leap(mark: int) -> None:
    prefill, decode = PrefillSide(), DecodeSide()
    first = decode.message(decode.grant(0))
    for seq in (2, 5, 6):
        prefill.sender.revoked(DECODE, DECODE_BOOT, seq)
    prefill.sender.advance_mark(DECODE, DECODE_BOOT, mark)
    assert prefill.sender.num_tombstones == 0
    assert prefill.sender.accept(DECODE, DECODE_BOOT, first, PROMPT)[1] is GrantVerdict.CLOSED


def test_marks_and_tombstones_die_with_the_boot_they_belong_to() -> None:
    prefill, decode = PrefillSide(), DecodeSide()
    grant = decode.message(decode.grant(0))
    prefill.sender.revoked(DECODE, DECODE_BOOT, 1)
    assert prefill.sender.accept(DECODE, Boot(999), grant, PROMPT)[1] is GrantVerdict.OPENED  # another boot's ticket 1
    prefill.sender.forget_boots(DECODE, DECODE_BOOT)
    assert prefill.sender.num_tombstones == 1
    prefill.sender.forget_boots(DECODE, Boot(999))
    assert prefill.sender.num_tombstones == 0


def test_a_fence_here_does_not_vouch_for_what_has_left() -> None:
    pair = Pair(4)
    pair.post(0, 2)
    pair.sender.fenced(DECODE)
    assert pair.sender.revoked(DECODE, DECODE_BOOT, pair.grant.ticket) is None
    assert pair.sender.drain_of(DECODE, DECODE_BOOT, pair.grant.ticket) is Drain.DIRTY
    assert pair.sender.drain_of(DECODE, DECODE_BOOT, 77) is Drain.CLEAN


def test_what_was_sent_is_known_until_the_mark_passes_it() -> None:
    pair = Pair(2)
    assert not pair.sender.was_sent(DECODE, DECODE_BOOT, pair.grant.ticket)
    pair.post(0, 2, b"payload")
    pair.sender.chunk_sent(pair.ticket.id, 0)
    pair.sender.sent_all(pair.ticket)
    assert pair.sender.was_sent(DECODE, DECODE_BOOT, pair.grant.ticket)
    pair.sender.advance_mark(DECODE, DECODE_BOOT, pair.grant.ticket + 1)
    assert not pair.sender.was_sent(DECODE, DECODE_BOOT, pair.grant.ticket)


def test_a_drained_ticket_was_not_sent() -> None:
    pair = Pair(2)
    pair.sender.close(pair.ticket)
    pair.sender.gate_drained(pair.ticket.id, Drain.CLEAN)
    assert not pair.sender.was_sent(DECODE, DECODE_BOOT, pair.grant.ticket)


def test_a_fence_with_nothing_outstanding_is_clean() -> None:
    pair = Pair(4)
    pair.post(0, 2)
    pair.sender.chunk_sent(pair.ticket.id, 0)
    pair.sender.fenced(DECODE)
    assert pair.sender.drain_of(DECODE, DECODE_BOOT, pair.grant.ticket) is Drain.CLEAN


def test_a_failed_write_keeps_its_pins_until_the_fence() -> None:
    pair = Pair(4)
    pair.post(0, 2)
    pair.post(2, 4, b"payload")
    assert pair.sender.failed(pair.ticket.id) is pair.ticket
    assert pair.ticket.state is SenderState.DIRTY
    pair.sender.gate_drained(pair.ticket.id, Drain.DIRTY)
    assert pair.prefill.num_pinned == 4
    assert pair.sender.fenced(DECODE) == [pair.ticket]
    assert pair.prefill.num_pinned == 0
    pair.prefill.check()


def test_a_clean_drain_unpins() -> None:
    pair = Pair(4)
    pair.post(0, 2)
    assert pair.sender.revoked(DECODE, DECODE_BOOT, pair.grant.ticket) is pair.ticket
    assert pair.ticket.answer_revoke
    pair.sender.close(pair.ticket)
    assert (pair.ticket.state, pair.prefill.num_pinned) == (SenderState.CLOSING, 2)
    pair.sender.gate_drained(pair.ticket.id, Drain.CLEAN)
    assert (pair.ticket.state, pair.prefill.num_pinned) == (SenderState.DRAINED, 0)


def test_tombstones_of_a_peer_that_nobody_remembers_go() -> None:
    pair = Pair(2)
    pair.sender.fenced(DECODE)
    assert pair.sender.num_tombstones == 1
    pair.sender.forget_strangers({DECODE})
    assert pair.sender.num_tombstones == 1
    pair.sender.forget_strangers(set())
    assert pair.sender.num_tombstones == 0


def test_reports_about_a_ticket_that_is_over_change_nothing() -> None:
    pair = Pair(2)
    pair.sender.fenced(DECODE)
    assert pair.sender.chunk_sent(pair.ticket.id, 0) is None
    assert pair.sender.failed(pair.ticket.id) is None
    assert pair.sender.gate_drained(pair.ticket.id, Drain.CLEAN) is None
    assert pair.sender.fenced(DECODE) == []


def test_illegal_moves_raise() -> None:
    pair = Pair(2)
    with pytest.raises(StateError):
        pair.sender.gate_drained(pair.ticket.id, Drain.CLEAN)  # its gate is open
    assert pair.ticket.state is SenderState.OPEN
    pair.sender.sent_all(pair.ticket)
    with pytest.raises(StateError):
        pair.sender.close(pair.ticket)


def test_free_pages_cannot_be_sent() -> None:
    pair = Pair(2)
    with pytest.raises(StateError):
        pair.sender.post(pair.ticket, (2,), ((PageId(31), PageId(30)),), None)
    assert (pair.ticket.cursors, pair.ticket.next_chunk, pair.prefill.num_pinned) == ([0], 0, 0)
