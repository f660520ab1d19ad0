"""The life of one worker process: read the spec, build, listen, say ready, turn, end.

A wrong configuration ends it with one line and exit code 2; anything unforeseen with its stack.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deltaserve.control.engine.api import Instance
from deltaserve.control.engine.driver import Driver
from deltaserve.control.engine.step_pace import EagerPace, SharedPace, StepPace
from deltaserve.control.sched.executor import Executor, Launcher
from deltaserve.control.sched.plan import StepResult
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.ids import Boot
from deltaserve.process.children.boots import new_boot
from deltaserve.process.children.exits import Exit, Watchdog
from deltaserve.process.children.garbage import keep_loaded
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.parent import Parent, end_refused, live
from deltaserve.process.children.shortage import telling_shortage
from deltaserve.process.children.terminal import start_log
from deltaserve.process.links.block_link import BlockPublisher
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from deltaserve.process.worker.grammars_ahead import GrammarsAhead
from deltaserve.process.worker.launch_thread import LaunchThread
from deltaserve.process.worker.loop import Loop, LoopOptions, Threads
from deltaserve.process.worker.lost_file import without_lost_file
from deltaserve.process.worker.member_thread import ExpertMember, MemberThread
from deltaserve.process.worker.rank_group import RankProcesses, RankProgram
from deltaserve.process.worker.step_thread import Stepping, StepThread
from deltaserve.process.worker.transfer_thread import Reports, TransferThread
from deltaserve.process.worker.worker_spec import WorkerSpec, read_secret, read_spec

_log = logging.getLogger(__name__)

_STOP_WAIT_S = 5.0
_LAST_FRAMES_MS = 500
SWITCH_INTERVAL_S = 0.001
"""Longest hold of the interpreter lock: the transfer thread must get its turn within milliseconds."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What makes a worker this worker."""

    instance: Instance
    executor: Executor
    open_plane: Callable[[], DataPlane]
    """Called in the transfer thread."""
    member: ExpertMember | None = None
    """Member of an expert group; None: the worker is in none."""
    launcher: Launcher | None = None
    """The executor, where its device computes beside the host."""
    grammars: GrammarsAhead | None = None


Build = Callable[[WorkerSpec, Boot, Callable[[str], None], RankProcesses | None], WorkerParts]
"""(spec, boot, report progress, the other ranks if there are any) -> parts. Raises ConfigError."""


def run_worker(argv: Sequence[str], build: Build, rank_argv: tuple[str, ...]) -> NoReturn:
    """Be the worker that the file argv[1] describes, and its rank 0; ends the process.

    `rank_argv`: the program of its other ranks.
    """

    def serve(parent: Parent | None) -> Exit:
        if len(argv) != 2:
            raise ConfigError("usage: python -m deltaserve.process.worker.worker SPEC.json")
        return _serve(read_spec(Path(argv[1])), parent, build, rank_argv)

    live("the worker", serve)


def _serve(spec: WorkerSpec, parent: Parent | None, build: Build, rank_argv: tuple[str, ...]) -> Exit:
    start_log(spec.name, spec.log, None if parent is None else parent.progress)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    former = 0 if parent is None else parent.welcome.former_boot
    boot = new_boot(former)
    if former:
        spec = without_lost_file(spec)
    security = LinkSecurity.from_cluster_key(read_secret(spec)) if spec.curve else None
    progress = _log.info if parent is None else parent.progress
    program = RankProgram(rank_argv, progress, lambda message: end_refused(message, parent))
    with telling_shortage():
        ranks = RankProcesses(spec, boot, program) if spec.tp_size > 1 else None
        spec = spec if ranks is None else ranks.spec
        parts = build(spec, boot, progress, ranks)
        if ranks is not None:
            ranks.wait_ready()
        links = Links(security)
        port = _listen(links, spec, parent)  # who finds the port open takes the worker for ready
        answers: Mailbox[StepResult | Reports] = Mailbox()
        step, transfer = _step_thread(parts, answers), TransferThread(parts.open_plane, answers)
        threads = Threads(step, transfer, answers, _block_publisher(spec), parts.grammars)
        watchdog = Watchdog(spec.stuck_after_s)
    options = LoopOptions(
        drain_grace_s=spec.drain_grace_s,
        fence_after_s=spec.options.drain_timeout_s,
        step_stuck_after_s=spec.step_stuck_after_s,
    )
    driver = Driver(parts.instance, boot, _pace(spec, parts), new_boot)
    loop = Loop(driver, links, threads, parent, options, watchdog.alive)
    loop.stop_on_signals()
    keep_loaded()
    _log.info("ready on %s:%d, boot %016x", spec.host, port, boot)
    if parent is not None:
        parent.ready(f"tcp://{spec.host}:{port}", boot)
    code = loop.run()
    _end(watchdog, links, threads, ranks)
    _log.info("ended with exit code %d", code)
    return code


def _end(watchdog: Watchdog, links: Links, threads: Threads, ranks: RankProcesses | None) -> None:
    """Close all, part by part. One that hangs ends the process: where nobody told it to end nobody would kill it."""
    watchdog.ends("closing its links")
    links.close(_LAST_FRAMES_MS)
    watchdog.ends("closing its transport")
    if not threads.transfer.stop(_STOP_WAIT_S):
        _log.warning("the transport did not close within %.0f s", _STOP_WAIT_S)
    threads.step.stop(wait_s=0.0)
    watchdog.ends("telling its last KV events")
    if threads.blocks is not None:
        threads.blocks.stop()
    watchdog.ends("ending its ranks")
    if ranks is not None:
        ranks.end()
    watchdog.ends("leaving")


def _pace(spec: WorkerSpec, parts: WorkerParts) -> StepPace:
    if parts.launcher is not None:
        return EagerPace()
    if spec.core_share is None or parts.member is not None:
        return StepPace()
    return SharedPace(spec.options.sched.step_target_s)


def _step_thread(parts: WorkerParts, answers: Mailbox[StepResult | Reports]) -> Stepping:
    if parts.member is not None:
        return MemberThread(parts.executor, parts.member, answers)
    if parts.launcher is not None:
        return LaunchThread(parts.launcher, answers)
    return StepThread(lambda plan: answers.put(parts.executor.execute(plan).compact(plan)))


def _block_publisher(spec: WorkerSpec) -> BlockPublisher | None:
    """Raises ConfigError."""
    if spec.kv_events is None:
        return None
    medium = "GPU" if spec.device.startswith("cuda") else "CPU"
    return BlockPublisher(spec.kv_events, spec.page_size, medium)


def _listen(links: Links, spec: WorkerSpec, parent: Parent | None) -> int:
    """A restarted worker keeps its port: peers find it where it was. Returns the port. Raises ConfigError.

    A port nobody chose may have been given to another program meanwhile: then any other does, and peers are told.
    """
    former = parent.welcome.url if parent is not None else None
    if spec.port == 0 and former is not None:
        try:
            return links.listen(spec.host, int(former.rpartition(":")[2]))
        except ConfigError as error:
            _log.warning("%s; taking another port", one_line(error))
    return links.listen(spec.host, spec.port)
