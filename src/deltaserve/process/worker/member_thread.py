"""The step thread of a member of an expert group: it computes this worker's plans, and takes part in those of others.

`control/sched/rounds.py` says what comes next. A member that has nothing to compute waits for a plan and for the others
at once, in one poll, and joins with no rows when one of them begins.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.control.sched.executor import Executor
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.control.sched.rounds import MemberRounds, RoundPart
from deltaserve.process.children.exits import Exit, ProcessOver, start_thread
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.transfer_thread import Reports


class GroupMesh(Protocol):
    """What the thread asks of a group's connections (compute/collective/expert_group.py), which need torch."""

    @property
    def sockets(self) -> Iterable[socket.socket]: ...

    @property
    def is_over(self) -> bool: ...

    def has_begun(self) -> bool: ...

    def say_done(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExpertMember:
    """What a worker has of its expert group."""

    mesh: GroupMesh
    accompany: Callable[[], None]
    """Take part in a round without a plan. Raises CollectiveError."""


@contextmanager
def group_errors() -> Iterator[None]:
    """A member that ended, or did not come in time, ends this process."""
    try:
        yield
    except CollectiveError as error:
        raise ProcessOver(Exit.RANK_ENDED, str(error)) from None


class _Order(Enum):
    REST = "rest"
    DONE = "done"
    STOP = "stop"


class MemberThread:
    """The step thread of a group's member. Nothing else uses executor and mesh. A member that is gone ends this
    process."""

    def __init__(self, executor: Executor, member: ExpertMember, results: Mailbox[StepResult | Reports]) -> None:
        self._executor = executor
        self._member = member
        self._results = results
        self._orders: Mailbox[StepPlan | _Order] = Mailbox()
        self._rounds = MemberRounds()
        self._is_told_done = False
        self._is_stopping = False
        self._is_over = threading.Event()
        self._thread = start_thread("step", self._run)

    def submit(self, plan: StepPlan) -> None:
        """Compute `plan` after those submitted before."""
        self._orders.put(plan)

    def rest(self) -> None:
        """No plan follows for now."""
        self._orders.put(_Order.REST)

    def may_end(self) -> bool:
        """Note that this worker computes nothing more. True when no member does: until then the others need its
        experts. Where that is not known yet, something is put into the mailbox of results once it is."""
        if not self._is_told_done:
            self._is_told_done = True
            self._orders.put(_Order.DONE)
        return self._is_over.is_set()

    def stop(self, wait_s: float) -> bool:
        """End after the plan being computed. False when that takes longer than `wait_s`."""
        self._orders.put(_Order.STOP)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        mesh = self._member.mesh
        with selectors.DefaultSelector() as resting, selectors.DefaultSelector() as waiting:
            for selector in (resting, waiting):
                selector.register(self._orders.fileno(), selectors.EVENT_READ)
            for other in mesh.sockets:
                resting.register(other, selectors.EVENT_READ)
            with group_errors():
                while self._has_turned():
                    takes_part = self._rounds.is_resting and not self._is_over.is_set()
                    (resting if takes_part else waiting).select()

    def _has_turned(self) -> bool:
        """Take a turn; whether the thread goes on."""
        mesh, rounds = self._member.mesh, self._rounds
        self._take_orders()
        while (part := rounds.next_part(rounds.is_resting and mesh.has_begun())) is not None:
            if part is RoundPart.NONE:
                self._member.accompany()
            else:
                self._results.put(self._executor.execute(part).compact(part))
            self._take_orders()
        if self._is_stopping:
            return False
        if mesh.is_over and not self._is_over.is_set():
            self._is_over.set()
            self._results.put(Reports(()))
        return True

    def _take_orders(self) -> None:
        for order in self._orders.take_all():
            match order:
                case StepPlan():
                    self._rounds.submit(order)
                case _Order.REST:
                    self._rounds.rest()
                case _Order.DONE:
                    self._rounds.rest()
                    self._member.mesh.say_done()
                case _Order.STOP:
                    self._is_stopping = True
