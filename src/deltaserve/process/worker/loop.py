"""The control plane thread: one blocking poll, then a turn of the driver. Never calls torch or the transport.

What the supervisor, the threads and the peers have said goes to control/engine/driver.py, which says what a turn is;
its actions are performed at once, in order. Besides, the loop looks after the process: draining, self-checks, the log.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from deltaserve.control.engine.api import DrainRequested, Instance, TellBlocks
from deltaserve.control.engine.driver import ComputeStep, Driver, Heard, Rest, RoleTaken, WorkerAction
from deltaserve.control.peer.link import Dial, FrameIn, HangUp, LinkBroken, PeerDied, SendFrame
from deltaserve.control.sched.plan import StepResult
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName
from deltaserve.process.children.exits import Exit, end_stuck
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.notices import PeerDown
from deltaserve.process.children.parent import Parent
from deltaserve.process.links.block_link import BlockPublisher
from deltaserve.process.links.ends import Socket
from deltaserve.process.links.links import Links
from deltaserve.process.worker.grammars_ahead import GrammarsAhead
from deltaserve.process.worker.load_line import LoadLine
from deltaserve.process.worker.quarantine import why_restart
from deltaserve.process.worker.step_thread import Stepping
from deltaserve.process.worker.transfer_thread import Reports, TransferThread

_log = logging.getLogger(__name__)

_MAX_WAIT_S = 0.5
"""A turn is made at least that often: it is what the watchdog looks for."""
_CHECK_EVERY_S = 5.0
"""Pause between two self-checks of an idle instance."""
_CHECK_EVERY_STEPS = 1000
"""Steps between two self-checks of a busy one."""
_LOOK_EVERY_S = 1.0
"""Pause between two looks at pages in quarantine and at a step that does not end."""
_TELL_EVERY_S = 10.0
"""Pause between two lines about the load, while there is any."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Times of the loop, in seconds."""

    drain_grace_s: float = 30.0
    """After a request to drain, the process ends at the latest then."""
    fence_after_s: float = 1.0
    """A peer that leaves a revoke unanswered for so long is fenced."""
    step_stuck_after_s: float = 600.0
    """A step that takes longer never ends: the process does."""


@dataclass(frozen=True, slots=True)
class Threads:
    """What the loop commands, and where they answer."""

    step: Stepping
    transfer: TransferThread
    answers: Mailbox[StepResult | Reports]
    blocks: BlockPublisher | None = None
    """Tells others what enters and leaves the cache; None: nobody does."""
    grammars: GrammarsAhead | None = None


class Loop:
    """Turns until the worker is drained."""

    def __init__(
        self,
        driver: Driver[Instance],
        links: Links,
        threads: Threads,
        parent: Parent | None,
        options: LoopOptions,
        on_turn: Callable[[], None],
    ) -> None:
        """`on_turn` is called once a turn: the watchdog looks for that."""
        self._driver = driver
        self._links = links
        self._threads = threads
        self._parent = parent
        self._options = options
        self._on_turn = on_turn
        self._num_stop_signals = 0
        self._is_told_to_drain = False
        self._drain_deadline: float | None = None
        self._exit = Exit.OK
        self._next_check = 0.0
        self._next_look = 0.0
        self._load_line = LoadLine(_TELL_EVERY_S)
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
        if self._driver.engine.is_drained() and self._threads.step.may_end():
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
        self._perform(self._driver.turn(list(self._heard(readable, now)), now))
        self._look_after(now)

    def _wait_s(self, now: float) -> float:
        latest = now + _MAX_WAIT_S
        due = self._driver.next_turn_at(now)
        return max(0.0, (latest if due is None else min(latest, due)) - now)

    def _heard(self, readable: Sequence[Socket], now: float) -> Iterator[Heard]:
        """Death notices come before the frames of a turn: a peer's next life is met after its last one ended."""
        for notice in self._parent.receive() if self._parent is not None else ():
            if isinstance(notice, PeerDown):
                yield PeerDied(PeerName(notice.name))
        for answer in self._threads.answers.take_all():
            if isinstance(answer, Reports):
                yield from answer.reports
            else:
                yield answer
        for socket in readable:
            for envelope in self._links.receive(socket):
                if self._threads.grammars is not None:
                    self._threads.grammars.hear(envelope.body)
                yield FrameIn(envelope)
        yield from map(LinkBroken, self._links.take_broken())
        if self._num_stop_signals:
            self._drain(now)
        if self._drain_deadline is not None and not self._is_told_to_drain:
            self._is_told_to_drain = True
            yield DrainRequested()

    def _perform(self, actions: Iterable[WorkerAction]) -> None:
        for action in actions:
            match action:
                case SendFrame(peer, envelope):
                    self._links.send(peer, envelope)
                case Dial(address):
                    self._links.dial(address)
                case HangUp(peer):
                    self._links.hang_up(peer)
                case ComputeStep(plan):
                    self._threads.step.submit(plan)
                case Rest():
                    self._threads.step.rest()
                case RoleTaken():
                    self._tell_role(action)
                case TellBlocks(changes):
                    if self._threads.blocks is not None:
                        self._threads.blocks.put(changes)
                case order:
                    self._threads.transfer.submit(order)

    def _tell_role(self, taken: RoleTaken) -> None:
        role = taken.role.value
        _log.info("this worker is a %s worker now, boot %016x; its cache stays", role, taken.boot)
        if self._parent is not None:
            self._parent.progress(f"is a {role} worker now; its cache stays")
            self._parent.rebooted(taken.boot)

    # ------------------------------------------------------------ draining, self-check, metrics

    def _drain(self, now: float) -> None:
        if self._drain_deadline is None:
            self._drain_deadline = now + self._options.drain_grace_s
            grace_s = self._options.drain_grace_s
            _log.info("draining: requests in flight may end within %g s (a second signal: at once)", grace_s)

    def _look_after(self, now: float) -> None:
        num_steps = self._driver.num_steps
        steps_due = num_steps > 0 and num_steps % _CHECK_EVERY_STEPS == 0
        if now >= self._next_check and (self._driver.is_idle or steps_due) and self._exit is Exit.OK:
            self._next_check = now + _CHECK_EVERY_S
            self._check(now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            metrics = self._driver.engine.metrics()
            self._check_quarantine(metrics, now)
            self._tell_misfits()
            if line := self._load_line.due(metrics, now):
                _log.info("%s", line)
            if self._driver.step_lasts(now) > self._options.step_stuck_after_s:
                end_stuck(f"a step did not end within {self._options.step_stuck_after_s:.0f} s")

    def _tell_misfits(self) -> None:
        """A worker whose settings differ is refused for good: both ends say so, not only the router that asks."""
        misfits = dict(self._driver.engine.misfits())
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
            self._driver.engine.check_integrity()
        except IntegrityError as error:
            _log.critical("self-check failed, draining: %s", error, exc_info=True)
            self._exit = Exit.INTEGRITY
            self._drain(now)
