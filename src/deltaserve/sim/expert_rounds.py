"""An expert group of the simulated cluster: decode workers whose every step is a round of all of them."""

from collections.abc import Callable, Mapping
from typing import Protocol

from deltaserve.control.sched.plan import StepPlan
from deltaserve.control.sched.rounds import MemberRounds, RoundPart
from deltaserve.core.ids import PeerName

Plans = Mapping[PeerName, StepPlan | None]
"""Each member's plan in a round; None: it has none."""


class GroupWorker(Protocol):
    """A simulated worker, as its group has it."""

    name: PeerName
    is_alive: bool
    is_stopped: bool
    rounds: MemberRounds

    @property
    def step_s(self) -> float: ...

    def finish(self, plan: StepPlan) -> None: ...

    def wake(self, delay: float, call: Callable[[], None]) -> None:
        """Call after so long, whatever becomes of the worker."""
        ...


class SimExpertGroup:
    """The members that live, and the round that they are in. One that is missing is waited for: it holds experts."""

    def __init__(self, size: int, on_round: Callable[[Plans], None] = lambda plans: None) -> None:
        """`on_round`: called when a round is over, before its members hear of it."""
        self._size = size
        self._on_round = on_round
        self._members: dict[PeerName, GroupWorker] = {}
        self._entered: dict[PeerName, StepPlan | None] = {}
        """Into the round that begins, or computes."""
        self.num_joined = 0
        """Times a member took part without a plan."""
        self.has_waited = False
        """Whether a round waited for a member that was stopped or not there."""

    def admit(self, worker: GroupWorker) -> None:
        """A member has started. Those that are there already have waited for it."""
        self._members[worker.name] = worker
        living = {name for name, member in self._members.items() if member.is_alive and member is not worker}
        self._entered = {name: plan for name, plan in self._entered.items() if name in living}
        if self._entered:
            worker.wake(0.0, self.look)

    def look(self) -> None:
        """Somebody has a plan, has none any more, or has just gone on."""
        while self._enter():
            pass
        able = [worker for worker in self._members.values() if worker.is_alive and not worker.is_stopped]
        self.has_waited |= bool(self._entered) and len(able) < self._size

    def _enter(self) -> bool:
        """Whether a member that has not entered the round does."""
        for name, worker in self._members.items():
            if name in self._entered or not worker.is_alive or worker.is_stopped:
                continue
            part = worker.rounds.next_part(bool(self._entered))
            if part is None:
                continue
            self._entered[name] = None if part is RoundPart.NONE else part
            self.num_joined += part is RoundPart.NONE
            if len(self._entered) == self._size:
                self._begin()
            return True
        return False

    def _begin(self) -> None:
        workers, entered = dict(self._members), self._entered
        slowest = max(workers.values(), key=lambda worker: worker.step_s)
        slowest.wake(slowest.step_s, lambda: self._end(workers, entered))

    def _end(self, workers: Mapping[PeerName, GroupWorker], entered: Plans) -> None:
        if entered is not self._entered or not all(worker.is_alive for worker in workers.values()):
            return  # whoever is left of it ends, too
        self._entered = {}
        self._on_round(entered)
        for name, plan in entered.items():
            if plan is not None:
                workers[name].finish(plan)
        self.look()
