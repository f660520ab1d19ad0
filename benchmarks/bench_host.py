"""What a decode step costs the host of a worker: its real loop, threads, links and frames over a device that computes
nothing.

    python -m benchmarks.bench_host [--rows 1 16 64 256] [--executor nothing] [--sections] [--profile] [--json]

A worker's loop (process/worker/loop.py), its launch thread and its engine serve a front in a process of its own, over
ZeroMQ and TCP, which reads the tokens as a front's links do. `--executor` says what stands behind the seam of the
device (control/sched/executor.py): `nothing` has the tokens of a step at once.

`steady`: as many requests as rows decode on and on. `replaced`: a request is as many tokens long as there are rows, so
one ends in every step and another one, which waits, takes its place: its prompt of 96 tokens is computed, its pages go
to the tree. Figures: CPU time of all threads of the worker for each step, and what of it is which thread's (what is
no thread of Python's is ZeroMQ's own); steps a second with nobody slower than the host.

`--sections` measures once more, with a clock around the parts of a turn: microseconds of the thread's CPU time a step.
`--profile`: the loop's thread under cProfile instead. The bars, of `steady`: 0.15 ms at 1 row, 0.4 at 64, 1.0 at 256.
"""

import argparse
import cProfile
import json
import multiprocessing
import pstats
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TypeVar

from deltaserve.control.engine.api import Instance
from deltaserve.control.engine.core import EngineCore
from deltaserve.control.engine.driver import Driver
from deltaserve.control.engine.step_pace import EagerPace
from deltaserve.control.sched.executor import LaunchedStep, Launcher
from deltaserve.control.sched.plan import ItemResult, Sampled, StepPlan, StepResult
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Envelope, Facts, Finished, Heartbeat, Hello, Message, PeerAddress, Submit
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.links.links import Links
from deltaserve.process.worker.launch_thread import LaunchThread
from deltaserve.process.worker.loop import Loop, LoopOptions, Threads
from deltaserve.process.worker.plane_on_demand import PlaneOnDemand
from deltaserve.process.worker.transfer_thread import Reports, TransferThread
from deltaserve.process.worker.worker_process import SWITCH_INTERVAL_S
from deltaserve.sim.cluster import Shape, worker_config

WORKER, FRONT = PeerName("unified-0"), PeerName("front")
PAGE_SIZE, PROMPT_LEN, SHARED_LEN = 16, 96, 64
NUM_PREFIXES = 4
BACKLOG = 64
"""Requests that wait behind the rows."""
BARS_MS = {1: 0.15, 64: 0.4, 256: 1.0}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What one measurement asks of the worker."""

    num_rows: int
    is_steady: bool
    num_steps: int

    @property
    def max_tokens(self) -> int:
        return 4 * self.num_steps + 1000 if self.is_steady else self.num_rows

    def len_of(self, number: int) -> int:
        """Output tokens of a request; the first ones are shorter, so that rows end one after the other."""
        return self.max_tokens if self.is_steady or number > self.num_rows else number

    @property
    def num_requests(self) -> int:
        """At a time."""
        return self.num_rows if self.is_steady else self.num_rows + BACKLOG

    @property
    def num_warm_steps(self) -> int:
        return 200 if self.is_steady else 200 + 2 * self.num_rows


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement. Times are milliseconds of CPU time a step."""

    num_rows: int
    load: str
    cpu_ms: float
    threads_ms: dict[str, float]
    steps_per_s: float
    rows_per_step: float


# ---------------------------------------------------------------- the device


@dataclass(frozen=True, slots=True)
class Over:
    """A step that was over when it began."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class Nothing:
    """A device that computes nothing: every row draws token 7."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        drawn = (Sampled(7),)
        items = tuple(ItemResult(item.row, drawn if item.samples else ()) for item in plan.others)
        return Over(StepResult(plan.step, items, seconds=1e-3, decoded=pack_u32([7]) * plan.num_going_on))


EXECUTORS: dict[str, Callable[[Load], Launcher]] = {"nothing": lambda load: Nothing()}
"""Name |-> what stands behind the seam of the device."""


# ---------------------------------------------------------------- the front, in a process of its own


class Front:
    """Asks for as many requests as the load says, one more for each that ended, and reads every frame."""

    def __init__(self, port: int, load: Load) -> None:
        self._links = Links()
        self._links.dial(PeerAddress(name=WORKER, url=f"tcp://127.0.0.1:{port}"))
        self._load = load
        self._numbers = count(1)
        self._boot: int | None = None

    def run(self) -> None:
        """Until the process is ended."""
        self._say(Hello(role=Role.FRONT.value, compat={}, facts=Facts()))
        next_beat = time.monotonic()
        while True:
            for socket in self._links.wait(0.1):
                for envelope in self._links.receive(socket):
                    self._on_message(envelope)
            if self._boot is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 0.5
                self._say(Heartbeat())

    def _on_message(self, envelope: Envelope) -> None:
        if self._boot is None and isinstance(envelope.body, Hello):
            self._boot = envelope.src_boot
            for _ in range(self._load.num_requests):
                self._submit()
        elif isinstance(envelope.body, Finished):
            if envelope.body.reason is not None:
                raise RuntimeError(f"a request failed: {envelope.body.message}")
            self._submit()

    def _submit(self) -> None:
        number = next(self._numbers)
        own = [number * 31 % 97, number // 97 % 97] * ((PROMPT_LEN - SHARED_LEN) // 2)
        submit = Submit(
            room=number.to_bytes(16, "little"),
            epoch=1,
            prompt=pack_u32([number % NUM_PREFIXES] * SHARED_LEN + own),
            prompt_len=PROMPT_LEN,
            keys=b"",
            namespace="",
            sampling=SamplingParams(max_tokens=self._load.len_of(number), seed=number),
            prefill=None,
            remaining_ms=3_600_000,
        )
        self._say(submit)

    def _say(self, body: Message) -> None:
        self._links.send(WORKER, Envelope(src=FRONT, src_boot=1, dst_boot=self._boot, body=body))


def be_front(port: int, load: Load) -> None:
    Front(port, load).run()


# ---------------------------------------------------------------- the worker


class Measured(Exception):
    """Ends the loop: all steps were measured."""


class Sections:
    """Thread CPU time of calls, by the name of the part that they are."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count what `owner.method` takes from now on."""
        call, ns = getattr(owner, method), self.ns

        def timed(*args: object) -> object:
            began = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                ns[part] += time.thread_time_ns() - began

        setattr(owner, method, timed)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Clocks when a step was committed."""

    step: int
    wall_s: float
    cpu_s: float
    threads_s: dict[str, float]
    num_tokens: int
    sections: dict[str, int]


class Worker:
    """A unified worker in this process, without a supervisor."""

    def __init__(self, load: Load, executor: str, sections: Sections | None) -> None:
        self._load, self._sections = load, sections
        tokens = PROMPT_LEN + load.max_tokens
        pages = (load.num_rows + BACKLOG) * (tokens // PAGE_SIZE + 2) + 1000
        shape = Shape(
            page_size=PAGE_SIZE,
            decode_pages=pages,
            max_running=load.num_rows,
            chunk_len=512,
            context_len=tokens + PAGE_SIZE,
            reserve_len=64,
            extend_len=512,
            steps_ahead=1,
        )
        config = replace(worker_config(shape, WORKER, Role.UNIFIED, 1), computes_beside=True)
        self._engine = EngineCore(config)
        self._driver = Driver[Instance](self._engine, Boot(config.boot), EagerPace(), lambda boot: Boot(boot + 1))
        self._links = Links()
        self.port = self._links.listen("127.0.0.1", 0)
        launcher = EXECUTORS[executor](load)
        answers: Mailbox[StepResult | Reports] = Mailbox()
        if sections is not None:
            self._watch(sections, launcher, answers)
        self._transfer = TransferThread(lambda: PlaneOnDemand(_no_plane), answers)
        self._step = LaunchThread(launcher, answers)
        threads = Threads(self._step, self._transfer, answers)
        self._loop = Loop(self._driver, self._links, threads, None, LoopOptions(), self._on_turn)
        self._began: _Mark | None = None
        self._ended: _Mark | None = None

    def _watch(self, sections: Sections, launcher: Launcher, answers: Mailbox[StepResult | Reports]) -> None:
        for method in ("plan", "commit", "handle", "tick", "turn"):
            sections.watch(self._engine, method, method)
        sections.watch(self._links, "wait", "poll")
        sections.watch(self._links, "receive", "receive")
        sections.watch(self._links, "send", "encode + send")
        sections.watch(self._links, "_hand_over", "of it send")
        sections.watch(answers, "put", "mailbox, put")
        sections.watch(answers, "take_all", "mailbox, take")
        sections.watch(launcher, "launch", "launch")

    def _on_turn(self) -> None:
        step = self._driver.num_steps
        if self._began is None:
            if step >= self._load.num_warm_steps:
                self._began = self._mark(step)
        elif step >= self._began.step + self._load.num_steps:
            self._ended = self._mark(step)
            raise Measured

    def _mark(self, step: int) -> _Mark:
        tokens = int(self._engine.metrics()["deltaserve_computed_tokens_total"])
        threads = {
            ("loop" if thread is threading.main_thread() else thread.name): time.clock_gettime(
                time.pthread_getcpuclockid(thread.ident)
            )
            for thread in threading.enumerate()
            if thread.ident is not None
        }
        sections = {} if self._sections is None else dict(self._sections.ns)
        return _Mark(step, time.perf_counter(), time.process_time(), threads, tokens, sections)

    def run(self) -> None:
        """Serve until the steps of the load were measured."""
        try:
            self._loop.run()
        except Measured:
            pass
        finally:
            self._step.stop(1.0)
            self._transfer.stop(1.0)
            self._links.close()

    def figures(self) -> Figures:
        began, ended = self._marks()
        steps = ended.step - began.step
        cpu_ms = 1e3 * (ended.cpu_s - began.cpu_s) / steps
        threads = {name: 1e3 * (ended.threads_s[name] - at) / steps for name, at in began.threads_s.items()}
        threads["zmq"] = cpu_ms - sum(threads.values())
        return Figures(
            num_rows=self._load.num_rows,
            load="steady" if self._load.is_steady else "replaced",
            cpu_ms=cpu_ms,
            threads_ms=threads,
            steps_per_s=steps / (ended.wall_s - began.wall_s),
            rows_per_step=(ended.num_tokens - began.num_tokens) / steps,
        )

    def sections_us(self) -> dict[str, float]:
        """Part |-> microseconds a step."""
        began, ended = self._marks()
        steps = ended.step - began.step
        return {part: (ns - began.sections.get(part, 0)) / 1e3 / steps for part, ns in ended.sections.items()}

    def _marks(self) -> tuple[_Mark, _Mark]:
        if self._began is None or self._ended is None:
            raise RuntimeError("the loop ended before its steps were measured")
        return self._began, self._ended


def _no_plane() -> PlaneOnDemand:
    raise RuntimeError("nobody moves pages here")


def served(worker: Worker, load: Load, run: Callable[[], T]) -> T:
    """`run`, while a front asks for the load."""
    front = multiprocessing.get_context("spawn").Process(target=be_front, args=(worker.port, load), daemon=True)
    front.start()
    try:
        return run()
    finally:
        front.terminate()
        front.join()


def measure(load: Load, executor: str, sections: Sections | None = None) -> Worker:
    worker = Worker(load, executor, sections)
    served(worker, load, worker.run)
    return worker


def best(load: Load, executor: str, num_rounds: int) -> Figures:
    """The round with the least CPU time: what else the machine does only adds to it."""
    return min((measure(load, executor).figures() for _ in range(num_rounds)), key=lambda found: found.cpu_ms)


def profile(load: Load, executor: str) -> None:
    worker, profiler = Worker(load, executor, None), cProfile.Profile()
    served(worker, load, lambda: profiler.runcall(worker.run))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--loads", nargs="+", choices=["steady", "replaced"], default=["steady", "replaced"])
    parser.add_argument("--executor", choices=EXECUTORS, default="nothing")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sections", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loads = [Load(rows, name == "steady", args.steps) for name in args.loads for rows in args.rows]
    if args.profile:
        for load in loads:
            profile(load, args.executor)
        return
    found = [best(load, args.executor, args.rounds) for load in loads]
    parts = [measure(load, args.executor, Sections()).sections_us() for load in loads if args.sections]
    if args.json:
        print(json.dumps({"figures": [asdict(figures) for figures in found], "sections_us": parts}, indent=1))
        return
    _print(found)
    for load, of_load in zip(loads, parts, strict=False):
        text = ", ".join(f"{part} {us:.0f}" for part, us in sorted(of_load.items(), key=lambda found: -found[1]))
        print(f"{load.num_rows} rows, {'steady' if load.is_steady else 'replaced'}: {text}")


def _print(found: list[Figures]) -> None:
    names = ["loop", "step", "step-ends", "transfer", "zmq"]
    columns = "".join(f"{name:>11}" for name in names)
    print(f"{'load':<10}{'rows':>5}{'CPU ms/step':>13}{'bar':>6}{columns}{'steps/s':>10}{'tokens/step':>13}")
    for one in found:
        bar = BARS_MS.get(one.num_rows) if one.load == "steady" else None
        parts = "".join(f"{one.threads_ms.get(name, 0.0):>11.3f}" for name in names)
        print(
            f"{one.load:<10}{one.num_rows:>5}{one.cpu_ms:>13.3f}{bar or '':>6}{parts}"
            f"{one.steps_per_s:>10.0f}{one.rows_per_step:>13.1f}"
        )


if __name__ == "__main__":
    main()
