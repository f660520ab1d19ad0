"""Step threads of an expert group: who has nothing to compute joins, who has computes in the same rounds, all end
together."""

import select
import time
from collections.abc import Sequence

import torch

from deltaserve.compute.collective.expert_group import ExpertMesh
from deltaserve.control.sched.plan import StepPlan, StepResult, WorkList
from deltaserve.core.ids import StepIndex
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.member_thread import ExpertMember, MemberThread
from deltaserve.process.worker.transfer_thread import Reports
from tests.compute.thread_ranks import expert_members
from tests.patience import PATIENCE_S


class Rounds:
    """An executor whose steps are one exchange; what it computes is how many members have rows in it."""

    def __init__(self, mesh: ExpertMesh) -> None:
        self._mesh = mesh
        self.sizes: list[int] = []
        """Members with a plan in each round."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (), tokens_read=self._take_part(1))

    def accompany(self) -> None:
        self._take_part(0)

    def _take_part(self, rows: int) -> int:
        found = self._mesh.all_to_all([torch.ones(rows, 1)] * self._mesh.member.size)
        self.sizes.append(sum(map(len, found)))
        return self.sizes[-1]


class Worker:
    """A member, and the loop that commands it."""

    def __init__(self, mesh: ExpertMesh) -> None:
        self.answers: Mailbox[StepResult | Reports] = Mailbox()
        self.rounds = Rounds(mesh)
        self.thread = MemberThread(self.rounds, ExpertMember(mesh, self.rounds.accompany), self.answers)
        self.num_steps = 0

    def submit(self) -> None:
        self.num_steps += 1
        self.thread.submit(StepPlan(StepIndex(self.num_steps), (), WorkList(256)))

    def answer(self) -> StepResult | Reports:
        assert select.select([self.answers.fileno()], [], [], PATIENCE_S)[0]
        (answer,) = self.answers.take_all()
        return answer


def group(size: int) -> list[Worker]:
    return [Worker(mesh) for mesh in expert_members(size, PATIENCE_S)]


def end(workers: Sequence[Worker]) -> None:
    """As loops do that are drained."""
    for worker in workers:
        worker.thread.may_end()
    for worker in workers:
        while not worker.thread.may_end():
            worker.answer()
        assert worker.thread.stop(PATIENCE_S)


def test_idle_members_join() -> None:
    workers = group(3)
    first, *others = workers
    for _ in range(5):
        first.submit()
        answer = first.answer()
        assert isinstance(answer, StepResult)
        assert answer.tokens_read == 1
    end(workers)
    assert all(worker.rounds.sizes == [1] * 5 for worker in others)


def test_busy_members_compute_in_the_same_rounds() -> None:
    """However long one of them takes to plan: neither joins the other's with no rows while it may have a plan."""
    first, second = workers = group(2)
    first.submit()
    second.submit()
    for number in range(20):
        first.answer()
        first.submit()
        second.answer()
        time.sleep(0.002 * (number % 3))
        second.submit()
    for worker in workers:
        worker.answer()
        worker.thread.rest()
    end(workers)
    # One may have begun before the other, which ends a round later then.
    assert first.rounds.sizes in ([2] * 21, [1, *[2] * 20, 1])


def test_one_that_rests_joins_and_one_that_plans_does_not() -> None:
    first, second = workers = group(2)
    second.submit()
    second.answer()  # its loop has not said what comes next
    first.submit()
    assert not select.select([first.answers.fileno()], [], [], 0.05)[0]
    second.thread.rest()
    assert isinstance(first.answer(), StepResult)
    first.thread.rest()
    end(workers)
    assert second.rounds.sizes == [1, 1]


def test_one_that_is_done_computes_for_those_that_are_not() -> None:
    first, second = workers = group(2)
    assert not first.thread.may_end()
    for _ in range(3):
        second.submit()
        second.answer()
    second.thread.rest()
    assert not first.thread.may_end()
    end(workers)
    assert first.rounds.sizes == [1] * 3
