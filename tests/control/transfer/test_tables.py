"""SENDER and RECEIVER: every (state, event) cell, and the laws of memory written in them."""

import pytest

from deltaserve.control.transfer.tables import (
    RECEIVER,
    SENDER,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
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
