"""Collectives: what comes out, equal bits on all ranks, an error within the time limit when a rank does not come."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.layout.shard import Shard
from deltaserve.models.collective import Alone, CollectiveError, GlooCollective, ThreadCollective
from tests.models.gloo_rank import DTYPES, part_of, try_all

join = GlooCollective.join
LIMIT_S = 600.0
"""Nothing here takes long; a busy machine does."""


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


def test_processes_get_the_same_and_hear_of_one_that_dies(tmp_path: Path) -> None:
    """Long before the time limit: its connections end."""
    size = 3
    command = [sys.executable, "-m", "tests.models.gloo_rank"]
    words = [[str(word) for word in (rank, size, tmp_path, LIMIT_S)] for rank in range(size)]
    processes = [subprocess.Popen([*command, *of_rank], stdout=subprocess.PIPE, text=True) for of_rank in words]
    outputs = [process.stdout for process in processes if process.stdout is not None]
    assert [output.readline() for output in outputs] == ["saved\n"] * size
    check_all([load_file(tmp_path / f"{rank}.safetensors") for rank in range(size)])
    os.kill(processes[1].pid, signal.SIGKILL)
    last_words = [process.communicate()[0] for process in processes]
    assert last_words[1] == ""
    assert all(last_words[rank].startswith("CollectiveError: ranks: ") for rank in (0, 2))


def test_a_process_does_not_wait_for_ever(tmp_path: Path) -> None:
    """For a rank that is there and takes no part, as a stopped one."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: join(Shard(rank, 2), tmp_path / "meet", LIMIT_S), range(2))
    first._group.set_timeout(timedelta(seconds=0.2))  # less than that, and a busy machine might not have joined
    with pytest.raises(CollectiveError, match="Timed out"):
        first.all_reduce(torch.ones(2))
    assert second.shard == Shard(1, 2)


def test_a_process_whose_other_rank_never_comes(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError):
        join(Shard(0, 2), tmp_path / "meet", 0.5)
