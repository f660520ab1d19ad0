"""Rooms per role: every (state, event) cell of the tables, and what the tables promise as a whole."""

from collections.abc import Callable

import pytest

from deltaserve.control.engine.status import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
)
from deltaserve.core.errors import StateError
from deltaserve.core.machine import advance
from tests.fixtures.tables import cells, ends, reachable


@pytest.mark.parametrize(("state", "event", "target"), cells(PREFILL_TABLE, PrefillState, PrefillEvent))
def test_every_prefill_cell(state: PrefillState, event: PrefillEvent, target: PrefillState | None) -> None:
    check_cell(lambda: advance(PREFILL_TABLE, state, event, "room"), state.value, event.value, target)


@pytest.mark.parametrize(("state", "event", "target"), cells(DECODE_TABLE, DecodeState, DecodeEvent))
def test_every_decode_cell(state: DecodeState, event: DecodeEvent, target: DecodeState | None) -> None:
    check_cell(lambda: advance(DECODE_TABLE, state, event, "room"), state.value, event.value, target)


def check_cell(move: Callable[[], object], state: str, event: str, target: object | None) -> None:
    if target is not None:
        assert move() is target
        return
    with pytest.raises(StateError, match=f"room: {event} while {state}"):
        move()


def test_prefill_rooms_reach_every_state_and_stay_ended() -> None:
    assert reachable(PREFILL_TABLE, PrefillState.QUEUED) == set(PrefillState)
    assert ends(PREFILL_TABLE) == {PrefillState.ENDED}


def test_decode_rooms_reach_every_state_and_stay_ended() -> None:
    assert reachable(DECODE_TABLE, DecodeState.OFFERED) == set(DecodeState)
    assert ends(DECODE_TABLE) == {DecodeState.ENDED}


def test_a_room_may_end_at_any_time() -> None:
    """Cancel, deadline and the peer's death are legal in every state but the last."""
    for prefill in set(PrefillState) - {PrefillState.ENDED}:
        assert PREFILL_TABLE[prefill][PrefillEvent.END] is PrefillState.ENDED
    for decode in set(DecodeState) - {DecodeState.ENDED}:
        assert DECODE_TABLE[decode][DecodeEvent.END] is DecodeState.ENDED


def test_a_grant_follows_a_start_and_a_row_follows_the_queue() -> None:
    assert {s for s in DecodeState if DecodeEvent.GRANT in DECODE_TABLE[s]} == {DecodeState.STARTED}
    assert {s for s in DecodeState if DecodeEvent.RUN in DECODE_TABLE[s]} == {DecodeState.QUEUED}


def test_a_failed_attempt_of_a_resumed_room_is_computed_here_from_every_remote_state() -> None:
    remote = {DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED, DecodeState.VERIFYING}
    assert {s for s in DecodeState if DecodeEvent.LOCAL in DECODE_TABLE[s]} == remote
