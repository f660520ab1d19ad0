"""The other ranks of a worker, as rank 0 has them: processes that start, end and compute together with it.

A worker's ranks hold parts of one model and of every page, so none is of use without the others. Whatever ends one ends
rank 0 at once, and that ends the others; the supervisor starts them all again.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

from deltaserve.compute.collective.net_meeting import listen_for_ranks
from deltaserve.control.sched.executor import Executor
from deltaserve.control.sched.plan import ItemOutcome, PlanItem, StepPlan, StepResult, TokenOf, TokenValues
from deltaserve.control.transfer.rank_chain import RankFailed, RankLogError
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot, RowId, StepIndex
from deltaserve.core.tokens import pack_u32
from deltaserve.process.children.exits import Exit, ProcessOver, end_process
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.links.rank_link import RankSockets
from deltaserve.process.worker.first_node import FirstNode
from deltaserve.process.worker.rank_log import RankChannel, decode_done_step, encode_plan
from deltaserve.process.worker.rank_spec import (
    RankSpec,
    RankWires,
    meeting_point,
    rank_security,
    steps_url,
    transfers_url,
    write_rank_spec,
)
from deltaserve.process.worker.ranks_here import RanksHere
from deltaserve.process.worker.worker_spec import RankNodes, WorkerSpec, ranks_here

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


class RankProcesses:
    """Ranks 1 .. n - 1: those of this machine, and through their nodes those of others."""

    def __init__(self, spec: WorkerSpec, boot: Boot, program: RankProgram) -> None:
        """Waits for other machines, where there are any; then ranks start, and load beside this process. Raises
        ConfigError."""
        self._program = program
        self._first = None if spec.nodes is None else FirstNode(spec, spec.nodes, program)
        self.spec = spec if self._first is None else self._first.wait_joined()
        """The worker, as all machines have room for it."""
        self._sockets = RankSockets(rank_security(spec, boot))
        self._held = ExitStack()
        folder = self._held.enter_context(private_folder(spec.state_dir))
        ranks = range(1, spec.tp_size)
        self.steps = [self._channel(steps_url(folder, rank), rank) for rank in ranks]
        self.transfers = [self._channel(transfers_url(folder, rank), rank) for rank in ranks]
        """Links to ranks 1 .. n - 1: `steps` for the step thread, `transfers` for the transfer thread."""
        self.listener = None if spec.nodes is None else _listen(spec.nodes)
        """Where the collective of ranks on several machines is met."""
        asked = RankSpec(worker=self.spec, boot=boot, wires=self._wires())
        self.meeting = meeting_point(asked, folder)
        self._here_ready = threading.Event()
        here = range(1, ranks_here(spec).stop)
        self._here = RanksHere(program.argv, write_rank_spec(asked, folder), here, self) if here else None
        if self._first is not None:
            self._first.begin(asked)

    def _channel(self, url: str, rank: int) -> RankChannel:
        nodes = self.spec.nodes
        if nodes is not None and rank not in ranks_here(self.spec):
            url = f"tcp://{nodes.own_host}:*"
        return RankChannel(self._sockets.bind(url), self.spec.step_stuck_after_s)

    def _wires(self) -> RankWires:
        return RankWires(
            steps={rank: channel.url for rank, channel in enumerate(self.steps, 1)},
            transfers={rank: channel.url for rank, channel in enumerate(self.transfers, 1)},
            meeting=None if self.listener is None else self.listener.getsockname(),
        )

    def wait_ready(self) -> None:
        """Wait until each rank has loaded its part and opened its transport. Whatever ends one meanwhile ends this
        process."""
        if self._here is not None:
            self._here_ready.wait()
        if self._first is not None:
            self._first.all_ready.wait()

    def end(self) -> None:
        """End them all: what they hold is of no use without this process. Those of other machines miss it."""
        if self._here is not None:
            self._here.end()
        self._held.close()

    # ------------------------------------------------------------ what ranks here tell

    def says(self, rank: int, text: str) -> None:
        self._program.progress(f"rank {rank}: {text}")

    def all_ready(self) -> None:
        self._here_ready.set()

    def refused(self, rank: int, message: str) -> NoReturn:
        self._program.refuse(f"rank {rank}: {message}")

    def ended(self, rank: int, how: str) -> NoReturn:
        end_process(Exit.RANK_ENDED, how)


def _listen(nodes: RankNodes) -> socket.socket:
    """Raises ConfigError."""
    try:
        return listen_for_ranks(nodes.own_host)
    except OSError as error:
        raise ConfigError(f"ranks cannot meet at {nodes.own_host}: {error.strerror or error}") from None


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
