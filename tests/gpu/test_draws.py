"""Draws of recorded steps on a CUDA device: what the sampler draws on a CPU."""

import pytest
import torch

from deltaserve.compute.executor.resident_draws import TorchDraws
from tests.compute.attention.triton_process import needs_triton
from tests.compute.executor.test_step_graphs import Drawing, triton_draws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [16, 272, 9000, 151_936])
def test_draws_by_kernels_are_those_of_the_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    Drawing.of(vocab_size, dtype).check(triton_draws(), "cuda")


@pytest.mark.parametrize("vocab_size", [16, 272, 9000])
def test_draws_by_torch_are_those_of_the_sampler(vocab_size: int) -> None:
    Drawing.of(vocab_size).check(TorchDraws, "cuda")
