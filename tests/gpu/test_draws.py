"""Draws of recorded steps on a CUDA device: what the sampler draws on a CPU."""

import pytest
import torch

from deltaserve.compute.executor.resident_draws import TorchDraws
from deltaserve.compute.executor.step_recorder import GraphRecorder
from tests.compute.attention.triton_process import needs_triton
from tests.compute.executor.adjusted_draws import (
    adjusted_by_kernel,
    adjusted_by_torch,
    check_bits,
    check_draws,
    check_not_finite,
    check_overflow,
    replayed,
)
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


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [16, 272, 9000, 151_936])
def test_logits_are_adjusted_as_by_the_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    """To the bit, by the kernel and by torch: a product that is not rounded before it is subtracted, or another
    quotient, is told here."""
    check_bits(triton_draws(), adjusted_by_kernel, vocab_size, dtype, "cuda")
    check_bits(TorchDraws, adjusted_by_torch, vocab_size, dtype, "cuda")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [16, 272, 9000, 151_936])
def test_draws_of_adjusted_logits_by_kernels_are_those_of_the_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    check_draws(triton_draws(), vocab_size, dtype, "cuda", 30)


@pytest.mark.parametrize("vocab_size", [16, 9000])
def test_draws_of_adjusted_logits_by_torch_are_those_of_the_sampler(vocab_size: int) -> None:
    check_draws(TorchDraws, vocab_size, torch.float32, "cuda", 30)


@needs_triton
def test_kernels_tell_which_adjusted_rows_are_not_finite() -> None:
    check_not_finite(triton_draws(), "cuda")


@needs_triton
def test_logits_that_overflow_are_no_harm() -> None:
    check_overflow(triton_draws(), "cuda")
    check_overflow(TorchDraws, "cuda")


@needs_triton
def test_adjusted_draws_are_recorded_and_replayed() -> None:
    """Counts stand where a graph was recorded with them, and a recording counts nothing."""
    check_draws(replayed(triton_draws(), GraphRecorder(torch.device("cuda"))), 9000, torch.bfloat16, "cuda", 30)
