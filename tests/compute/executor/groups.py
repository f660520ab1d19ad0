"""Members of an expert group as threads of this process: each with rows, pages and plans of its own."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from deltaserve.compute.collective.expert_group import ExpertMesh
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.shard_rules import ExpertPlacement
from tests.compute.executor.world import Driver
from tests.compute.thread_ranks import expert_members
from tests.patience import PATIENCE_S


class MemberDriver(Driver):
    """Driver of one member. A step of it is a round of all, for which the others may have left a plan."""

    def __init__(self, path: Path, group: "GroupDriver", mesh: ExpertMesh) -> None:
        self.mesh = self.expert_group = mesh
        self._group = group
        self.is_collecting = False
        """Its next step is left for the round that another one begins."""
        self.left: StepPlan | None = None
        self.results: list[StepResult] = []
        super().__init__(path)

    def model(self, path: Path) -> ModelSpec:
        return load_spec(path).placed(ExpertPlacement(member=self.mesh.member))

    def run(self, plan: StepPlan) -> StepResult:
        if self.is_collecting:
            self.left = plan
            return StepResult(plan.step, ())
        return self._group.round({self.mesh.member.rank: plan})

    def take_part(self, plan: StepPlan | None) -> None:
        if plan is None:
            self.executor.accompany()
        else:
            self.results.append(self.executor.execute(plan))


class GroupDriver:
    """All members."""

    def __init__(self, path: Path, size: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self.members = [MemberDriver(path, self, mesh) for mesh in expert_members(size, PATIENCE_S)]

    def round(self, plans: Mapping[int, StepPlan]) -> StepResult:
        """The result of the first of `plans` (member |-> plan). The others compute what they have left, or nothing."""
        taken = []
        for rank, (thread, member) in enumerate(zip(self._threads, self.members, strict=True)):
            plan, member.left = plans.get(rank, member.left), None
            taken.append(thread.submit(member.take_part, plan))
        wait(taken)
        for part in taken:
            part.result()
        return self.members[next(iter(plans))].results[-1]
