"""One thread launches, another waits: in order, and the second step before the first one's end."""

import threading
from dataclasses import dataclass, field

from deltaserve.control.engine.step_pace import EagerPace
from deltaserve.control.sched.plan import StepPlan, StepResult, WorkList
from deltaserve.core.ids import StepIndex
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.launch_thread import LaunchThread
from deltaserve.process.worker.transfer_thread import Reports
from tests.patience import PATIENCE_S


@dataclass
class Step:
    """A step that ends when it is told to."""

    number: StepIndex
    may_end: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> StepResult:
        assert self.may_end.wait(PATIENCE_S)
        return StepResult(self.number, ())


class Device:
    """Takes steps, and computes none of them until it is told to."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.changed = threading.Condition()

    def launch(self, plan: StepPlan) -> Step:
        with self.changed:
            self.steps.append(Step(plan.step))
            self.changed.notify_all()
        return self.steps[-1]

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.steps) >= count, PATIENCE_S)


def plan(number: int) -> StepPlan:
    return StepPlan(StepIndex(number), (), WorkList(16))


def test_steps_end_in_their_order_and_the_next_is_launched_before() -> None:
    device, results = Device(), Mailbox[StepResult | Reports]()
    thread = LaunchThread(device, results)
    for number in range(3):
        thread.submit(plan(number))
    device.wait_for(3)
    assert results.take_all() == []
    for number in (2, 1, 0):
        device.steps[number].may_end.set()
    assert thread.stop(PATIENCE_S)
    assert results.take_all() == [StepResult(StepIndex(number), ()) for number in range(3)]


def test_it_does_not_stop_while_the_device_computes() -> None:
    device, results = Device(), Mailbox[StepResult | Reports]()
    thread = LaunchThread(device, results)
    thread.submit(plan(0))
    device.wait_for(1)
    assert not thread.stop(0.01)
    device.steps[0].may_end.set()
    assert thread.stop(PATIENCE_S)


def test_the_next_step_is_planned_at_once() -> None:
    pace = EagerPace()
    pace.learn(0.001, 0)
    assert pace.plan_at(7.0, 0) == 7.0
