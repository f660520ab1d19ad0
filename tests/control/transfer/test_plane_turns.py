"""What a transfer thread does in a turn, in which order, and how long it may sleep then."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from deltaserve.control.transfer.commands import (
    FencePeer,
    ForgetPages,
    PeerFenced,
    TicketId,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.plane_turns import SLEEP_S, PlaneTurns, Polling, PollPace, TransferOrder
from deltaserve.core.ids import Boot, PeerName, TicketSeq
from deltaserve.core.transport import FenceResult

A, B = PeerName("a"), PeerName("b")
FORGET = ForgetPages(A, TicketId(Boot(1), Boot(2), TicketSeq(1)))
FENCED = PeerFenced(A, FenceResult.CLOSED)


@dataclass
class NotedPlane:
    """Notes what it is asked, and when; answers fences."""

    calls: list[tuple[object, float]] = field(default_factory=list)
    has_posted: bool = False

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        self.calls.append((command, now))
        return [PeerFenced(command.peer, FenceResult.CLOSED)] if isinstance(command, FencePeer) else []

    def poll(self, now: float) -> list[TransferReport]:
        self.calls.append(("poll", now))
        return []

    def is_idle(self) -> bool:
        return not self.has_posted

    def expect(self, is_active: bool, now: float) -> None:
        self.calls.append((Polling(is_active), now))

    def close(self) -> None:
        pass


def ticking() -> Callable[[], float]:
    """A clock that shows another second every time."""
    seconds = iter(range(1000))
    return lambda: float(next(seconds))


@pytest.mark.parametrize(
    ("orders", "reports"),
    [
        ([], []),
        ([FencePeer(A)], [FENCED]),
        ([FORGET, FencePeer(A), Polling(is_active=True), FencePeer(B)], [FENCED, PeerFenced(B, FenceResult.CLOSED)]),
        ([Polling(is_active=True), FORGET, Polling(is_active=False)], []),
    ],
)
def test_orders_are_performed_in_order_then_the_plane_is_polled(
    orders: list[TransferOrder], reports: list[TransferReport]
) -> None:
    plane = NotedPlane()
    assert PlaneTurns(plane, ticking()).turn(orders) == reports
    assert plane.calls == [(call, float(second)) for second, call in enumerate([*orders, "poll"])]


def turned(turns: PlaneTurns, num_turns: int = 10) -> PlaneTurns:
    for _ in range(num_turns):
        turns.turn([])
    return turns


def test_it_may_sleep_a_while_after_the_last_thing_that_happened() -> None:
    turns = turned(PlaneTurns(NotedPlane(), ticking()))
    assert turns.wait_s == SLEEP_S
    turns.turn([FORGET])
    assert turns.wait_s == PollPace().fastest_s
    assert turned(turns).wait_s == SLEEP_S


def test_it_never_sleeps_while_a_ticket_is_open_or_something_posted() -> None:
    plane = NotedPlane()
    turns = PlaneTurns(plane, ticking())
    turns.turn([Polling(is_active=True)])
    assert turned(turns).wait_s == PollPace().slowest_s
    turns.turn([Polling(is_active=False)])
    assert turned(turns).wait_s == SLEEP_S
    plane.has_posted = True
    assert turned(turns).wait_s == PollPace().slowest_s


def test_polls_become_rarer_while_nothing_happens_and_never_a_spin() -> None:
    pace = PollPace()
    pace.heard()
    waits = []
    for _ in range(7):
        waits.append(pace.wait_s)
        pace.heard_nothing()
    assert waits == [0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.002, 0.002]
    assert pace.is_slowest
    pace.heard()
    assert not pace.is_slowest
