"""The other ranks of a worker, as rank 0 has them: child processes that start, end and compute together with it.

A worker's ranks hold parts of one model and of every page, so none is of use without the others. Whatever ends one ends
rank 0 at once, and that ends the others; the supervisor starts them all again.
"""

import logging
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from deltaserve.control.sched.executor import Executor
from deltaserve.control.sched.plan import ItemOutcome, PlanItem, StepPlan, StepResult, TokenOf, TokenValues
from deltaserve.control.transfer.rank_chain import RankFailed, RankLogError
from deltaserve.core.ids import Boot, RowId, StepIndex
from deltaserve.core.tokens import pack_u32
from deltaserve.process.children.child import Child, ChildSpec, Kind
from deltaserve.process.children.child_events import Halted
from deltaserve.process.children.exits import Exit, ProcessOver, end_process, how_it_ended, start_thread
from deltaserve.process.children.log_file import OwnOutput
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.notices import Progress, Ready, Refused, Welcome
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.links.rank_link import RankSockets
from deltaserve.process.worker.rank_log import RankChannel, decode_done_step, encode_plan
from deltaserve.process.worker.rank_spec import RankSpec, steps_path, transfers_path, write_rank_spec
from deltaserve.process.worker.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)

_STDERR = 2
_LOOK_S = 2.0
"""How often it is looked whether a rank is stopped."""
BLAME_S = 0.5
"""A rank that ends breaks the collectives of the others within moments. Those wait so long before they end of that, for
whoever watches the processes to see and say which one was first."""


class RankLost(ProcessOver):
    """A rank of this worker is of no use any more, so none is."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(Exit.RANK_ENDED, f"rank {rank}: {reason}")


@dataclass(frozen=True, slots=True)
class RankProgram:
    """How the other ranks are started, and who hears of them."""

    argv: tuple[str, ...]
    """FILE and RANK are added: see rank_spec."""
    progress: Callable[[str], None]
    refuse: Callable[[str], NoReturn]
    """Ends this process: its configuration is wrong."""


@dataclass(slots=True)
class _Watched:
    """A rank's process. `refusal`: what it said is wrong with its configuration."""

    rank: int
    child: Child
    is_ready: bool = False
    is_halted: bool = False
    refusal: str | None = None


class RankProcesses:
    """Ranks 1 .. n - 1. Made in the main thread, which outlives them: the kernel ends them with it."""

    def __init__(self, spec: WorkerSpec, boot: Boot, program: RankProgram) -> None:
        """Starts them; they load beside this process. Raises ConfigError."""
        self._program = program
        self._limit_s = spec.step_stuck_after_s
        self._sockets = RankSockets()
        self._held = ExitStack()
        self.folder: Path = self._held.enter_context(private_folder(spec.state_dir))
        """Folder of this user alone, for what the ranks meet over."""
        ranks = range(1, spec.tp_size)
        self.steps = [self._channel(steps_path(self.folder, rank)) for rank in ranks]
        self.transfers = [self._channel(transfers_path(self.folder, rank)) for rank in ranks]
        """Links to ranks 1 .. n - 1: `steps` for the step thread, `transfers` for the transfer thread."""
        self._all_ready = threading.Event()
        self._asked_to_end: Mailbox[signal.Signals] = Mailbox()
        self._is_ending = False
        file = write_rank_spec(RankSpec(worker=spec, boot=boot), self.folder)
        self._living = {rank: _Watched(rank, self._start(file, rank)) for rank in ranks}
        self._watcher = start_thread("ranks", self._watch)

    def _channel(self, path: Path) -> RankChannel:
        return RankChannel(self._sockets.bind(path), self._limit_s)

    def _start(self, file: Path, rank: int) -> Child:
        argv = (*self._program.argv, str(file), str(rank))
        spec = ChildSpec(f"rank {rank}", argv, Kind.PREFILL)  # of no meaning: these are never drained
        try:
            child = Child(spec, OwnOutput(_STDERR), Welcome(None, ()))
        except OSError as error:
            raise ProcessOver(Exit.FAILED, f"rank {rank}: cannot start {argv[0]}: {error.strerror}") from None
        _log.info("rank %d: process %d", rank, child.pid)
        return child

    def wait_ready(self) -> None:
        """Wait until each rank has loaded its part and opened its transport. Whatever ends one meanwhile ends this
        process."""
        self._all_ready.wait()

    def end(self) -> None:
        """End them all: what they hold is of no use without this process."""
        self._asked_to_end.put(signal.SIGKILL)
        self._watcher.join()
        self._held.close()

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for watched in self._living.values():
                selector.register(watched.child.pidfd, selectors.EVENT_READ, watched)
                selector.register(watched.child.channel_fd, selectors.EVENT_READ, watched)
            selector.register(self._asked_to_end.fileno(), selectors.EVENT_READ)
            while self._living:
                for key, _ in selector.select(_LOOK_S):
                    self._on_event(key, selector)
                for watched in self._living.values():
                    self._see_halt(watched)

    def _on_event(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        watched: _Watched | None = key.data
        if watched is None:
            self._kill_all()
        elif key.fd == watched.child.pidfd:
            selector.unregister(key.fd)
            if not watched.child.is_mute:
                selector.unregister(watched.child.channel_fd)
            self._on_end(watched)
        elif watched.rank in self._living:
            self._hear(watched)
            if watched.child.is_mute:
                selector.unregister(key.fd)

    def _see_halt(self, watched: _Watched) -> None:
        """A stopped rank holds up all others; it is told of and left alone, as a worker is."""
        is_halted = watched.child.is_stopped()
        if is_halted is not watched.is_halted:
            watched.is_halted = is_halted
            said = Halted(f"rank {watched.rank}", watched.child.pid) if is_halted else f"rank {watched.rank}: goes on"
            _log.warning("%s", said)

    def _kill_all(self) -> None:
        for number in self._asked_to_end.take_all():
            self._is_ending = True
            for watched in self._living.values():
                watched.child.signal(number)

    def _hear(self, watched: _Watched) -> None:
        for notice in watched.child.hear():
            match notice:
                case Progress(text):
                    self._program.progress(f"rank {watched.rank}: {text}")
                case Refused(message):
                    watched.refusal = message
                case Ready():
                    watched.is_ready = True
                case _:
                    pass
        if all(other.is_ready for other in self._living.values()):
            self._all_ready.set()

    def _on_end(self, watched: _Watched) -> None:
        self._hear(watched)
        pid = watched.child.pid
        code = watched.child.reap()
        if self._is_ending:
            del self._living[watched.rank]
            return
        if watched.refusal is not None:
            self._program.refuse(f"rank {watched.rank}: {watched.refusal}")
        end_process(Exit.RANK_ENDED, f"rank {watched.rank} (process {pid}) ended with {how_it_ended(code)}")


class GroupExecutor:
    """All ranks compute each step: rank 0 here, the others as they are told. Called from the step thread."""

    def __init__(self, own: Executor, others: list[RankChannel], limit_s: float) -> None:
        """`others`: to ranks 1 .. n - 1. `limit_s`: a rank must have computed a step so long after this one."""
        self._own = own
        self._others = others
        self._limit_s = limit_s
        self._drawn: dict[RowId, tuple[StepIndex, int]] = {}
        """What each row drew last. Other ranks draw nothing: they are told."""

    def execute(self, plan: StepPlan) -> StepResult:
        """See control/sched/executor.py. Raises ProcessOver when a rank failed: others may have computed more than it.

        When it returns, the pages of all ranks may be read.
        """
        plan = replace(plan, items=tuple(self._by_value(item) for item in plan.items))
        body = encode_plan(plan)
        for rank, channel in enumerate(self._others, 1):
            with heard_from(rank):
                channel.send(body)
        result = compute_in_step(self._own, plan)
        for rank, channel in enumerate(self._others, 1):
            with heard_from(rank):
                self._wait_done(channel, rank, plan.step)
        for row in plan.closes:
            self._drawn.pop(row, None)
        self._drawn |= {item.row: (plan.step, item.drawn[-1].token) for item in result.of_all(plan) if item.drawn}
        return result

    def _by_value(self, item: PlanItem) -> PlanItem:
        if not isinstance(item.inputs, TokenOf):
            return item
        step, token = self._drawn.get(item.row, (item.inputs.step, 0))
        if step != item.inputs.step:
            token = 0  # its logits were not finite: such a row's results are dropped
        return replace(item, inputs=TokenValues(pack_u32([token])))

    def _wait_done(self, channel: RankChannel, rank: int, step: StepIndex) -> None:
        body = channel.receive(self._limit_s)
        if body is None:
            raise RankLost(rank, f"did not compute step {step} within {self._limit_s:.0f} s")
        done = decode_done_step(body)
        if done.step != step:
            raise RankLost(rank, f"computed step {done.step} where step {step} was due")


def compute_in_step(executor: Executor, plan: StepPlan) -> StepResult:
    """Do what `executor.execute` does, where other ranks compute the same: a step that fails here is over for all
    of them."""
    try:
        result = executor.execute(plan)
    except Exception:
        time.sleep(BLAME_S)
        raise
    if any(item.outcome is ItemOutcome.FAILED for item in result.items):
        time.sleep(BLAME_S)
        raise ProcessOver(Exit.RANK_ENDED, f"step {plan.step} failed on this rank; the others went on without it")
    return result


@contextmanager
def heard_from(rank: int) -> Iterator[None]:
    """Errors of a rank's channel end the process, and name the rank."""
    try:
        yield
    except RankLogError as error:
        raise RankLost(rank, str(error)) from None


@contextmanager
def failed_rank_ends_process() -> Iterator[None]:
    """What control/transfer/rank_plane.py raises ends the process, and names the rank."""
    try:
        yield
    except RankFailed as error:
        raise RankLost(error.rank, str(error)) from None
