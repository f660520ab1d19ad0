"""Collectives: what comes out, equal bits on all ranks, an error within the time limit when a rank does not come."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.layout.shard import Shard
from deltaserve.models.collective import Alone, Collective, CollectiveError, GlooCollective, ThreadCollective

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT_S = 60.0


def part_of(rank: int, dtype: torch.dtype) -> Tensor:
    """What a rank has; numbers whose sums are not exact."""
    return torch.randn(5, 48, generator=torch.Generator().manual_seed(rank)).to(dtype)


def try_all(collective: Collective) -> dict[str, Tensor]:
    """Sums and gathers, in each type, of parts that are and are not contiguous; in the mode that models run in."""
    rank = collective.shard.rank
    with torch.inference_mode():
        results = {}
        for dtype in DTYPES:
            part = part_of(rank, dtype)
            results[f"sum {dtype}"] = collective.all_reduce(part.clone())
            results[f"gather {dtype}"] = collective.all_gather(part)
            results[f"gather lines {dtype}"] = collective.all_gather(part.t())
    return results


def check_all(by_rank: list[dict[str, Tensor]]) -> None:
    size = len(by_rank)
    for name, got in by_rank[0].items():
        assert all(torch.equal(results[name], got) for results in by_rank), name
    for dtype in DTYPES:
        parts = [part_of(rank, dtype) for rank in range(size)]
        exact = torch.stack(parts).double().sum(0)
        torch.testing.assert_close(by_rank[0][f"sum {dtype}"].double(), exact, rtol=2**-6, atol=2**-5)
        assert torch.equal(by_rank[0][f"gather {dtype}"], torch.cat(parts, -1))
        assert torch.equal(by_rank[0][f"gather lines {dtype}"], torch.cat([part.t() for part in parts], -1))


def on_threads(size: int, timeout_s: float, work: Callable[[ThreadCollective], object]) -> list[object]:
    """What each rank returned, or the error it raised."""

    def guarded(collective: ThreadCollective) -> object:
        try:
            return work(collective)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(guarded, ThreadCollective.group(size, timeout_s)))


def test_alone() -> None:
    x = torch.ones(3)
    assert Alone().shard == Shard(0, 1)
    assert Alone().all_reduce(x) is x
    assert Alone().all_gather(x) is x


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads(size: int) -> None:
    results = on_threads(size, LIMIT_S, try_all)
    check_all([result for result in results if isinstance(result, dict)])


def test_threads_hear_of_one_that_leaves() -> None:
    def work(collective: ThreadCollective) -> None:
        if collective.shard.rank == 1:
            collective.leave()
        else:
            collective.all_reduce(torch.ones(2))

    results = on_threads(3, LIMIT_S, work)
    assert [type(result) for result in results] == [CollectiveError, type(None), CollectiveError]


def test_a_thread_does_not_wait_for_ever() -> None:
    collective, _ = ThreadCollective.group(2, 0.1)
    with pytest.raises(CollectiveError, match=r"did not come within 0\.1 s"):
        collective.all_reduce(torch.ones(2))


def start(rank: int, size: int, folder: Path, action: str, timeout_s: float) -> "subprocess.Popen[str]":
    """A rank in a process of its own; what it says comes on its standard output."""
    words = [str(word) for word in (rank, size, folder, action, timeout_s)]
    command = [sys.executable, "-m", "tests.models.gloo_rank", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def outcome(process: "subprocess.Popen[str]") -> str:
    """Its last words."""
    out, _ = process.communicate(timeout=LIMIT_S)
    return out.strip().split("\n")[-1]


@pytest.mark.parametrize("size", [2, 4])
def test_processes(tmp_path: Path, size: int) -> None:
    processes = [start(rank, size, tmp_path, "all", LIMIT_S) for rank in range(size)]
    assert [outcome(process) for process in processes] == ["done"] * size
    check_all([load_file(tmp_path / f"{rank}.safetensors") for rank in range(size)])


def test_processes_hear_of_one_that_dies(tmp_path: Path) -> None:
    """Long before the time limit: its connections end."""
    survivor, victim = (start(rank, 2, tmp_path, "forever", 10 * LIMIT_S) for rank in range(2))
    for process in (survivor, victim):
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
    os.kill(victim.pid, signal.SIGKILL)
    assert outcome(survivor).startswith("CollectiveError: ranks: ")
    victim.communicate()


def test_processes_do_not_wait_for_ever(tmp_path: Path) -> None:
    """A rank that is there and computes nothing, as a stopped one."""
    waiting, silent = start(0, 2, tmp_path, "forever", 2.0), start(1, 2, tmp_path, "silent", 2.0)
    assert outcome(waiting).startswith("CollectiveError: ranks: ")
    outcome(silent)


def test_a_process_whose_other_rank_never_comes(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError):
        GlooCollective.join(Shard(0, 2), tmp_path / "meet", 0.5)
