"""The seam between the control plane and whatever computes a step."""

from typing import Protocol

from deltaserve.sched.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs one plan at a time; called from one thread, the step thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply closes, opens and pages, compute the items, draw the tokens. Raises only when the device is lost."""
        ...
