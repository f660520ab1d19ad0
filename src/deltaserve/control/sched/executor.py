"""The seam between the control plane and whatever computes a step."""

from typing import Protocol

from deltaserve.control.sched.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs one plan at a time; called from one thread, the step thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply closes, opens and pages, compute the items, draw the tokens.

        When it returns, the pages it wrote may be read by anybody: a device that computes beside the host has finished.
        A step that cannot be computed has FAILED items and leaves the executor able to take the next plan. Raises only
        when the device is lost or the plan contradicts the ones before it.
        """
        ...


class LaunchedStep(Protocol):
    """A step that a device was given."""

    def wait(self) -> StepResult:
        """The step's result; any thread may ask. When it returns, the pages that the step wrote may be read by anybody.
        Raises only when the device is lost."""
        ...


class Launcher(Protocol):
    """An executor whose device computes beside the host; called from one thread."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step. Like Executor.execute, but the device may not have computed it when this returns: the next step
        can be launched meanwhile, also where its input is what this one draws."""
        ...
