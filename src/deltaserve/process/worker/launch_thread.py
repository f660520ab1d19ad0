"""Steps of a device that computes beside the host: one thread gives it plan after plan, another waits for their ends.

The device has the next step before it has ended the one before, so it never waits for the host. As many steps are
under way as the loop has planned.
"""

import queue
import time

from deltaserve.control.sched.executor import LaunchedStep, Launcher
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.process.children.exits import start_thread
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.step_thread import StepThread
from deltaserve.process.worker.transfer_thread import Reports


class LaunchThread(StepThread):
    """A StepThread that launches, and the thread that waits. Nothing else launches."""

    def __init__(self, launcher: Launcher, results: Mailbox[StepResult | Reports]) -> None:
        self._results = results
        self._launched: queue.SimpleQueue[tuple[StepPlan, LaunchedStep] | None] = queue.SimpleQueue()
        StepThread.__init__(self, lambda plan: self._launched.put((plan, launcher.launch(plan))))
        self._waiting = start_thread("step-ends", self._wait)

    def stop(self, wait_s: float) -> bool:
        """End after the plans being computed. False when that takes longer than `wait_s`."""
        ends_at = time.monotonic() + wait_s
        if not StepThread.stop(self, wait_s):
            return False
        self._launched.put(None)
        self._waiting.join(max(0.0, ends_at - time.monotonic()))
        return not self._waiting.is_alive()

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            plan, step = launched
            self._results.put(step.wait().compact(plan))
