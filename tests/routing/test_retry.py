"""Retry rules: every row, and how often."""

import pytest

from deltaserve.base.errors import FailReason
from deltaserve.routing.retry import (
    REMEDIES,
    Cause,
    Remedy,
    Retries,
    blame,
    cause_of,
    waits_for_workers,
)


def test_every_cause_has_a_remedy_and_a_bound() -> None:
    assert REMEDIES.keys() == set(Cause)
    assert all(remedies and Remedy.GIVE_UP not in remedies for remedies in REMEDIES.values())


@pytest.mark.parametrize("cause", Cause)
def test_so_often_per_cause(cause: Cause) -> None:
    retries = Retries()
    assert tuple(retries.next(cause) for _ in REMEDIES[cause]) == REMEDIES[cause]
    assert retries.next(cause) is Remedy.GIVE_UP
    assert all(retries.next(other) is not Remedy.GIVE_UP for other in Cause if other is not cause)


@pytest.mark.parametrize("cause", Cause)
def test_who_waits_for_workers(cause: Cause) -> None:
    """A full cluster says so, unless tokens were delivered; whoever lost a worker waits for it."""
    assert waits_for_workers(cause, started=True)
    assert waits_for_workers(cause, started=False) is (cause is not Cause.CAPACITY)


@pytest.mark.parametrize("reason", FailReason)
def test_blame(reason: FailReason) -> None:
    """What a request did to itself, and honest shedding, count against nobody."""
    nobody = {"cancelled", "deadline_exceeded", "room_in_use", "bad_extent", "context_length_exceeded", "overloaded"}
    nobody |= {"not_ready", "numerical_error", "compute_failed", "peer_fenced"}
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
