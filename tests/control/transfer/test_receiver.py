"""Decode's half: pages leave a ticket by Done, a clean drain or a fence, and by nothing else."""

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.transfer.receiver import Heard, Receiver
from deltaserve.control.transfer.tables import ReceiverState
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.ids import Attempt, Boot, PageId, PeerName
from deltaserve.core.transport import Evidence
from deltaserve.core.wire.messages import Drain
from tests.control.transfer.toys import DRAIN_TIMEOUT_S, PREFILL, PREFILL_BOOT, ROOM, DecodeSide, done

OTHER = PeerName("prefill-1")


@pytest.mark.parametrize("num_pages", [0, 1, 5])
def test_a_complete_transfer_hands_its_pages_to_the_caller(num_pages: int) -> None:
    side = DecodeSide((32, 40))
    ticket = side.grant(num_pages)
    side.check()
    assert side.receiver.landed(PREFILL, done(ticket, 0, 0, num_pages, is_last=True)) == (ticket, Heard.COMPLETE)
    assert ticket.state is ReceiverState.LANDED
    assert side.receiver.accept(ticket) == ticket.pages
    assert side.states(ticket.pages) <= {PageState.OWNED}
    assert len(side.receiver) == 0
    side.check()
    for pool, pages in zip(side.pools, ticket.pages, strict=True):
        pool.free(pages)
    assert side.all_free


def test_a_grant_takes_all_or_nothing() -> None:
    side = DecodeSide((8, 4))
    receiver = side.receiver
    assert receiver.grant(PREFILL, PREFILL_BOOT, ROOM, Attempt(1), [range(5), range(5)]) is None
    assert side.all_free
    side.grant(3)
    assert receiver.grant(PREFILL, PREFILL_BOOT, ROOM, Attempt(1), [range(1), range(2)]) is None
    side.check()


def test_tickets_are_numbered_per_pair_of_boots() -> None:
    side = DecodeSide()
    assert [side.grant(0).id.seq for _ in range(2)] == [1, 2]
    assert side.grant(0, peer=OTHER, boot=Boot(102)).id.seq == 1
    assert side.grant(0, boot=Boot(103)).id.seq == 1


def test_the_mark_follows_the_oldest_live_ticket() -> None:
    side = DecodeSide()
    assert side.receiver.closed_below(PREFILL, PREFILL_BOOT) == 1
    first, second = side.grant(1), side.grant(1)
    assert side.receiver.closed_below(PREFILL, PREFILL_BOOT) == 1
    side.receiver.revoke(first, 0.0)
    assert side.receiver.closed_below(PREFILL, PREFILL_BOOT) == 1
    side.receiver.drained(first.id, Drain.CLEAN)
    assert side.receiver.closed_below(PREFILL, PREFILL_BOOT) == 2
    side.receiver.landed(PREFILL, done(second, 0, 0, 1, is_last=True))
    side.receiver.accept(second)
    assert side.receiver.closed_below(PREFILL, PREFILL_BOOT) == 3


def test_revoked_pages_stay_quarantined_until_a_clean_drain() -> None:
    side = DecodeSide()
    ticket = side.grant(3)
    assert side.receiver.revoke(ticket, 5.0) is Heard.NOTHING
    assert side.states(ticket.pages) == {PageState.QUARANTINED}
    side.check()
    assert side.receiver.overdue(5.0 + DRAIN_TIMEOUT_S - 0.01) == set()
    assert side.receiver.overdue(5.0 + DRAIN_TIMEOUT_S) == {PREFILL}
    assert side.states(ticket.pages) == {PageState.QUARANTINED}  # a timer frees nothing
    assert side.receiver.drained(ticket.id, Drain.CLEAN) is Heard.RELEASED
    assert side.all_free
    assert side.receiver.drained(ticket.id, Drain.CLEAN) is Heard.NOTHING


def test_the_age_of_the_quarantine_is_that_of_its_oldest_ticket() -> None:
    side = DecodeSide()
    first, second = side.grant(1), side.grant(1)
    ages = []
    for now in (4.0, 5.0, 6.5, 8.0, 9.0):
        if now == 5.0:
            side.receiver.revoke(first, now)
        if now == 6.5:
            side.receiver.revoke(second, now)
        if now == 8.0:
            side.receiver.drained(first.id, Drain.CLEAN)
        if now == 9.0:
            side.receiver.drained(second.id, Drain.CLEAN)
        side.receiver.overdue(now)
        ages.append(side.receiver.quarantine_age_s)
    assert ages == [0.0, 0.0, 1.5, 1.5, 0.0]


def test_a_dirty_drain_frees_nothing_before_the_fence() -> None:
    side = DecodeSide()
    ticket, other = side.grant(3), side.grant(2, peer=OTHER, boot=Boot(102))
    side.receiver.revoke(ticket, 0.0)
    side.receiver.revoke(other, 0.0)
    assert side.receiver.drained(ticket.id, Drain.DIRTY) is Heard.FENCE
    assert side.states(ticket.pages) == {PageState.QUARANTINED}
    assert side.receiver.fenced(PREFILL) == [ticket]
    assert side.states(ticket.pages) == {PageState.FREE}
    assert side.states(other.pages) == {PageState.QUARANTINED}
    side.check()


def test_a_fence_leaves_open_tickets_to_be_revoked_by_their_rooms() -> None:
    side = DecodeSide()
    ticket = side.grant(3)
    assert side.receiver.fenced(PREFILL) == []
    assert side.states(ticket.pages) == {PageState.GRANTED}


def test_drained_means_nothing_for_an_open_ticket() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    assert side.receiver.drained(ticket.id, Drain.CLEAN) is Heard.NOTHING
    assert side.receiver.drained(ticket.id, Drain.DIRTY) is Heard.NOTHING
    assert side.states(ticket.pages) == {PageState.GRANTED}


def test_a_complete_done_while_revoked_is_a_clean_drain() -> None:
    side = DecodeSide()
    ticket = side.grant(4)
    side.receiver.landed(PREFILL, done(ticket, 0, 0, 2))
    side.receiver.revoke(ticket, 0.0)
    assert side.receiver.landed(PREFILL, done(ticket, 1, 2, 2, is_last=True)) == (ticket, Heard.RELEASED)
    assert side.all_free
    side.check()


def test_a_revoke_after_everything_landed_frees_at_once() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    side.receiver.landed(PREFILL, done(ticket, 0, 0, 2, is_last=True))
    assert side.receiver.revoke(ticket, 0.0) is Heard.RELEASED
    assert side.all_free


@pytest.mark.parametrize("revoked_first", [True, False])
def test_announcements_prove_nothing_where_the_transport_says_so(revoked_first: bool) -> None:
    """Neither a revoke after all was announced nor a late announcement gives pages back: only the fence does."""
    side = DecodeSide(evidence=Evidence.CONTENTS)
    ticket = side.grant(2)
    last = done(ticket, 0, 0, 2, is_last=True)
    if revoked_first:
        side.receiver.revoke(ticket, 0.0)
        side.receiver.landed(PREFILL, last)
    else:
        side.receiver.landed(PREFILL, last)
        side.receiver.revoke(ticket, 0.0)
    assert side.states(ticket.pages) == {PageState.QUARANTINED}
    assert side.receiver.fenced(PREFILL) == [ticket]
    assert side.all_free


def test_a_refuted_announcement_waits_for_the_fence() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    side.receiver.landed(PREFILL, done(ticket, 0, 0, 2, is_last=True))
    ticket.is_refuted = True
    assert side.receiver.revoke(ticket, 0.0) is Heard.NOTHING
    assert side.states(ticket.pages) == {PageState.QUARANTINED}


def test_a_stranded_ticket_keeps_its_pages_and_asks_for_no_further_fence() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    side.receiver.revoke(ticket, 0.0)
    assert side.receiver.overdue(DRAIN_TIMEOUT_S) == {PREFILL}
    side.receiver.strand(PREFILL)
    assert side.receiver.overdue(100.0) == set()
    assert side.receiver.quarantine_age_s == 100.0, "what shows that only a restart gives them back"
    assert side.receiver.drained(ticket.id, Drain.DIRTY) is Heard.NOTHING
    assert side.states(ticket.pages) == {PageState.QUARANTINED}
    assert side.receiver.drained(ticket.id, Drain.CLEAN) is Heard.RELEASED
    assert side.all_free


def test_a_stranded_ticket_without_pages_is_over() -> None:
    side = DecodeSide()
    ticket = side.grant(0)
    side.receiver.revoke(ticket, 0.0)
    side.receiver.strand(PREFILL)
    assert side.receiver.get(ticket.id) is None
    assert side.receiver.closed_below(PREFILL, ticket.id.writer_boot) == ticket.id.seq + 1


def test_one_fence_is_asked_for_however_long_it_takes() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    side.receiver.revoke(ticket, 0.0)
    assert side.receiver.overdue(DRAIN_TIMEOUT_S) == {PREFILL}
    side.receiver.fencing(PREFILL)
    assert side.receiver.overdue(100.0) == set()
    assert side.receiver.fenced(PREFILL) == [ticket]
    assert side.all_free


def test_a_writer_that_drains_may_take_its_time_as_long_as_it_says_so() -> None:
    side = DecodeSide()
    first, second = side.grant(2), side.grant(2)
    side.receiver.revoke(first, 0.0)
    side.receiver.revoke(second, 0.5)
    side.receiver.draining(first.id, 1000, 0.9)
    assert side.receiver.overdue(1.4) == set()
    assert side.receiver.overdue(1.5) == {PREFILL}, "nothing was said of the second"
    side.receiver.draining(second.id, 1000, 1.5)
    side.receiver.draining(first.id, 500, 1.6)
    assert (side.receiver.overdue(2.4), side.receiver.quarantine_age_s) == (set(), 2.4)
    assert side.receiver.overdue(2.5) == {PREFILL}
    assert side.receiver.drained(first.id, Drain.CLEAN) is Heard.RELEASED
    side.receiver.draining(first.id, 1, 3.0)  # comes too late: no effect
    assert side.receiver.fenced(PREFILL) == [second]
    assert side.all_free


def test_announcements_without_a_live_ticket_are_counted_and_dropped() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    last = done(ticket, 0, 0, 2, is_last=True)
    assert side.receiver.landed(OTHER, last) == (None, Heard.NOTHING)  # another peer's ticket
    side.receiver.landed(PREFILL, last)
    side.receiver.accept(ticket)
    assert side.receiver.landed(PREFILL, last) == (None, Heard.NOTHING)
    assert side.receiver.late_dones == 2


def test_repeats_have_no_effect_and_breaches_are_told() -> None:
    side = DecodeSide()
    ticket = side.grant(4)
    side.receiver.landed(PREFILL, done(ticket, 0, 0, 2))
    assert side.receiver.landed(PREFILL, done(ticket, 0, 0, 2)) == (ticket, Heard.NOTHING)
    assert side.receiver.landed(PREFILL, done(ticket, 1, 1, 3, is_last=True)) == (ticket, Heard.BREACH)
    assert side.states(ticket.pages) == {PageState.GRANTED}
    side.receiver.revoke(ticket, 0.0)
    assert side.receiver.landed(PREFILL, done(ticket, 1, 1, 3, is_last=True)) == (ticket, Heard.NOTHING)


@pytest.mark.parametrize("checksums", [(b"abcd", b""), (b"abc", b"abcd"), (b"abcd", b"abcdabcd")])
def test_checksums_of_other_numbers_of_pages_are_a_breach(checksums: tuple[bytes, ...]) -> None:
    side = DecodeSide((32, 40))
    ticket = side.grant(1)
    heard = side.receiver.landed(PREFILL, done(ticket, 0, 0, 1, is_last=True, checksums=checksums))
    assert heard == (ticket, Heard.BREACH)
    assert ticket.state is ReceiverState.OPEN


def test_the_verification_names_the_pages_of_each_chunk() -> None:
    side = DecodeSide((32, 40))
    ticket = side.grant(3)
    side.receiver.landed(PREFILL, done(ticket, 1, 2, 1, is_last=True, checksums=(b"cccc", b"dddd")))
    side.receiver.landed(PREFILL, done(ticket, 0, 0, 2, checksums=(b"aaaaaaaa", b"bbbbbbbb")))
    verification = side.receiver.verification(ticket, 12)
    assert verification is not None
    assert verification.ticket == ticket.id
    assert {(c.pool, c.pages, c.checksums) for c in verification.checks} == {
        (0, ticket.pages[0][:2], b"aaaaaaaa"),
        (1, ticket.pages[1][:2], b"bbbbbbbb"),
        (0, ticket.pages[0][2:], b"cccc"),
        (1, ticket.pages[1][2:], b"dddd"),
    }


def test_illegal_moves_raise_and_change_nothing() -> None:
    side = DecodeSide()
    ticket = side.grant(2)
    with pytest.raises(StateError):
        side.receiver.accept(ticket)
    assert side.states(ticket.pages) == {PageState.GRANTED}
    side.receiver.revoke(ticket, 0.0)
    with pytest.raises(StateError):
        side.receiver.revoke(ticket, 1.0)
    assert side.receiver.overdue(DRAIN_TIMEOUT_S) == {PREFILL}
    side.check()


def test_integrity_sees_pages_no_ticket_names() -> None:
    side = DecodeSide()
    side.grant(2)
    side.pools[0].grant(1)
    with pytest.raises(IntegrityError, match="pool 0"):
        side.receiver.check_integrity()


def test_integrity_sees_a_page_in_two_tickets() -> None:
    side = DecodeSide()
    first, second = side.grant(1), side.grant(1)
    second.pages = first.pages
    with pytest.raises(IntegrityError):
        side.receiver.check_integrity()
    assert first.pages[0] != (PageId(99),)


# ---------------------------------------------------------------- another engine takes over


def test_what_is_stranded_is_inherited_under_its_own_numbers() -> None:
    """The next life numbers its tickets anew: an old one of an equal number hinders none, and its end ends none."""
    side = DecodeSide((8, 8))
    stranded = side.grant(2)
    side.receiver.revoke(stranded, now=1.0)
    assert not side.receiver.is_settled
    side.receiver.strand(PREFILL)
    assert side.receiver.is_settled
    inherited = side.receiver.quarantined()
    heir = Receiver(Boot(side.receiver._boot + 1), side.pools, DRAIN_TIMEOUT_S, inherited=inherited)
    heir.check_integrity()
    assert heir.closed_below(PREFILL, PREFILL_BOOT) == 1
    assert heir.overdue(1000.0) == set()
    assert heir.quarantine_age_s == 999.0
    again = heir.grant(PREFILL, PREFILL_BOOT, ROOM, Attempt(1), [range(1), range(1)])
    assert again is not None and again.id.seq == stranded.id.seq
    assert heir.fenced(PREFILL) == [stranded]
    heir.check_integrity()
    assert (heir.closed_below(PREFILL, PREFILL_BOOT), list(heir)) == (1, [again])
