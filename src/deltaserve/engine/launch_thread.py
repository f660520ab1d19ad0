"""Steps of a device that computes beside the host: one thread gives it plan after plan, another waits for their ends.

The device has the next step before it has ended the one before, so it never waits for the host. As many steps are
under way as the loop has planned.
"""

import queue
import time

from deltaserve.engine.exits import start_thread
from deltaserve.engine.mailbox import Mailbox
from deltaserve.engine.transfer_thread import Reports
from deltaserve.sched.executor import LaunchedStep, Launcher
from deltaserve.sched.plan import StepPlan, StepResult


class LaunchThread:
    """As StepThread. Nothing else launches."""

    def __init__(self, launcher: Launcher, results: Mailbox[StepResult | Reports]) -> None:
        self._launcher = launcher
        self._results = results
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._threads = (start_thread("launch", self._launch), start_thread("step-ends", self._wait))

    def submit(self, plan: StepPlan) -> None:
        """Compute `plan` after those submitted before."""
        self._plans.put(plan)

    def rest(self) -> None:
        """No plan follows for now: of no meaning here (see engine/member_thread.py)."""

    def may_end(self) -> bool:
        """Whether nobody needs this process to compute, once its own plans are over."""
        return True

    def stop(self, wait_s: float) -> bool:
        """End after the plans being computed. False when that takes longer than `wait_s`."""
        self._plans.put(None)
        ends_at = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _launch(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._launched.put(self._launcher.launch(plan))
        self._launched.put(None)

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._results.put(launched.wait())
