"""The ring of staging memory: places, order of return, waiting. Under random use: tests/property."""

import pytest

from deltaserve.control.transfer.ring import ALIGNMENT, RingLease, RingPosition, StagingRing, StagingTooSmall
from deltaserve.core.errors import StateError

UNIT = ALIGNMENT
RING_WAIT_S = 10.0


def ring_of(units: int) -> StagingRing[str]:
    return StagingRing(units * UNIT, RING_WAIT_S)


def leased(ring: StagingRing[str], owner: str, units: int, now: float = 0.0) -> RingLease:
    lease = ring.ask(owner, units * UNIT, now)
    assert lease is not None
    ring.check_integrity()
    return lease


def test_leases_lie_one_behind_the_other() -> None:
    ring = ring_of(10)
    assert leased(ring, "a", 4) == RingLease(0, 0, 4 * UNIT)
    assert leased(ring, "b", 6) == RingLease(0, 4 * UNIT, 6 * UNIT)
    assert ring.num_leased_bytes == ring.num_bytes


def test_one_that_does_not_fit_the_tail_starts_the_next_round() -> None:
    ring = ring_of(10)
    leased(ring, "a", 4)
    leased(ring, "b", 4)
    ring.give_back("a")
    assert leased(ring, "c", 3) == RingLease(1, 0, 3 * UNIT)
    assert ring.ask("d", 2 * UNIT, 0.0) is None  # 3..4 of round 1 is free, 8..9 of round 0 stays empty
    ring.give_back("b")
    assert ring.admit(0.0) == [("d", RingLease(1, 3 * UNIT, 2 * UNIT))]


@pytest.mark.parametrize("used", range(10))
def test_an_empty_ring_takes_all_of_its_size_wherever_it_stands(used: int) -> None:
    ring = ring_of(10)
    if used:
        leased(ring, "a", used)
        ring.give_back("a")
    assert leased(ring, "b", 10) == RingLease(1 if used else 0, 0, 10 * UNIT)


def test_the_mark_waits_for_the_oldest_and_never_moves_back() -> None:
    ring = ring_of(10)
    for owner in "abc":
        leased(ring, owner, 3)
    ring.give_back("b")
    assert ring.mark == RingPosition(0, 0)
    ring.give_back("a")
    assert ring.mark == RingPosition(0, 6 * UNIT)
    ring.give_back("c")
    assert ring.mark == RingPosition(0, 9 * UNIT)
    assert ring.mark <= leased(ring, "d", 10).start == ring.mark


def test_an_owner_whose_range_is_not_free_yet_may_ask_again() -> None:
    ring = ring_of(10)
    leased(ring, "old", 2)
    first = leased(ring, "a", 2)
    ring.give_back("a")
    again = leased(ring, "a", 2)
    assert again.start > first.start
    ring.give_back("old")
    assert ring.mark == again.start
    ring.check_integrity()


def test_asking_again_changes_nothing() -> None:
    ring = ring_of(4)
    first = leased(ring, "a", 3)
    assert ring.ask("a", 3 * UNIT, 1.0) == first
    assert ring.ask("b", 3 * UNIT, 1.0) is None
    assert ring.ask("b", 3 * UNIT, 9.0) is None
    ring.give_back("a")
    assert len(ring.admit(9.0)) == 1
    assert ring.admit(9.0) == []


def test_each_is_given_back_once() -> None:
    ring = ring_of(4)
    leased(ring, "a", 3)
    ring.ask("b", 3 * UNIT, 0.0)
    ring.give_back("b")  # it only waited
    ring.give_back("a")
    for owner in ("a", "b", "stranger"):
        with pytest.raises(StateError, match=owner):
            ring.give_back(owner)
    assert ring.num_waiting == ring.num_leased_bytes == 0


def test_behind_a_lost_lease_nothing_is_waited_for_in_vain() -> None:
    ring = ring_of(10)
    for owner in "abc":
        leased(ring, owner, 3)
    assert ring.ask("waits", 4 * UNIT, 0.0) is None
    assert ring.ask("small", 3 * UNIT, 0.0) is None
    assert ring.give_up(0.0) == []
    ring.lose("b")  # 3..6 for ever: in the next round 0..3 may be used once more, when "a" is back
    assert [(over.owner, "cannot be fenced" in over.reason) for over in ring.give_up(0.0)] == [("waits", True)]
    with pytest.raises(StagingTooSmall, match="cannot be fenced"):
        ring.ask("later", 4 * UNIT, 0.0)
    ring.give_back("a")
    ring.give_back("c")
    assert ring.admit(0.0) == [("small", RingLease(1, 0, 3 * UNIT))]
    ring.give_back("small")
    with pytest.raises(StagingTooSmall, match="cannot be fenced"):
        ring.ask("later", UNIT, 0.0)
    with pytest.raises(StateError, match="later"):
        ring.lose("later")


def test_sizes_are_rounded_to_whole_elements() -> None:
    ring = ring_of(4)
    assert ring.ask("a", 1, 0.0) == RingLease(0, 0, UNIT)
    assert ring.ask("b", UNIT + 1, 0.0) == RingLease(0, UNIT, 2 * UNIT)
    with pytest.raises(ValueError, match="multiple of 256"):
        StagingRing[str](1000, RING_WAIT_S)


def test_larger_than_the_ring_is_refused_at_once_and_names_the_setting() -> None:
    ring = ring_of(4)
    with pytest.raises(StagingTooSmall, match=r"^1,280 B do not fit the staging ring of 1,024 B: raise --staging"):
        ring.ask("a", 5 * UNIT, 0.0)
    assert not ring.is_waiting("a")


def test_smaller_ones_pass_until_it_has_waited_half_of_its_patience() -> None:
    ring = ring_of(10)
    leased(ring, "a", 6)
    assert ring.ask("large", 8 * UNIT, 0.0) is None
    assert leased(ring, "small", 1, now=4.9)
    assert ring.ask("late", UNIT, 5.0) is None
    assert ring.admit(5.0) == []
    ring.give_back("a")
    ring.give_back("small")
    assert [owner for owner, _ in ring.admit(6.0)] == ["large", "late"]


def test_a_wait_is_bounded_and_says_what_was_in_the_way() -> None:
    ring = ring_of(10)
    leased(ring, "a", 6)
    ring.ask("b", 8 * UNIT, 0.0)
    ring.ask("c", 9 * UNIT, 3.0)
    assert ring.give_up(9.9) == []
    (over,) = ring.give_up(10.0)
    assert over.owner == "b"
    assert over.reason == (
        "waited 10.0 s for 2 KiB of the staging ring of 2 KiB: 1 leases hold 2 KiB of it; raise --staging-memory-mib"
    )
    assert not ring.is_waiting("b")
    assert ring.is_waiting("c")
