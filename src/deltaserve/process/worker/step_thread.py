"""The thread that computes: one plan at a time, its result to the loop."""

import queue
from collections.abc import Callable
from typing import Protocol

from deltaserve.control.sched.plan import StepPlan
from deltaserve.process.children.exits import start_thread


class Stepping(Protocol):
    """A step thread, as the loop has it."""

    def submit(self, plan: StepPlan) -> None: ...

    def rest(self) -> None: ...

    def may_end(self) -> bool: ...

    def stop(self, wait_s: float) -> bool: ...


class StepThread:
    """Runs `compute`; nothing else calls it."""

    def __init__(self, compute: Callable[[StepPlan], None]) -> None:
        """`compute`: of one plan; it hands the result on."""
        self._compute = compute
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = start_thread("step", self._run)

    def submit(self, plan: StepPlan) -> None:
        """Compute `plan` after those submitted before."""
        self._plans.put(plan)

    def rest(self) -> None:
        """No plan follows for now: of no meaning here (see process/worker/member_thread.py)."""

    def may_end(self) -> bool:
        """Whether nobody needs this process to compute, once its own plans are over."""
        return True

    def stop(self, wait_s: float) -> bool:
        """End after the plan being computed. False when that takes longer than `wait_s`."""
        self._plans.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._compute(plan)
