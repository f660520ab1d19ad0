"""A further rank of an echo worker: the same steps, fences of its own. The model folder says what goes wrong there."""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable

from deltaserve.control.sched.plan import ItemOutcome, ItemResult, StepPlan, StepResult
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.core.errors import ConfigError
from deltaserve.process.worker.rank_process import RankParts, RankSeat, run_rank
from deltaserve.process.worker.worker_spec import WorkerSpec
from tests.process.worker.programs.echo_worker import EchoExecutor, EchoPlane


class FailingExecutor(EchoExecutor):
    def __init__(self, folder: str) -> None:
        super().__init__("echo")
        self._problem = folder

    def execute(self, plan: StepPlan) -> StepResult:
        print(f"computes step {plan.step}", file=sys.stderr, flush=True)
        if self._problem == "rank-step-raises":
            raise RuntimeError("the device of rank 1 is lost")
        if self._problem == "rank-step-fails":
            return StepResult(plan.step, (ItemResult(plan.items[0].row, outcome=ItemOutcome.FAILED),))
        if self._problem == "rank-step-hangs":
            time.sleep(3600)
        return super().execute(plan)


def look_for_worker(spec: WorkerSpec) -> None:
    """Tells whether the worker listens while this rank loads, for which it takes a second."""
    for _ in range(20):
        time.sleep(0.05)
        with socket.socket() as probe:
            if probe.connect_ex((spec.host, spec.port)) == 0:
                print("the worker listens already", file=sys.stderr, flush=True)
                return


def build(spec: WorkerSpec, seat: RankSeat, progress: Callable[[str], None]) -> RankParts:
    folder = spec.model_path
    if folder == "rank-refuses":
        raise ConfigError(f"device cuda:{seat.shard.rank} asked for,\nbut torch sees no CUDA device")
    if folder == "rank-dies-early":
        os._exit(9)
    if folder == "rank-looks":
        look_for_worker(spec)
    progress("loading")
    print(f"rank process {os.getpid()}", file=sys.stderr, flush=True)

    def open_plane() -> DataPlane:
        if folder == "rank-transport-refuses":
            raise ConfigError("no such network device")
        if folder == "rank-transport-lacks-files":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return EchoPlane(folder)

    return RankParts(FailingExecutor(folder), open_plane)


if __name__ == "__main__":
    run_rank(sys.argv, build)
