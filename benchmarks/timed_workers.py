"""`deltaserve serve` whose workers count where their CPU time goes. For bench_hybrid.py.

    TIMES_FOLDER=out/times python -m benchmarks.timed_workers serve MODEL ...

Each call of a function in SITES is timed by its thread's CPU clock, without the calls within it that are timed
themselves. Twice a second a worker writes what it has counted so far to a file of the folder. A timed call costs
about a microsecond more.
"""

import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deltaserve.cli.main import main
from deltaserve.compute.attention.native.native_attention import NativeAttention, NativeStep
from deltaserve.compute.attention.reference.torch_attention import TorchAttention, TorchStep
from deltaserve.compute.executor.runner import TorchExecutor
from deltaserve.compute.layers import decoder, delta_net
from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.memory.state_arena import StateArena
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.plan import StepPlan
from deltaserve.control.sched.running import Running
from deltaserve.control.sched.steps import Steps
from deltaserve.control.sched.waiting import Waiting
from deltaserve.core.ids import Role
from deltaserve.launch import serve
from deltaserve.launch.compose import worker_child
from deltaserve.process.children.child import ChildSpec
from deltaserve.process.worker.build import build_worker
from deltaserve.process.worker.worker_process import run_worker
from deltaserve.process.worker.worker_spec import WorkerSpec, read_spec

PROGRAM = (sys.executable, __file__)
FOLDER = "TIMES_FOLDER"
PERIOD_S = 0.5
STEPS, EXTENDS = "steps", "extends"
"""Counted beside the times: steps, and items of more than one token in them."""
ALL = "the whole process"

SITES: dict[str, tuple[tuple[Any, str], ...]] = {
    "admission": ((Waiting, "admit"),),
    "plan": ((Steps, "plan"),),
    "commit": ((Steps, "commit"),),
    "tree": ((PrefixCache, "match"), (PrefixCache, "insert"), (Running, "share_step"), (Running, "leave_computed")),
    "inputs, tables, draw": ((TorchExecutor, "execute"),),
    "layers' matrices and norms": ((decoder.Decoder, "forward"),),
    "attention": (
        (TorchAttention, "begin_step"),
        (TorchStep, "attend"),
        (TorchStep, "write_kv"),
        (NativeAttention, "begin_step"),
        (NativeStep, "attend"),
        (NativeStep, "write_kv"),
    ),
    "states: slots of a step": ((TorchAttention, "begin_states"), (NativeAttention, "begin_states")),
    "states: read and written": ((StateArena, "load"), (StateArena, "store")),
    "recurrent layers: maps, convolution": tuple(
        (delta_net.DeltaWeights, name) for name in ("prepare", "meet", "finish")
    ),
    "recurrent layers: delta rule": ((TorchOps, "recurred"), (NativeOps, "recurred")),
}
"""Label |-> (owner, name of a function)."""


class Times:
    """CPU seconds by label, of all threads."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._within = threading.local()
        """`seconds`: of timed calls within the one that runs."""

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        within = self._within

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outside, within.seconds = getattr(within, "seconds", 0.0), 0.0
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - start
                self._seconds[label] += taken - within.seconds
                within.seconds = outside + taken

        return call

    def counting(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def call(executor: TorchExecutor, plan: StepPlan) -> Any:
            self.counted[STEPS] += bool(plan.items)
            self.counted[EXTENDS] += sum(item.q_len > 1 for item in plan.items)
            return execute(executor, plan)

        return call

    def told(self) -> dict[str, float]:
        return {ALL: time.process_time(), **self._seconds, **self.counted}


def keep_telling(times: Times, role: Role) -> None:
    path = Path(os.environ[FOLDER]) / f"{role.value}-{os.getpid()}.json"
    while True:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(times.told()))
        fresh.rename(path)
        time.sleep(PERIOD_S)


def time_worker(role: Role) -> None:
    times = Times()
    for label, sites in SITES.items():
        for owner, name in sites:
            setattr(owner, name, times.timed(label, getattr(owner, name)))
    TorchExecutor.execute = times.counting(TorchExecutor.execute)  # type: ignore[method-assign]
    threading.Thread(target=keep_telling, args=(times, role), daemon=True).start()


def told_times(folder: Path) -> dict[str, Counter[str]]:
    """Role |-> what its workers have counted so far."""
    time.sleep(2 * PERIOD_S)
    found: dict[str, Counter[str]] = {}
    for path in sorted(folder.glob("*.json")):
        found.setdefault(path.name.partition("-")[0], Counter()).update(json.loads(path.read_text()))
    return found


def timed_child(spec: WorkerSpec, folder: Path) -> ChildSpec:
    child = worker_child(spec, folder)
    return dataclasses.replace(child, argv=(*PROGRAM, "worker", child.argv[-1]))


def run() -> int:
    program, argv = sys.argv[1], sys.argv[1:]
    if program == "worker":
        time_worker(read_spec(Path(argv[1])).role)
        run_worker(argv, build_worker, (*PROGRAM, "rank"))
    patch.object(serve, "worker_child", timed_child).start()
    return main(argv)


if __name__ == "__main__":
    raise SystemExit(run())
