"""Retry rules: every row, and how often."""

import pytest

from deltaserve.control.front.retry import (
    MAX_ENDED,
    REMEDIES,
    Cause,
    Remedy,
    Retries,
    blame,
    cause_of,
    waits_for_workers,
)
from deltaserve.core.errors import FailReason

ENDLESS = {Cause.SILENT}
WAITED_OUT = {Cause.FENCED, Cause.CAPACITY, Cause.LEAVING}
BOUNDED = [cause for cause in Cause if cause not in ENDLESS]


def test_every_cause_has_a_remedy_and_a_bound_or_needs_none() -> None:
    assert REMEDIES.keys() == set(Cause) - ENDLESS
    assert all(remedies and Remedy.GIVE_UP not in remedies for remedies in REMEDIES.values())


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("cause", BOUNDED)
def test_so_often_per_cause(cause: Cause, is_started: bool) -> None:
    retries = Retries()
    assert tuple(retries.next(cause, is_started) for _ in REMEDIES[cause]) == REMEDIES[cause]
    last = Remedy.LATER if is_started and cause in WAITED_OUT else Remedy.GIVE_UP
    assert [retries.next(cause, is_started) for _ in range(3)] == [last] * 3
    assert all(retries.next(other, is_started) is not Remedy.GIVE_UP for other in Cause if other is not cause)


@pytest.mark.parametrize("cause", BOUNDED)
def test_bounds_count_from_the_last_new_token(cause: Cause) -> None:
    retries = Retries()
    found = []
    for _ in range(5):
        found.append(retries.next(cause, True))
        retries.progressed()
    is_for_life = cause is Cause.NUMERICAL
    assert (Remedy.GIVE_UP in found) is is_for_life


def test_a_worker_that_is_only_silent_is_left_as_often_as_it_takes() -> None:
    retries = Retries()
    assert {retries.next(Cause.SILENT, False) for _ in range(100)} == {Remedy.OTHER_DECODE}


def test_a_request_that_ends_a_worker_with_each_token_is_stopped() -> None:
    retries = Retries()
    for _ in range(MAX_ENDED):
        assert retries.next(Cause.DECODE, True) is Remedy.OTHER_DECODE
        retries.progressed()
    assert retries.next(Cause.DECODE, True) is Remedy.GIVE_UP


@pytest.mark.parametrize("cause", Cause)
def test_who_waits_for_workers(cause: Cause) -> None:
    """A full cluster says so, unless tokens were delivered; whoever lost a worker waits for it."""
    assert waits_for_workers(cause, started=True)
    assert waits_for_workers(cause, started=False) is (cause is not Cause.CAPACITY)


@pytest.mark.parametrize("reason", FailReason)
def test_blame(reason: FailReason) -> None:
    """What a request did to itself, and honest shedding, count against nobody."""
    nobody = {"cancelled", "deadline_exceeded", "room_in_use", "bad_extent", "context_length_exceeded", "overloaded"}
    nobody |= {"not_ready", "numerical_error", "compute_failed", "peer_fenced", "grammar_failed"}
    if reason.value in nobody:
        assert blame(reason) is None
    else:
        assert blame(reason) is (Cause.DECODE if reason is FailReason.INTERNAL else Cause.PREFILL)


@pytest.mark.parametrize("reason", FailReason)
def test_cause(reason: FailReason) -> None:
    nobodys = {FailReason.OVERLOADED: Cause.CAPACITY, FailReason.DRAINING: Cause.LEAVING}
    if reason in nobodys:
        assert cause_of(reason, False) is cause_of(reason, True) is nobodys[reason]
        return
    assert cause_of(reason, False) is None
    causes = {
        FailReason.PEER_LOST: Cause.PREFILL_LOST,
        FailReason.NO_PEER: Cause.PREFILL_LOST,
        FailReason.PEER_FENCED: Cause.FENCED,
        FailReason.NUMERICAL: Cause.NUMERICAL,
    }
    assert cause_of(reason, True) is causes.get(reason, Cause.PREFILL)
