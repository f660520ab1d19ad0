"""The control plane thread: one blocking poll, then a turn of the instance. Never calls torch or the transport.

An instance that was asked for another role ends by handing over: the next one goes on in the same threads.

A turn: what the supervisor, the threads and the peers have said -> the timer -> the instance's answer to all of it
-> a plan when the step thread is free, or will soon be (process/worker/step_pace.py). Actions are performed at once, in
order.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

from deltaserve.control.engine.api import Action, DrainRequested, Instance
from deltaserve.control.peer.link import Dial, FrameIn, HangUp, LinkBroken, PeerDied, SendFrame
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Boot, PeerName
from deltaserve.process.children.boots import new_boot
from deltaserve.process.children.exits import Exit, end_stuck
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.notices import PeerDown
from deltaserve.process.children.parent import Parent
from deltaserve.process.links.links import Links
from deltaserve.process.worker.load_line import LoadLine
from deltaserve.process.worker.quarantine import why_restart
from deltaserve.process.worker.step_pace import PlanPace
from deltaserve.process.worker.step_thread import Stepping
from deltaserve.process.worker.transfer_thread import Reports, TransferThread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Times of the loop, in seconds."""

    drain_grace_s: float = 30.0
    """After a request to drain, the process ends at the latest then."""
    fence_after_s: float = 1.0
    """A peer that leaves a revoke unanswered for so long is fenced."""
    step_stuck_after_s: float = 600.0
    """A step that takes longer never ends: the process does."""
    max_wait_s: float = 0.5
    """A turn is made at least that often: it is what the watchdog looks for."""
    check_every_s: float = 5.0
    """Pause between two self-checks of an idle instance."""
    check_every_steps: int = 1000
    """Steps between two self-checks of a busy one."""
    look_every_s: float = 1.0
    """Pause between two looks at pages in quarantine and at a step that does not end."""
    tell_every_s: float = 10.0
    """Pause between two lines about the load, while there is any."""


@dataclass(frozen=True, slots=True)
class Threads:
    """What the loop commands, and where they answer."""

    step: Stepping
    pace: PlanPace
    transfer: TransferThread
    answers: Mailbox[StepResult | Reports]


class Loop:
    """Drives an instance, and what takes over from it, until it is drained."""

    def __init__(
        self,
        instance: Instance,
        boot: Boot,
        links: Links,
        threads: Threads,
        parent: Parent | None,
        options: LoopOptions,
        on_turn: Callable[[], None],
    ) -> None:
        """`boot` is the instance's; `on_turn` is called once a turn: the watchdog looks for that."""
        self._instance = instance
        self._boot = boot
        self._links = links
        self._threads = threads
        self._parent = parent
        self._options = options
        self._on_turn = on_turn
        self._plans: deque[StepPlan] = deque()
        """Plans submitted and not answered, the one that computes first."""
        self._computing_since = 0.0
        """When the first of them began to compute."""
        self._pace = threads.pace
        self._is_active = False
        self._num_stop_signals = 0
        self._drain_deadline: float | None = None
        self._exit = Exit.OK
        self._next_check = 0.0
        self._next_look = 0.0
        self._num_steps = 0
        self._load_line = LoadLine(options.tell_every_s)
        self._misfits: Mapping[PeerName, str] = {}
        """Misfits as they were told last."""

    # ------------------------------------------------------------ from outside

    def stop_on_signals(self) -> None:
        """Stop signals drain; a second one ends at once. Call it in the main thread, which runs the loop."""
        self._threads.answers.wake_on_signals()
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_stop_signals += 1

    # ------------------------------------------------------------ turns

    def run(self) -> Exit:
        """Turn until drained, told to end, or left by the supervisor; returns the exit code."""
        while not self._is_over(time.monotonic()):
            self._turn()
        return self._exit

    def _is_over(self, now: float) -> bool:
        if self._num_stop_signals > 1 or (self._parent is not None and self._parent.is_gone):
            return True
        if self._drain_deadline is None:
            return False
        if self._instance.is_drained() and self._threads.step.may_end():
            return True
        if now >= self._drain_deadline:
            _log.warning("not drained after %.0f s: ending anyway", self._options.drain_grace_s)
            return True
        return False

    def _turn(self) -> None:
        descriptors = [self._threads.answers.fileno()]
        if self._parent is not None:
            descriptors.append(self._parent.fileno())
        readable = self._links.wait(self._wait_s(time.monotonic()), descriptors)
        now = time.monotonic()
        self._on_turn()
        self._hear_parent(now)
        self._hear_threads(now)
        for socket in readable:
            for envelope in self._links.receive(socket):
                self._instance.handle(FrameIn(envelope), now)
        for peer in self._links.take_broken():
            self._instance.handle(LinkBroken(peer), now)
        if self._num_stop_signals:
            self._drain(now)
        timer = self._instance.next_timer()
        if timer is not None and timer <= now:
            self._instance.tick(now)
        self._perform(self._instance.turn(now))
        if self._instance.may_hand_over():
            self._hand_over(now)
        self._plan(now)
        self._tell_active()
        self._look_after(now)

    def _wait_s(self, now: float) -> float:
        times = [now + self._options.max_wait_s]
        if (timer := self._instance.next_timer()) is not None:
            times.append(timer)
        if self._plans and (plan_at := self._pace.plan_at(self._computing_since)) > now:
            times.append(plan_at)
        return max(0.0, min(times) - now)

    def _hear_parent(self, now: float) -> None:
        """Death notices come before the frames of a turn: a peer's next life is met after its last one ended."""
        if self._parent is None:
            return
        for notice in self._parent.receive():
            if isinstance(notice, PeerDown):
                self._instance.handle(PeerDied(PeerName(notice.name)), now)

    def _hear_threads(self, now: float) -> None:
        for answer in self._threads.answers.take_all():
            if isinstance(answer, Reports):
                for report in answer.reports:
                    self._instance.handle(report, now)
            else:
                self._over(answer, now)

    def _over(self, result: StepResult, now: float) -> None:
        plan = self._plans.popleft()
        self._computing_since = now
        self._num_steps += 1
        if all(item.is_decode for item in plan.items):
            self._pace.learn(result.seconds)
        self._instance.commit(result, now)

    def _plan(self, now: float) -> None:
        if not self._plans:
            self._computing_since = now
        elif now < self._pace.plan_at(self._computing_since):
            return
        if (plan := self._instance.plan(now)) is not None:
            self._plans.append(plan)
            self._threads.step.submit(plan)
        elif not self._plans:
            self._threads.step.rest()

    def _tell_active(self) -> None:
        is_active = self._instance.transfer_active()
        if is_active != self._is_active:
            self._is_active = is_active
            self._threads.transfer.set_active(is_active)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendFrame(peer, envelope):
                    self._links.send(peer, envelope)
                case Dial(address):
                    self._links.dial(address)
                case HangUp(peer):
                    self._links.hang_up(peer)
                case command:
                    self._threads.transfer.submit(command)

    def _hand_over(self, now: float) -> None:
        self._boot = new_boot(self._boot)
        self._instance = self._instance.successor(self._boot)
        role = self._instance.role.value
        _log.info("this worker is a %s worker now, boot %016x; its cache stays", role, self._boot)
        if self._parent is not None:
            self._parent.progress(f"is a {role} worker now; its cache stays")
            self._parent.rebooted(self._boot)
        self._perform(self._instance.turn(now))

    # ------------------------------------------------------------ draining, self-check, metrics

    def _drain(self, now: float) -> None:
        if self._drain_deadline is None:
            self._drain_deadline = now + self._options.drain_grace_s
            grace_s = self._options.drain_grace_s
            _log.info("draining: requests in flight may end within %g s (a second signal: at once)", grace_s)
            self._instance.handle(DrainRequested(), now)

    def _look_after(self, now: float) -> None:
        is_idle = not self._plans and not self._is_active
        steps_due = self._num_steps > 0 and self._num_steps % self._options.check_every_steps == 0
        if now >= self._next_check and (is_idle or steps_due) and self._exit is Exit.OK:
            self._next_check = now + self._options.check_every_s
            self._check(now)
        if now >= self._next_look:
            self._next_look = now + self._options.look_every_s
            metrics = self._instance.metrics()
            self._check_quarantine(metrics, now)
            self._tell_misfits()
            if line := self._load_line.due(metrics, now):
                _log.info("%s", line)
            if self._plans and now - self._computing_since > self._options.step_stuck_after_s:
                end_stuck(f"a step did not end within {self._options.step_stuck_after_s:.0f} s")

    def _tell_misfits(self) -> None:
        """A worker whose settings differ is refused for good: both ends say so, not only the router that asks."""
        misfits = dict(self._instance.misfits())
        for name in misfits.keys() - self._misfits.keys():
            _log.warning("no pages move between this worker and %s: %s", name, misfits[name])
        self._misfits = misfits

    def _check_quarantine(self, metrics: Mapping[str, float], now: float) -> None:
        reason = why_restart(metrics, self._options.fence_after_s)
        if reason is not None and self._exit is Exit.OK:
            _log.critical("%s, and no fence frees them: draining, then ending", reason)
            self._exit = Exit.QUARANTINE
            self._drain(now)

    def _check(self, now: float) -> None:
        try:
            self._instance.check_integrity()
        except IntegrityError as error:
            _log.critical("self-check failed, draining: %s", error, exc_info=True)
            self._exit = Exit.INTEGRITY
            self._drain(now)
