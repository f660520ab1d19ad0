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

from deltaserve.compute.collective.collective import Alone, ProcessCollective
from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.nccl import NcclCollective
from deltaserve.compute.collective.rank_mesh import SLOT_BYTES, RankMesh
from deltaserve.core.layout.shard import Shard
from tests.compute.collective.collective_rank import DTYPES, part_of, try_all
from tests.compute.thread_ranks import ThreadCollective
from tests.patience import PATIENCE_S


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
    results = on_threads(size, PATIENCE_S, try_all)
    check_all([result for result in results if isinstance(result, dict)])


def test_threads_hear_of_one_that_leaves() -> None:
    def work(collective: ThreadCollective) -> None:
        if collective.shard.rank == 1:
            collective.leave()
        else:
            collective.all_reduce(torch.ones(2))

    results = on_threads(3, PATIENCE_S, work)
    assert [type(result) for result in results] == [CollectiveError, type(None), CollectiveError]


def test_a_thread_does_not_wait_for_ever() -> None:
    collective, _ = ThreadCollective.group(2, 0.1)
    with pytest.raises(CollectiveError, match=r"did not come within 0\.1 s"):
        collective.all_reduce(torch.ones(2))


def test_processes_get_the_same_and_hear_of_one_that_dies(tmp_path: Path) -> None:
    """Long before the time limit: its connections end."""
    size = 3
    command = [sys.executable, "-m", "tests.compute.collective.collective_rank"]
    words = [[str(word) for word in (rank, size, tmp_path, PATIENCE_S)] for rank in range(size)]
    processes = [subprocess.Popen([*command, *of_rank], stdout=subprocess.PIPE, text=True) for of_rank in words]
    outputs = [process.stdout for process in processes if process.stdout is not None]
    assert [output.readline() for output in outputs] == ["saved\n"] * size
    check_all([load_file(tmp_path / f"{rank}.safetensors") for rank in range(size)])
    os.kill(processes[1].pid, signal.SIGKILL)
    last_words = [process.communicate()[0] for process in processes]
    assert last_words[1] == ""
    assert all(last_words[rank].startswith("CollectiveError: ranks: ") for rank in (0, 2))


def meet(size: int, folder: Path) -> list[RankMesh]:
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(lambda rank: RankMesh.join(Shard(rank, size), folder / "meet", PATIENCE_S), range(size))
        )


def test_more_than_fits_one_exchange_goes_in_pieces(tmp_path: Path) -> None:
    """Two turns of memory take turns: nobody overwrites what another still reads."""
    size, num_lines = 3, 5
    parts = [torch.randn(num_lines, SLOT_BYTES // 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def work(mesh: RankMesh) -> tuple[Tensor, Tensor]:
        collective = ProcessCollective(mesh)
        return collective.all_reduce(parts[mesh.shard.rank].clone()), collective.all_gather(parts[mesh.shard.rank])

    with ThreadPoolExecutor(size) as threads:
        for summed, gathered in threads.map(work, meet(size, tmp_path)):
            assert torch.equal(summed, parts[0] + parts[1] + parts[2])
            assert torch.equal(gathered, torch.cat(parts, -1))


def test_nothing_is_exchanged_of_nothing(tmp_path: Path) -> None:
    first, _ = (ProcessCollective(mesh) for mesh in meet(2, tmp_path))
    assert first.all_reduce(torch.empty(0, 4)).shape == (0, 4)
    assert first.all_gather(torch.empty(0, 4)).shape == (0, 8)


def test_a_process_does_not_wait_for_ever(tmp_path: Path) -> None:
    """For a rank that is there and takes no part, as a stopped one."""
    first, second = meet(2, tmp_path)
    first.limit(0.2)  # less than PATIENCE_S, and a busy machine might not have joined
    with pytest.raises(CollectiveError, match="did not come in time"):
        ProcessCollective(first).all_reduce(torch.ones(2))
    assert second.shard == Shard(1, 2)


def test_processes_that_compute_something_else_are_found(tmp_path: Path) -> None:
    first, second = (ProcessCollective(mesh) for mesh in meet(2, tmp_path))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.all_reduce, torch.ones(3))
        with pytest.raises(CollectiveError, match="do not compute the same"):
            first.all_reduce(torch.ones(2))
        with pytest.raises(CollectiveError):
            other.result()


def test_a_process_whose_other_rank_never_comes(tmp_path: Path) -> None:
    for rank in range(2):
        with pytest.raises(CollectiveError, match=r"not all of them met within 0\.5 s"):
            RankMesh.join(Shard(rank, 2), tmp_path / f"meet of {rank}", 0.5)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL: tests/gpu")
def test_without_nccl_ranks_on_gpus_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="no NCCL"):
        NcclCollective.join(Shard(0, 2), torch.device("cuda", 0), tmp_path / "meet", 0.5)
