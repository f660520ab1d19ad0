"""Tickets and staged writes: every (state, event) cell, and the laws of memory written in them."""

import pytest

from deltaserve.control.transfer.tables import (
    RECEIVER,
    SENDER,
    STAGED_LEASE,
    STAGED_WRITE,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    StagedLeaseEvent,
    StagedLeaseState,
    StagedWriteEvent,
    StagedWriteState,
)
from deltaserve.core.errors import StateError
from deltaserve.core.machine import advance
from tests.fixtures.tables import cells, ends, reachable


@pytest.mark.parametrize(("state", "event", "target"), cells(RECEIVER, ReceiverState, ReceiverEvent))
def test_every_receiver_cell(state: ReceiverState, event: ReceiverEvent, target: ReceiverState | None) -> None:
    if target is not None:
        assert advance(RECEIVER, state, event, "ticket") is target
        return
    with pytest.raises(StateError, match=f"ticket: {event.value} while {state.value}"):
        advance(RECEIVER, state, event, "ticket")


@pytest.mark.parametrize(("state", "event", "target"), cells(SENDER, SenderState, SenderEvent))
def test_every_sender_cell(state: SenderState, event: SenderEvent, target: SenderState | None) -> None:
    if target is not None:
        assert advance(SENDER, state, event, "ticket") is target
        return
    with pytest.raises(StateError, match=f"ticket: {event.value} while {state.value}"):
        advance(SENDER, state, event, "ticket")


@pytest.mark.parametrize(("state", "event", "target"), cells(STAGED_WRITE, StagedWriteState, StagedWriteEvent))
def test_every_staged_write_cell(
    state: StagedWriteState, event: StagedWriteEvent, target: StagedWriteState | None
) -> None:
    if target is not None:
        assert advance(STAGED_WRITE, state, event, "write") is target
        return
    with pytest.raises(StateError, match=f"write: {event.value} while {state.value}"):
        advance(STAGED_WRITE, state, event, "write")


@pytest.mark.parametrize(("state", "event", "target"), cells(STAGED_LEASE, StagedLeaseState, StagedLeaseEvent))
def test_every_staged_lease_cell(
    state: StagedLeaseState, event: StagedLeaseEvent, target: StagedLeaseState | None
) -> None:
    if target is not None:
        assert advance(STAGED_LEASE, state, event, "lease") is target
        return
    with pytest.raises(StateError, match=f"lease: {event.value} while {state.value}"):
        advance(STAGED_LEASE, state, event, "lease")


def test_a_staged_write_is_done_after_the_word_of_the_scatter_or_directly() -> None:
    assert reachable(STAGED_WRITE, StagedWriteState.ASKING) == set(StagedWriteState)
    assert ends(STAGED_WRITE) == {StagedWriteState.FAILED, StagedWriteState.DONE}
    ways_in = {(state, event) for state, row in STAGED_WRITE.items() for event in row if row[event].value == "done"}
    assert ways_in == {
        (StagedWriteState.WRITTEN, StagedWriteEvent.ACK),
        (StagedWriteState.ACKED, StagedWriteEvent.COMPLETE),
        (StagedWriteState.DIRECT, StagedWriteEvent.COMPLETE),
    }


def test_a_lease_that_is_scattered_was_granted_its_pages_and_has_its_bytes() -> None:
    start = {StagedLeaseState.WAITING, StagedLeaseState.RESERVED}
    assert {found for state in start for found in reachable(STAGED_LEASE, state)} == set(StagedLeaseState)
    assert ends(STAGED_LEASE) == {StagedLeaseState.KEPT, StagedLeaseState.OVER}
    ways_in = {(s, e) for s, row in STAGED_LEASE.items() for e in row if row[e] is StagedLeaseState.SCATTERING}
    assert ways_in == {(StagedLeaseState.LANDING, StagedLeaseEvent.LAND)}
    assert StagedLeaseEvent.END not in STAGED_LEASE[StagedLeaseState.LANDING]


def test_a_receiver_reaches_every_state_and_ends_done_or_closed() -> None:
    assert reachable(RECEIVER, ReceiverState.OPEN) == set(ReceiverState)
    assert ends(RECEIVER) == {ReceiverState.DONE, ReceiverState.CLOSED}


def test_a_sender_reaches_every_state_and_ends_sent_or_drained() -> None:
    assert reachable(SENDER, SenderState.OPEN) == set(SenderState)
    assert ends(SENDER) == {SenderState.SENT, SenderState.DRAINED}


def test_granted_pages_become_free_through_revoked_only() -> None:
    ways_in = {state for state, row in RECEIVER.items() if ReceiverState.CLOSED in row.values()}
    assert ways_in == {ReceiverState.REVOKED}
    assert RECEIVER[ReceiverState.REVOKED] == {ReceiverEvent.RELEASE: ReceiverState.CLOSED}


def test_only_a_fence_leaves_dirty() -> None:
    leaving = {event for event, target in SENDER[SenderState.DIRTY].items() if target is not SenderState.DIRTY}
    assert leaving == {SenderEvent.FENCE}
