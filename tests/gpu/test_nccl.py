"""Ranks on GPUs of their own, which add up over NCCL. No machine has run these yet but where it had the GPUs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltaserve.compute.collective.nccl import NcclCollective
from deltaserve.core.layout.shard import Shard
from tests.e2e.server import serving
from tests.e2e.test_tensor_parallel import Launch, check_answers

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")


@pytest.mark.skipif(not NUM_GPUS, reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=needs_two)])
def test_ranks_get_the_same(tmp_path: Path, size: int) -> None:
    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = torch.device("cuda", rank)
        collective = NcclCollective.join(Shard(rank, size), device, tmp_path / "meet", 60.0)
        part = torch.full((2, 3), rank + 1.0, device=device)
        return collective.all_gather(part).cpu(), collective.all_reduce(part).cpu()

    with ThreadPoolExecutor(size) as threads:
        for gathered, summed in threads.map(work, range(size)):
            assert gathered.tolist() == [[rank + 1.0 for rank in range(size) for _ in range(3)]] * 2
            assert summed.tolist() == [[sum(rank + 1.0 for rank in range(size))] * 3] * 2


@needs_two
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_answers_are_those_of_transformers(tiny_models: Path, tmp_path: Path, prefill: int, decode: int) -> None:
    model, launch = tiny_models / "llama", Launch("llama", prefill, decode, True, "direct", (16, 16))
    with serving(tmp_path, model, "--device", "cuda", *launch.flags) as server:
        check_answers(server, model, launch)
