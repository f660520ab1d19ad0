"""The thread that moves bytes: the only caller of the transport.

An order wakes it at once; `control/transfer/plane_turns.py` says what it does then, and how long it may sleep.
"""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from deltaserve.control.sched.plan import StepResult
from deltaserve.control.transfer.commands import TransferReport
from deltaserve.control.transfer.plane_turns import DataPlane, PlaneTurns, TransferOrder
from deltaserve.process.children.exits import start_thread
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.rank_group import failed_rank_ends_process


@dataclass(frozen=True, slots=True)
class Reports:
    """What the transfer thread has to say, in order."""

    reports: tuple[TransferReport, ...]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Close the transport and end."""


_Message = TransferOrder | _Stop
_STOP = _Stop()


class TransferThread:
    """Performs orders in order; reports go to the loop."""

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

    def submit(self, order: TransferOrder) -> None:
        self._inbox.put(order)

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
        with failed_rank_ends_process():
            self._turn(PlaneTurns(plane, time.monotonic))
        plane.close()

    def _turn(self, turns: PlaneTurns) -> None:
        is_asked_to_stop = False
        while not is_asked_to_stop:
            messages = self._take(turns.wait_s)
            is_asked_to_stop = _STOP in messages
            reports = turns.turn([message for message in messages if not isinstance(message, _Stop)])
            if reports:
                self._reports.put(Reports(tuple(reports)))

    def _take(self, wait_s: float) -> list[_Message]:
        """All messages that are there; waits for one."""
        messages: list[_Message] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=wait_s))
            while True:
                messages.append(self._inbox.get_nowait())
        return messages
