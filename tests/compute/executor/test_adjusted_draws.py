"""Draws for rows with penalties, biases and least lengths, by torch and by the interpreted kernels: the sampler's."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deltaserve.compute.executor.resident_adjustments import IN_PROMPT, AdjustedRow, ResidentAdjustments
from deltaserve.compute.executor.resident_draws import TorchDraws
from deltaserve.compute.executor.row_rules import MOST_BIASES
from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import RowOpen
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from tests.cells import cells
from tests.compute.attention.compiled_kernels import compiled_kernel
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, compiling_process, needs_triton, run_in
from tests.compute.executor.adjusted_draws import (
    adjusted_by_kernel,
    adjusted_by_torch,
    check_bits,
    check_draws,
    check_not_finite,
    check_overflow,
    replayed,
)
from tests.compute.executor.test_step_graphs import triton_draws


@pytest.mark.parametrize("vocab_size", [16, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_the_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    check_draws(TorchDraws, vocab_size, dtype, "cpu", 18)


@needs_triton
def test_draws_are_recorded_and_replayed() -> None:
    """Counts stand where a step was recorded with them, and a recording counts nothing."""
    check_draws(replayed(TorchDraws, StepTape()), 272, torch.bfloat16, "cpu", 18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_sampler(dtype: torch.dtype) -> None:
    check_bits(TorchDraws, adjusted_by_torch, 272, dtype, "cpu")


def test_rows_that_are_not_finite_are_told() -> None:
    check_not_finite(TorchDraws)


def test_logits_that_overflow_are_no_harm() -> None:
    check_overflow(TorchDraws)


def check_kernels(vocab_size: int, num_steps: int) -> None:
    check_draws(triton_draws(), vocab_size, torch.float32, "cpu", num_steps)
    check_bits(triton_draws(), adjusted_by_kernel, vocab_size, torch.float32, "cpu")


@needs_triton
@pytest.mark.parametrize(("vocab_size", "num_steps"), [(16, 9), (9000, 1)])
def test_draws_by_kernels_are_those_of_the_sampler(process: KernelProcess, vocab_size: int, num_steps: int) -> None:
    run_in(process, check_kernels, vocab_size, num_steps)


def check_kernels_not_finite() -> None:
    check_not_finite(triton_draws())
    check_overflow(triton_draws())


@needs_triton
def test_kernels_tell_of_rows_that_are_not_finite(process: KernelProcess) -> None:
    run_in(process, check_kernels_not_finite)


# ---------------------------------------------------------------- counts


def counted(*starts: int) -> list[int]:
    """Counts of a row of 2 prompt tokens and 5 others, which computes these positions, none of them by the device."""
    tokens = pack_u32([1, 2, 3, 3, 2, 4, 3])
    row = Row(RowOpen(RowId(1), SamplingParams(max_tokens=9, seed=0, frequency_penalty=0.5), tokens, 2), 20, 6)
    adjustments = ResidentAdjustments(3, torch.device("cpu"))
    adjustments.tables(6).counts.fill_(7)  # another request's
    for start in starts:
        adjustments.bring_up([AdjustedRow(RowId(1), row, start)])
    found: list[int] = adjustments.tables(6).counts[1].tolist()
    return found


def test_tokens_are_counted_up_to_the_one_that_is_computed() -> None:
    assert counted(1) == [0, IN_PROMPT, 0, 0, 0, 0]
    assert counted(4) == [0, IN_PROMPT, IN_PROMPT, 2, 0, 0]
    assert counted(7) == [0, IN_PROMPT, IN_PROMPT + 1, 3, 1, 0]
    assert counted(3, 4, 4, 7) == counted(7)
    assert counted(7, 4) == counted(4), "it computes a position again"


@pytest.mark.parametrize("end", [2, 4])
def test_tokens_that_are_missing_in_the_prompt_are_the_prompt_s(end: int) -> None:
    """As where the last token of the prompt was to be computed by a step that could not be recorded."""
    assert counted(1, end) == counted(end)


def test_more_biases_than_there_is_room_for_are_the_host_s() -> None:
    """The device counts tokens of such a row nevertheless."""
    biases = tuple((token, 1.0) for token in range(MOST_BIASES + 1))
    params = SamplingParams(max_tokens=9, seed=0, frequency_penalty=0.5, logit_bias=biases)
    row = Row(RowOpen(RowId(1), params, pack_u32([1, 2, 3]), 2), 20, 1000)
    adjustments = ResidentAdjustments(3, torch.device("cpu"))
    adjustments.bring_up([AdjustedRow(RowId(1), row, 3)])
    found = adjustments.of_line(RowId(1), row)
    assert found.seen.nonzero()[:, 0].tolist() == [1, 2, 3]
    assert found.output_counts.nonzero()[:, 0].tolist() == [3]
    assert not adjustments.tables(1000).biases.any()


def test_tokens_that_the_host_does_not_know_are_a_mistake_of_the_plan() -> None:
    for starts in ((8,), (4, 9)):
        with pytest.raises(StateError, match="only 7 tokens are known"):
            counted(*starts)


# ---------------------------------------------------------------- GPUs that are not there


def compiled_code(capability: int) -> list[str]:
    """Instructions of the kernel for logits of each type."""
    of: Any = importlib.import_module("deltaserve.compute.executor.triton_adjustments")
    types = dict.fromkeys(("lines", "rules", "positions", "last_drawn", "biases"), "*i64")
    types |= {"num_stored": "*i32", "counts": "*i32", "adjusted": "*fp32"}
    found = []
    for kind in ("*bf16", "*fp16", "*fp32"):
        compiled = compiled_kernel(
            of.adjust, types | {"logits": kind}, {"CHUNK": 4096}, capability, enable_fp_fusion=False
        )
        found.append(compiled.asm["ptx"])
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[KernelProcess]:
    yield from compiling_process()


@pytest.fixture(params=cells([(80,), (90,), (100,)], lambda capability: capability != 90))
def code(compiler: KernelProcess, request: pytest.FixtureRequest) -> list[str]:
    """Compiled outside a test's time limit."""
    return run_in(compiler, compiled_code, request.param)


@needs_triton
def test_the_kernel_compiles_and_rounds_as_the_sampler_does(code: list[str]) -> None:
    """Products are rounded before they are subtracted, and quotients are IEEE's."""
    for ptx in code:
        assert "div.rn.f32" in ptx
        assert not re.search(r"\bfma\.|div\.full|div\.approx", ptx)
