"""The order in which a transfer thread works: what was asked is performed, in order, then the plane is polled.

What the transport has to say it must be asked for, also while a step computes: a notification leaves the writer only
when the writer polls, and over TCP nothing lands before the reader polls. So while something is posted or a ticket is
open the plane is polled: soon after something happened, then ever more rarely. Else the thread may sleep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaserve.control.transfer.commands import TransferCommand, TransferReport


class DataPlane(Protocol):
    """What a transfer thread drives: control/transfer/endpoint.py over a transport, or that of all ranks."""

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]: ...

    def poll(self, now: float) -> list[TransferReport]: ...

    def is_idle(self) -> bool: ...

    def expect(self, is_active: bool, now: float) -> None:
        """Whether the control plane has a ticket open: then it is polled although it waits for nothing of its own."""
        ...

    def close(self) -> None:
        """Close the transport."""
        ...


@dataclass(frozen=True, slots=True)
class Polling:
    """Whether the control plane has a ticket open."""

    is_active: bool


TransferOrder = TransferCommand | Polling

SLEEP_S = 10.0
"""A thread that waits for nothing polls that often: a reader may still ask a writer, which has long given up its write,
what became of the staging memory that it lent."""


@dataclass(slots=True)
class PollPace:
    """How long to wait before the next poll: little after something happened, then twice as long each time."""

    fastest_s: float = 0.0001
    slowest_s: float = 0.002
    wait_s: float = 0.002

    def heard(self) -> None:
        self.wait_s = self.fastest_s

    def heard_nothing(self) -> None:
        self.wait_s = min(2 * self.wait_s, self.slowest_s)

    @property
    def is_slowest(self) -> bool:
        return self.wait_s >= self.slowest_s


class PlaneTurns:
    """Turns of one plane."""

    def __init__(self, plane: DataPlane, clock: Callable[[], float]) -> None:
        """`clock`: asked anew for every order, since a fence may take seconds."""
        self._plane = plane
        self._clock = clock
        self._pace = PollPace()
        self._is_active = False

    @property
    def must_poll(self) -> bool:
        """Whether something may be heard although nothing is asked."""
        return self._is_active or not self._plane.is_idle()

    @property
    def wait_s(self) -> float:
        """How long the next turn may be put off while nothing is asked."""
        # A little longer than it must: what it said last may still need the transport's progress to leave.
        return self._pace.wait_s if self.must_poll or not self._pace.is_slowest else SLEEP_S

    def turn(self, orders: Sequence[TransferOrder]) -> list[TransferReport]:
        reports: list[TransferReport] = []
        for order in orders:
            if isinstance(order, Polling):
                self._is_active = order.is_active
                self._plane.expect(order.is_active, self._clock())
            else:
                reports += self._plane.perform(order, self._clock())
        reports += self._plane.poll(self._clock())
        if reports or orders:
            self._pace.heard()
        else:
            self._pace.heard_nothing()
        return reports
