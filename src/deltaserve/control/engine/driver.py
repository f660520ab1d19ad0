"""Drives an engine, and what takes over from it: for a worker's loop thread and for the simulator alike.

    actions = driver.turn(heard, now)        deal with all that was heard; perform every action, in order
    when = driver.next_turn_at(now)          when the next turn is due at the latest; None: when something is heard

A turn: what was heard, in order -> the timer -> the engine's answer to all of it -> another engine, when this one has
ended all it did and is to be of another role -> plans, when the executor is free, or will soon be (step_pace.py) ->
whether the transfer thread is to go on polling. No call blocks, sleeps or looks at a clock.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from deltaserve.control.engine.api import Action, Event, Instance
from deltaserve.control.engine.step_pace import StepPace
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.control.transfer.plane_turns import Polling
from deltaserve.core.ids import Boot, Role


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Compute `plan` after those given before; the executor's answer is to be heard."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Rest:
    """No plan follows for now."""


@dataclass(frozen=True, slots=True)
class RoleTaken:
    """An engine of another role has taken over, under a boot of its own; the cache stays."""

    role: Role
    boot: Boot


Heard = Event | StepResult
WorkerAction = Action | ComputeStep | Rest | Polling | RoleTaken

E = TypeVar("E", bound=Instance)


class Driver(Generic[E]):
    """One worker's: its engine, the plans that are not answered, and what its threads were told last."""

    def __init__(self, engine: E, boot: Boot, pace: StepPace, next_boot: Callable[[Boot], Boot]) -> None:
        """`boot`: of `engine`. `next_boot`: of the engine that follows one of that boot."""
        self.engine = engine
        self._boot = boot
        self._pace = pace
        self._next_boot = next_boot
        self._plans: deque[StepPlan] = deque()
        """Given to the executor and not answered, the one that computes first."""
        self._computing_since = 0.0
        """When the first of them began."""
        self._began = 0.0
        """When the last step that is over began."""
        self._waits_until: float | None = None
        """When the next step is to begin, while others are to have the cores."""
        self._admits_first = False
        """Whether others are to be admitted before more is planned: beside what was planned last prompts go on."""
        self._is_resting = True
        self._is_polling = False
        self.num_steps = 0

    def turn(self, heard: Sequence[Heard], now: float) -> list[WorkerAction]:
        for one in heard:
            self._hear(one, now)
        timer = self.engine.next_timer()
        if timer is not None and timer <= now:
            self.engine.tick(now)
        actions: list[WorkerAction] = [*self.engine.turn(now)]
        if self.engine.may_hand_over():
            actions += self._hand_over(now)
        actions += self._plan(now)
        actions += self._tell_polling()
        return actions

    def next_turn_at(self, now: float) -> float | None:
        """After a turn at `now`."""
        times = [] if (timer := self.engine.next_timer()) is None else [timer]
        plan_at = self._plan_at() if self._plans else inf
        if plan_at < inf and (now < plan_at or self._admits_first):
            times.append(max(now, plan_at))
        if self._waits_until is not None:
            times.append(self._waits_until)
        return min(times, default=None)

    def step_lasts(self, now: float) -> float:
        """How long the step that computes has taken so far; 0 when none does."""
        return now - self._computing_since if self._plans else 0.0

    @property
    def leaves_cores(self) -> bool:
        """Whether a step could begin, and is put off while others are to have the cores."""
        return self._waits_until is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed and no ticket is open."""
        return not self._plans and not self._is_polling

    def _hear(self, one: Heard, now: float) -> None:
        if isinstance(one, StepResult):
            self._commit(one, now)
        else:
            self.engine.handle(one, now)

    def _commit(self, result: StepResult, now: float) -> None:
        plan = self._plans.popleft()
        self._began, self._computing_since = self._computing_since, now
        self.num_steps += 1
        if result.typical_s is not None:
            self._pace.learn(result.typical_s, plan.num_extended)
        self.engine.commit(result, now)

    def _hand_over(self, now: float) -> list[WorkerAction]:
        self._boot = self._next_boot(self._boot)
        self.engine = self.engine.successor(self._boot)
        return [RoleTaken(self.engine.role, self._boot), *self.engine.turn(now)]

    def _plan(self, now: float) -> Iterator[WorkerAction]:
        self._waits_until, self._admits_first = None, False
        if not self._plans:
            self._computing_since = now
            if now < (begin_at := self._pace.begin_at(self._began)) and self.engine.leaves_cores():
                self._waits_until = begin_at
        while self._waits_until is None and not self._admits_first and self._may_plan(now):
            if (plan := self.engine.plan(now)) is None:
                break
            self._plans.append(plan)
            self._is_resting = False
            self._admits_first = plan.num_extended > 0
            yield ComputeStep(plan)
        if not self._plans and not self._is_resting:
            self._is_resting = True
            yield Rest()

    def _may_plan(self, now: float) -> bool:
        """Whether none computes; or it is time to plan the one behind, and that is to begin at once."""
        if not self._plans:
            return True
        if now < self._plan_at():
            return False
        return self._pace.begin_at(self._computing_since) <= now or not self.engine.leaves_cores()

    def _plan_at(self) -> float:
        """When to plan behind the steps that are not over; infinity: not while the first of them computes. Prompts that
        wait behind it are long: others that come before they begin go beside the next ones."""
        first, *behind = self._plans
        if any(plan.num_extended for plan in behind):
            return inf
        return self._pace.plan_at(self._computing_since, first.num_extended)

    def _tell_polling(self) -> Iterator[WorkerAction]:
        is_active = self.engine.transfer_active()
        if is_active != self._is_polling:
            self._is_polling = is_active
            yield Polling(is_active)
