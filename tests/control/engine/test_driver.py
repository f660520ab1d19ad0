"""What a turn of the driver is: what comes before what, when a step is planned, what is told once, when it is due."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

import pytest

from deltaserve.control.engine.api import Action, DrainRequested, Event
from deltaserve.control.engine.driver import ComputeStep, Driver, Heard, Rest, RoleTaken, WorkerAction
from deltaserve.control.engine.step_pace import EagerPace, StepPace
from deltaserve.control.peer.link import HangUp, LinkBroken, PeerDied
from deltaserve.control.sched.plan import PlanItem, StepPlan, StepResult, TokenValues, WorkList
from deltaserve.control.transfer.commands import FencePeer
from deltaserve.control.transfer.plane_turns import Polling
from deltaserve.core.ids import Boot, PeerName, Role, RowId, StepIndex
from deltaserve.core.tokens import pack_u32

PEER = PeerName("prefill-0")
FIRST = Boot(1)
FENCE, HANG_UP = FencePeer(PEER), HangUp(PEER)


def plan(step: int, num_inputs: int = 1) -> StepPlan:
    inputs = TokenValues(pack_u32(range(num_inputs)))
    item = PlanItem(RowId(0), 0, num_inputs, inputs, samples=num_inputs == 1)
    return StepPlan(StepIndex(step), (item,), WorkList(256))


def result(step: int, seconds: float = 0.0) -> StepResult:
    return StepResult(StepIndex(step), (), seconds=seconds)


@dataclass
class NotedEngine:
    """Notes what it is driven to, and answers what it is told to."""

    plans: list[StepPlan] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    timer: float | None = None
    next_role: Role | None = None
    is_active: bool = False
    leaves: bool = False
    calls: list[object] = field(default_factory=list)
    role: Role = Role.DECODE
    boot: Boot = FIRST

    def misfits(self) -> Mapping[PeerName, str]:
        return {}

    def handle(self, event: Event, now: float) -> None:
        self.calls.append(event)

    def tick(self, now: float) -> None:
        self.calls.append("tick")
        self.timer = None

    def next_timer(self) -> float | None:
        return self.timer

    def plan(self, now: float) -> StepPlan | None:
        self.calls.append("plan")
        return self.plans.pop(0) if self.plans else None

    def commit(self, result: StepResult, now: float) -> None:
        self.calls.append(result)

    def turn(self, now: float) -> list[Action]:
        self.calls.append("turn")
        actions, self.actions = self.actions, []
        return actions

    def leaves_cores(self) -> bool:
        self.calls.append("leaves_cores")
        return self.leaves

    def transfer_active(self) -> bool:
        return self.is_active

    def is_drained(self) -> bool:
        return False

    def may_hand_over(self) -> bool:
        return self.next_role is not None

    def successor(self, boot: Boot) -> Self:
        assert self.next_role is not None
        return type(self)(self.plans, [HANG_UP], role=self.next_role, boot=boot, calls=self.calls)

    def metrics(self) -> dict[str, float]:
        return {}

    def check_integrity(self) -> None:
        pass


@dataclass
class SetPace(StepPace):
    """Plans so long after a step began."""

    after_s: float
    gap_s: float = 0.0
    learned: list[tuple[float, int]] = field(default_factory=list)

    def learn(self, seconds: float, num_extended: int) -> None:
        self.learned.append((seconds, num_extended))

    def plan_at(self, began: float, num_extended: int) -> float:
        return began + self.after_s

    def begin_at(self, began: float) -> float:
        return began + self.gap_s


def driver_of(engine: NotedEngine, pace: StepPace | None = None) -> Driver[NotedEngine]:
    return Driver(engine, engine.boot, pace or EagerPace(), lambda boot: Boot(boot + 1))


EVENTS: list[Heard] = [PeerDied(PEER), result(1), LinkBroken(PEER), DrainRequested()]


@pytest.mark.parametrize("num_events", range(len(EVENTS) + 1))
@pytest.mark.parametrize("is_due", [True, False])
def test_all_that_was_heard_comes_before_the_timer_the_answer_and_the_plan(num_events: int, is_due: bool) -> None:
    engine = NotedEngine(plans=[plan(1)])
    driver = driver_of(engine)
    driver.turn([], 0.0)
    engine.calls.clear()
    engine.timer = 1.0 if is_due else 1.1
    heard = EVENTS[:num_events]
    driver.turn(heard, 1.0)
    assert engine.calls == [*heard, *["tick"] * is_due, "turn", "plan"]


def test_actions_come_in_order_then_the_plan_then_what_the_transfer_thread_is_told() -> None:
    engine = NotedEngine(plans=[plan(1)], actions=[FENCE, HANG_UP, FENCE], is_active=True)
    assert driver_of(engine).turn([], 0.0) == [FENCE, HANG_UP, FENCE, ComputeStep(plan(1)), Polling(is_active=True)]


def test_what_did_not_change_is_told_once() -> None:
    engine = NotedEngine(is_active=True)
    driver = driver_of(engine)

    def told(heard: list[Heard]) -> list[WorkerAction]:
        return driver.turn(heard, 0.0)

    assert told([]) == [Polling(is_active=True)], "it rests from the beginning"
    assert told([]) == []
    engine.plans = [plan(1)]
    assert told([]) == [ComputeStep(plan(1))]
    assert told([]) == [], "the step is not over"
    engine.is_active = False
    assert told([result(1)]) == [Rest(), Polling(is_active=False)]
    assert told([]) == []


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_successor_takes_over_behind_the_last_actions_and_plans(with_plan: bool) -> None:
    engine = NotedEngine(plans=[plan(1)] if with_plan else [], actions=[FENCE], next_role=Role.PREFILL)
    driver = driver_of(engine)
    taken = RoleTaken(Role.PREFILL, Boot(2))
    assert driver.turn([], 0.0) == [FENCE, taken, HANG_UP, *[ComputeStep(plan(1))] * with_plan]
    assert engine.calls == ["turn", "turn", *["plan"] * (2 if with_plan else 1)]
    assert (driver.engine.role, driver.engine.boot) == (Role.PREFILL, Boot(2))
    driver.turn([DrainRequested()], 0.1)
    assert DrainRequested() in driver.engine.calls


def test_a_result_that_comes_with_the_end_of_an_engine_is_committed_before_it_hands_over() -> None:
    engine = NotedEngine(plans=[plan(1)])
    driver = driver_of(engine)
    driver.turn([], 0.0)
    engine.calls.clear()
    engine.next_role = Role.PREFILL
    driver.turn([result(1)], 0.1)
    assert engine.calls == [result(1), "turn", "turn", "plan"]
    assert driver.num_steps == 1


@pytest.mark.parametrize(
    ("after_s", "planned_first", "due", "planned_then", "planned_at_the_end"),
    [
        (0.0, [1, 2, 3], [None, None], [], []),
        (0.1, [1], [1.1, 1.1], [2, 3], []),
        (inf, [1], [None, None], [], [2]),
    ],
    ids=["at once", "shortly before the end", "never"],
)
def test_behind_a_step_that_computes_the_next_is_planned_when_the_pace_says(
    after_s: float,
    planned_first: list[int],
    due: list[float | None],
    planned_then: list[int],
    planned_at_the_end: list[int],
) -> None:
    engine = NotedEngine(plans=[plan(1), plan(2), plan(3)])
    driver = driver_of(engine, SetPace(after_s))

    def planned(heard: list[Heard], now: float) -> list[int]:
        return [action.plan.step for action in driver.turn(heard, now) if isinstance(action, ComputeStep)]

    assert planned([], 1.0) == planned_first, "as many as the engine has"
    assert [driver.next_turn_at(1.0), driver.next_turn_at(1.05)] == due
    assert planned([], 1.05) == []
    assert planned([], 1.1) == planned_then
    assert driver.next_turn_at(1.1) is None, "that moment is over"
    assert planned([result(1)], 1.3 if after_s else 1.1) == planned_at_the_end


def test_behind_prompts_that_wait_nothing_is_planned_until_they_compute() -> None:
    engine = NotedEngine(plans=[plan(1), plan(2, num_inputs=4), plan(3)])
    driver = driver_of(engine, SetPace(0.0))

    def planned(heard: list[Heard], now: float) -> list[int]:
        return [action.plan.step for action in driver.turn(heard, now) if isinstance(action, ComputeStep)]

    assert planned([], 1.0) == [1, 2]
    assert driver.next_turn_at(1.0) is None
    assert planned([], 1.5) == []
    assert planned([result(1)], 2.0) == [3]


def test_others_are_admitted_before_more_is_planned_behind_prompts() -> None:
    driver = driver_of(NotedEngine(plans=[plan(1, 8), plan(2, 8), plan(3)]), SetPace(0.0))
    calls = driver.engine.calls
    driver.turn([], 5.0)
    assert calls == ["turn", "plan"]
    assert driver.next_turn_at(5.0) == 5.0
    driver.turn([], 5.0)
    assert calls == ["turn", "plan"] * 2
    assert driver.next_turn_at(5.0) is None, "prompts wait already"
    driver.turn([result(1)], 6.0)
    assert driver.next_turn_at(6.0) is None
    driver.turn([], 6.5)
    assert [step.step for step in driver._plans] == [2, 3]


def test_the_pace_counts_from_the_end_of_the_step_before_and_learns_from_typical_steps() -> None:
    pace = SetPace(0.1)
    engine = NotedEngine(plans=[plan(1), plan(2), plan(3, num_inputs=4), plan(4)])
    driver = driver_of(engine, pace)
    driver.turn([], 1.0)
    driver.turn([], 1.1)
    assert driver.step_lasts(1.15) == pytest.approx(0.15)
    driver.turn([result(1, seconds=0.2)], 1.2)
    assert driver.step_lasts(1.25) == pytest.approx(0.05)
    driver.turn([], 1.3)
    driver.turn([result(2, seconds=0.3), result(3, seconds=9.0)], 1.6)
    driver.turn([replace(result(4, seconds=9.0), is_typical=False)], 1.7)
    assert pace.learned == [(0.2, 0), (0.3, 0), (9.0, 4)]
    assert driver.num_steps == 4


def test_nothing_computes_and_no_ticket_is_open_when_idle() -> None:
    engine = NotedEngine(is_active=True)
    driver = driver_of(engine)
    driver.turn([], 0.0)
    assert not driver.is_idle
    engine.is_active, engine.plans = False, [plan(1)]
    driver.turn([], 5.0)
    assert not driver.is_idle
    driver.turn([result(1)], 6.0)
    assert driver.is_idle
    assert driver.step_lasts(100.0) == 0.0


@pytest.mark.parametrize(("timer", "due"), [(None, 1.1), (1.05, 1.05), (2.0, 1.1)])
def test_a_turn_is_due_at_the_timer_or_when_a_plan_is(timer: float | None, due: float) -> None:
    engine = NotedEngine(plans=[plan(1)])
    driver = driver_of(engine, SetPace(0.1))
    driver.turn([], 1.0)
    engine.timer = timer
    assert driver.next_turn_at(1.0) == pytest.approx(due)


def test_a_step_is_put_off_while_others_are_to_have_the_cores() -> None:
    engine = NotedEngine(plans=[plan(1), plan(2), plan(3)], leaves=True)
    driver = driver_of(engine, SetPace(inf, gap_s=0.3))

    def told(heard: list[Heard], now: float) -> list[WorkerAction]:
        return driver.turn(heard, now)

    assert told([], 1.0) == [ComputeStep(plan(1))]
    assert driver.next_turn_at(1.0) is None
    assert told([result(1)], 1.1) == [Rest()]
    assert driver.leaves_cores
    assert driver.next_turn_at(1.1) == pytest.approx(1.3), "counted from the begin of the last step"
    assert told([], 1.2) == []
    assert told([], 1.31) == [ComputeStep(plan(2))]
    assert not driver.leaves_cores
    assert told([result(2)], 1.4) == [Rest()]
    engine.leaves = False
    assert told([], 1.45) == [ComputeStep(plan(3))], "nobody needs them any more"
    assert driver.next_turn_at(1.45) is None


def test_none_is_planned_behind_a_step_that_others_are_to_have_the_cores_after() -> None:
    engine = NotedEngine(plans=[plan(1), plan(2)], leaves=True)
    driver = driver_of(engine, SetPace(0.1, gap_s=0.3))
    assert driver.turn([], 1.0) == [ComputeStep(plan(1))]
    assert driver.turn([], 1.1) == []
    engine.leaves = False
    assert driver.turn([], 1.11) == [ComputeStep(plan(2))]


def test_where_a_step_may_begin_at_once_the_engine_is_not_asked() -> None:
    engine = NotedEngine(plans=[plan(1), plan(2)], leaves=True)
    driver = driver_of(engine)
    driver.turn([], 1.0)
    driver.turn([result(1)], 1.1)
    assert "leaves_cores" not in engine.calls
