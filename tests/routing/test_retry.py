"""Retry rules: every row, once per cause, never after the first token."""

import itertools

import pytest

from deltaserve.base.errors import FailReason
from deltaserve.routing.retry import REMEDIES, Cause, Remedy, Retries, blame, cause_of


@pytest.mark.parametrize(("cause", "started"), list(itertools.product(Cause, (False, True))))
def test_every_row(cause: Cause, started: bool) -> None:
    before = {
        Cause.PREFILL: Remedy.NEXT_PREFILL,
        Cause.PREFILL_LOST: Remedy.OTHER_PREFILL,
        Cause.DECODE: Remedy.OTHER_DECODE,
        Cause.CAPACITY: Remedy.OTHER_PAIR,
    }
    assert REMEDIES[cause, started] is (Remedy.GIVE_UP if started else before[cause])


@pytest.mark.parametrize("cause", Cause)
def test_once_per_cause(cause: Cause) -> None:
    retries = Retries()
    assert retries.next(cause, False) is not Remedy.GIVE_UP
    assert retries.next(cause, False) is Remedy.GIVE_UP
    others = [other for other in Cause if other is not cause]
    assert all(retries.next(other, False) is not Remedy.GIVE_UP for other in others)


@pytest.mark.parametrize("cause", Cause)
def test_nothing_is_retried_after_the_first_token(cause: Cause) -> None:
    assert Retries().next(cause, True) is Remedy.GIVE_UP


@pytest.mark.parametrize("reason", FailReason)
def test_blame(reason: FailReason) -> None:
    """What a request did to itself, and honest shedding, count against nobody."""
    nobody = {"cancelled", "deadline_exceeded", "room_in_use", "bad_extent", "context_length_exceeded", "overloaded"}
    nobody |= {"not_ready", "numerical_error", "compute_failed"}
    if reason.value in nobody:
        assert blame(reason) is None
    else:
        assert blame(reason) is (Cause.DECODE if reason is FailReason.INTERNAL else Cause.PREFILL)


@pytest.mark.parametrize("reason", FailReason)
def test_cause(reason: FailReason) -> None:
    if reason.value in ("overloaded", "not_ready"):
        assert cause_of(reason, False) is cause_of(reason, True) is Cause.CAPACITY
        return
    assert cause_of(reason, False) is None
    is_lost = reason in (FailReason.PEER_LOST, FailReason.NO_PEER)
    assert cause_of(reason, True) is (Cause.PREFILL_LOST if is_lost else Cause.PREFILL)
