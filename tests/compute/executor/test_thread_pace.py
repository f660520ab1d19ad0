"""How many threads compute: all, fewer while they wait for cores, and again all."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deltaserve.compute.executor.core_waits import compute_wait_s, counts_waits
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.compute.executor.step_threads import StepThreads
from deltaserve.compute.executor.thread_pace import ThreadPace
from deltaserve.compute.native.core_share import CoreShare
from deltaserve.control.sched.plan import StepPlan, WorkList
from deltaserve.core.ids import StepIndex
from deltaserve.model.checkpoint_config import load_spec
from tests.compute.native.native_build import compiled_library, native_context

RECALL = Path(__file__).parents[3] / "models" / "recall-micro"
STEP_S = 0.05


class Machine:
    """On which threads beyond `num_free` wait for as long as a step takes."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.now = self.waited = 0.0

    def run(self, pace: ThreadPace, seconds: float) -> list[int]:
        """The number of threads of each step."""
        used, end = [], self.now + seconds
        while self.now < end:
            used.append(pace.num_threads)
            self.now += STEP_S
            self.waited += STEP_S * max(0, pace.num_threads - self.num_free)
            pace.learn(STEP_S, self.now)
        return used


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_an_idle_machine_computes_with_all() -> None:
    machine = Machine(num_free=4)
    assert set(machine.run(ThreadPace(4, lambda: machine.waited), 20.0)) == {4}


def test_threads_that_wait_are_halved_down_to_the_least() -> None:
    machine = Machine(num_free=0)
    pace = ThreadPace(8, lambda: machine.waited, least=2)
    assert list(dict.fromkeys(machine.run(pace, 1.3))) == [8, 4, 2]


def test_a_burst_of_others_halves_nothing() -> None:
    """One that is over within a window; each time anew."""
    machine = Machine(num_free=2)
    pace = ThreadPace(2, lambda: machine.waited)
    machine.run(pace, 1.0)
    for _ in range(10):
        machine.num_free = 1
        used = machine.run(pace, 0.1)
        machine.num_free = 2
        assert set(used + machine.run(pace, 1.0)) == {2}


def test_more_are_tried_ever_less_often_while_they_wait_and_soon_again_when_they_need_not() -> None:
    machine = Machine(num_free=1)
    pace = ThreadPace(2, lambda: machine.waited)
    early, late = machine.run(pace, 20.0).count(2), machine.run(pace, 200.0).count(2)
    assert early * STEP_S < 20 * 0.15
    assert late * STEP_S < 200 * 0.02
    machine.num_free = 2
    assert machine.run(pace, 40.0)[-1] == 2
    assert set(machine.run(pace, 20.0)) == {2}


def test_where_nobody_counts_the_number_stays() -> None:
    pace = ThreadPace(4, lambda: None)
    assert set(Machine(num_free=0).run(pace, 5.0)) == {4}


def test_a_fixed_number_is_not_looked_at() -> None:
    def never() -> float:
        raise AssertionError("asked")

    assert set(Machine(num_free=0).run(ThreadPace(3, never, least=3), 5.0)) == {3}


@pytest.mark.skipif(not counts_waits(), reason="this kernel does not count waits")
def test_the_kernel_counts_waits_of_threads_that_compute() -> None:
    """Threads that Python knows are not of them, but for the one that asks."""
    waits = [compute_wait_s() for _ in range(2)]
    asked_by_another: list[float | None] = []
    thread = threading.Thread(target=lambda: asked_by_another.append(compute_wait_s()))
    thread.start()
    thread.join()
    assert all(wait is not None and wait >= 0.0 for wait in (*waits, *asked_by_another))


def test_torch_and_the_native_library_follow(threads_restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    native = native_context("generic", 2)
    waits = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr("deltaserve.compute.executor.step_threads.compute_wait_s", lambda: next(waits))
    threads = StepThreads(native, 1, 2)
    torch.set_num_threads(2)
    for _ in range(3):
        threads.learn(0.5)
    assert (torch.get_num_threads(), native.num_threads) == (1, 1)


@pytest.mark.parametrize("can_share", [True, False])
def test_a_page_that_cannot_be_shared_costs_the_borrowed_cores_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, threads_restored: None, can_share: bool
) -> None:
    compiled_library()
    path = tmp_path / ("." if can_share else "nowhere") / "cores"
    spec = load_spec(RECALL)
    sizes = ExecutorSizes((9,), 2, 64, num_threads=2, core_share=CoreShare(str(path), 0, 2, 2, own_threads=1))
    executor = TorchExecutor.load(RECALL, spec, spec.cache_spec(16, spec.dtype), sizes)
    result = executor.execute(StepPlan(StepIndex(0), (), WorkList(32)))
    assert (result.num_threads, torch.get_num_threads()) == (2 if can_share else 1, 1)
    assert ("no core is borrowed" in caplog.text) is not can_share
