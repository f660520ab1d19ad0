"""The thread that moves bytes: the only caller of the transport.

A command wakes it at once. What the transport has to say it must ask for, also while a step computes: a notification
leaves the writer only when the writer polls, and over TCP nothing lands before the reader polls. So while something is
posted or a ticket is open it polls: soon after something happened, then ever more rarely. Else it sleeps.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from deltaserve.control.sched.plan import StepResult
from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.process.children.exits import start_thread
from deltaserve.process.children.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class Reports:
    """What the transfer thread has to say, in order."""

    reports: tuple[TransferReport, ...]


class DataPlane(Protocol):
    """What the thread drives: transfer.endpoint.Endpoint over a transport."""

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]: ...

    def poll(self, now: float) -> list[TransferReport]: ...

    def is_idle(self) -> bool: ...

    def expect(self, is_active: bool, now: float) -> None:
        """Whether the control plane has a ticket open: then it is polled although it waits for nothing of its own."""
        ...

    def close(self) -> None:
        """Close the plane with its transport."""
        ...


@dataclass(frozen=True, slots=True)
class Polling:
    """Whether the control plane has a ticket open."""

    is_active: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    """Close the transport and end."""


TransferOrder = TransferCommand | Polling
_Message = TransferOrder | _Stop
_STOP = _Stop()


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
    """Turns of a plane: what was asked is performed, then it is polled."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._pace = PollPace()
        self._is_active = False

    @property
    def wait_s(self) -> float | None:
        """How long the next turn may be put off while nothing is asked. None: until something is."""
        # A little longer than it must: what it said last may still need the transport's progress to leave.
        must_poll = self._is_active or not self._plane.is_idle() or not self._pace.is_slowest
        return self._pace.wait_s if must_poll else None

    def turn(self, orders: Sequence[TransferOrder]) -> list[TransferReport]:
        reports: list[TransferReport] = []
        for order in orders:
            if isinstance(order, Polling):
                self._is_active = order.is_active
                self._plane.expect(order.is_active, time.monotonic())
            else:
                reports += self._plane.perform(order, time.monotonic())
        reports += self._plane.poll(time.monotonic())
        if reports or orders:
            self._pace.heard()
        else:
            self._pace.heard_nothing()
        return reports


class TransferThread:
    """Performs commands in order; reports go to the loop."""

    def __init__(self, open_plane: Callable[[], DataPlane], reports: Mailbox[StepResult | Reports]) -> None:
        """`open_plane` runs in the thread; raises here what it raises."""
        self._open_plane = open_plane
        self._reports = reports
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        opened: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = start_thread("transfer", lambda: self._run(opened))
        problem = opened.get()
        if problem is not None:
            raise problem

    def submit(self, command: TransferCommand) -> None:
        self._inbox.put(command)

    def set_active(self, is_active: bool) -> None:
        """While active the thread polls although it waits for nothing of its own."""
        self._inbox.put(Polling(is_active))

    def stop(self, wait_s: float) -> bool:
        """Close the transport and end. False when that takes longer than `wait_s`."""
        self._inbox.put(_STOP)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self, opened: "queue.SimpleQueue[Exception | None]") -> None:
        try:
            plane = self._open_plane()
        except Exception as error:
            opened.put(error)
            return
        opened.put(None)
        turns = PlaneTurns(plane)
        is_asked_to_stop = False
        while not is_asked_to_stop:
            messages = self._take(turns.wait_s)
            is_asked_to_stop = _STOP in messages
            reports = turns.turn([message for message in messages if not isinstance(message, _Stop)])
            if reports:
                self._reports.put(Reports(tuple(reports)))
        plane.close()

    def _take(self, wait_s: float | None) -> list[_Message]:
        """All messages that are there; waits for one."""
        messages: list[_Message] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=wait_s))
            while True:
                messages.append(self._inbox.get_nowait())
        return messages
