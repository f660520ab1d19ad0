"""The life of a rank that is not rank 0: load a part of the model, then do what rank 0 says until its parent is gone.

It decides nothing. Its step thread computes the plans of rank 0, its transfer thread performs the commands of rank 0's;
both answer each entry of their log. It ends with rank 0 whatever ends that, and rank 0 with it.
"""

import logging
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deltaserve.control.sched.executor import Executor
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.control.transfer.rank_plane import RankTurns, take_entries
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot
from deltaserve.core.layout.shard import Shard
from deltaserve.process.children.exits import Exit, start_thread
from deltaserve.process.children.garbage import keep_loaded
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.parent import Parent, end_refused, live
from deltaserve.process.children.shortage import telling_shortage
from deltaserve.process.children.terminal import start_log
from deltaserve.process.links.rank_link import RankSockets
from deltaserve.process.worker.rank_group import compute_in_step
from deltaserve.process.worker.rank_log import RankChannel, StepDone, decode_plan, encode_done_step
from deltaserve.process.worker.rank_spec import MeetingPoint, meeting_point, rank_security, read_rank_spec
from deltaserve.process.worker.worker_process import SWITCH_INTERVAL_S
from deltaserve.process.worker.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankSeat:
    """Which rank of which start this process is."""

    shard: Shard
    boot: Boot
    """Boot of rank 0."""
    meeting: MeetingPoint
    """Where the ranks meet."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """What computes and what moves bytes here."""

    executor: Executor
    open_plane: Callable[[], DataPlane]
    """Called in the transfer thread."""


BuildRank = Callable[[WorkerSpec, RankSeat, Callable[[str], None]], RankParts]
"""(spec, seat, report progress) -> parts. Raises ConfigError."""


def run_rank(argv: Sequence[str], build: BuildRank) -> NoReturn:
    """Be rank argv[2] of the worker that the file argv[1] describes; ends the process."""

    def follow(parent: Parent | None) -> Exit:
        if parent is None or len(argv) != 3:
            raise ConfigError("a rank is started by rank 0 of its worker")
        _follow(Path(argv[1]), int(argv[2]), parent, build)
        return Exit.OK

    live("the rank", follow)


def _follow(file: Path, rank: int, parent: Parent, build: BuildRank) -> None:
    asked = read_rank_spec(file)
    spec, wires = asked.worker, asked.wires
    start_log(f"{spec.name} rank {rank}", spec.log, parent.progress)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with telling_shortage():
        meeting = meeting_point(asked, file.parent)
        parts = build(spec, RankSeat(Shard(rank, spec.tp_size), asked.boot, meeting), parent.progress)
    for number in stop_signals():  # rank 0 drains, and needs this one for it
        signal.signal(number, signal.SIG_IGN)
    sockets = RankSockets(rank_security(spec, asked.boot))
    steps = RankChannel(sockets.connect(wires.steps[rank]), spec.step_stuck_after_s)
    transfers = RankChannel(sockets.connect(wires.transfers[rank]), spec.step_stuck_after_s)
    keep_loaded()
    start_thread("step", lambda: follow_steps(parts.executor, steps))
    start_thread("transfer", lambda: _move(parts.open_plane, transfers, parent, spec.name))
    while not parent.is_gone:
        select.select([parent], [], [])
        parent.receive()


def _move(open_plane: Callable[[], DataPlane], channel: RankChannel, parent: Parent, name: str) -> None:
    try:
        with telling_shortage():
            plane = open_plane()
    except ConfigError as error:
        end_refused(error, parent)
    parent.ready(name, 0)
    _log.info("ready")
    turns = RankTurns(plane, channel, time.monotonic)
    while True:
        turns.turn(take_entries(channel, turns.wait_s))


def follow_steps(executor: Executor, channel: RankChannel) -> NoReturn:
    """Compute what rank 0 computes. A step that fails here, or an entry that does not follow, ends the process."""
    while True:
        body = channel.receive(None)
        if body is not None:
            plan = decode_plan(body)
            compute_in_step(executor, plan)
            channel.send(encode_done_step(StepDone(plan.step)))
