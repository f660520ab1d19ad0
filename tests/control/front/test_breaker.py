"""Circuit breaker: every cell, trip and probe, and that it never ejects the last worker."""

import itertools

import pytest

from deltaserve.control.front.breaker import BREAKER_TRANSITIONS, BreakerEvent, Breakers, BreakerState
from deltaserve.core.ids import PeerName

A, B = PeerName("a"), PeerName("b")


def tripped(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    for _ in range(3):
        breakers.failed(A, now)
    return breakers


@pytest.mark.parametrize(("state", "event"), list(itertools.product(BreakerState, BreakerEvent)))
def test_every_cell_exists(state: BreakerState, event: BreakerEvent) -> None:
    expected = {
        BreakerEvent.SUCCEED: BreakerState.CLOSED,
        BreakerEvent.TRIP: BreakerState.OPEN,
        BreakerEvent.PROBE: BreakerState.CLOSED if state is BreakerState.CLOSED else BreakerState.HALF_OPEN,
    }
    assert BREAKER_TRANSITIONS[state][event] is expected[event]


def test_three_failures_in_a_row_open_it_and_a_success_between_starts_over() -> None:
    breakers = Breakers()
    for _ in range(5):
        breakers.failed(A, 0.0)
        breakers.failed(A, 0.0)
        breakers.succeeded(A)
    assert breakers.state(A) is BreakerState.CLOSED
    assert tripped().state(A) is BreakerState.OPEN


def test_an_open_circuit_is_left_alone_for_a_while_then_tried_by_one_room() -> None:
    breakers = tripped()
    assert breakers.advised([A, B], 0.9) == [B]
    assert breakers.advised([A, B], 1.0) == [A, B]
    breakers.chosen(A, 1.0)
    assert breakers.state(A) is BreakerState.HALF_OPEN
    assert breakers.advised([A, B], 1.5) == [B]
    breakers.succeeded(A)
    assert breakers.advised([A, B], 1.5) == [A, B]


def test_a_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breakers, now, pauses = tripped(), 0.0, []
    for _ in range(8):
        start = now
        while A not in breakers.advised([A, B], now):
            now += 0.5
        pauses.append(now - start)
        breakers.chosen(A, now)
        breakers.failed(A, now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_probe_that_ended_in_neither_way_is_followed_by_another() -> None:
    breakers = tripped()
    breakers.chosen(A, 1.0)
    assert A not in breakers.advised([A, B], 1.9)
    assert A in breakers.advised([A, B], 2.0)


def test_the_last_worker_is_never_ejected() -> None:
    breakers = tripped()
    assert breakers.advised([A], 0.0) == [A]
    for _ in range(3):
        breakers.failed(B, 0.0)
    assert breakers.advised([A, B], 0.0) == [A, B]
    assert breakers.advised([], 0.0) == []


def test_a_working_worker_costs_nothing() -> None:
    breakers = Breakers()
    breakers.chosen(A, 0.0)
    breakers.succeeded(A)
    assert breakers.state(A) is BreakerState.CLOSED
