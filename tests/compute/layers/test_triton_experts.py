"""A layer's experts all at once by Triton's kernels, interpreted on the CPU, against one after the other; and that they
can be compiled for GPUs, which no test here runs."""

import importlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from deltaserve.compute.layers import ops_choice
from deltaserve.compute.layers.grouped_experts import StackedExperts, experts_one_by_one
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.model.code_plan import CODE_RULES
from tests.cells import cells
from tests.compute.attention.compiled_kernels import compiled_bytes
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, compiling_process, needs_triton, run_in
from tests.compute.layers.expert_checks import (
    SMALL,
    VARIANTS,
    check_choices,
    check_layer,
    check_most_blocks,
    check_places,
    check_recorded,
    check_rows_are_apart,
    check_self_test,
    kernels,
    layer,
)

pytestmark = needs_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer(process: KernelProcess, variant: str, dtype: torch.dtype) -> None:
    """Steps of one token, of a few, and of so many that blocks are tall."""
    run_in(process, check_layer, "cpu", variant, dtype, SMALL, (1, 5, 100))


def test_whatever_is_chosen(process: KernelProcess) -> None:
    run_in(process, check_choices, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_row_follows_from_others(process: KernelProcess, dtype: torch.dtype) -> None:
    run_in(process, check_rows_are_apart, "cpu", dtype)


def test_places(process: KernelProcess) -> None:
    run_in(process, check_places, "cpu")


def test_there_is_room_for_all_blocks(process: KernelProcess) -> None:
    run_in(process, check_most_blocks)


def check_tape(variant: str, dtype: torch.dtype) -> None:
    check_recorded("cpu", StepTape(), variant, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_of_a_recorded_step(process: KernelProcess, variant: str, dtype: torch.dtype) -> None:
    run_in(process, check_tape, variant, dtype)


# ---------------------------------------------------------------- who serves


def test_self_test(process: KernelProcess) -> None:
    run_in(process, check_self_test, "cpu", torch.float32, torch.float16)


class Wrong:
    """Computes experts and forgets the last of each row."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def __call__(self, x: Tensor, chosen: Tensor, gains: Tensor, experts: StackedExperts) -> Tensor:
        if self._ends:
            raise RuntimeError("no such device")
        return experts_one_by_one(x, chosen[:, :-1], gains, experts)


@pytest.mark.parametrize(("ends", "reason"), [(True, "ends with RuntimeError: no such device"), (False, "differs")])
def test_experts_that_fail_are_computed_one_after_the_other(
    caplog: pytest.LogCaptureFixture, ends: bool, reason: str
) -> None:
    """Where no layer has any they are not compared."""
    ops = TorchOps()
    ops.grouped = Wrong(ends)
    with patch.object(ops_choice, "_made_for", lambda *_: ops), caplog.at_level(logging.WARNING):
        assert ops_choice.make_step_ops(None, torch.float32) is ops
        assert ops.grouped is not None
        assert not caplog.records
        assert ops_choice.make_step_ops(None, torch.float32, has_experts=True) is ops
    assert ops.grouped is None
    assert reason in caplog.text


@torch.inference_mode()
def test_packed_matrices_do_not_stay_as_they_lay() -> None:
    plain = layer("softmax", torch.float32, "cpu")
    for pays in (True, False):
        with patch("deltaserve.compute.weights.packing.packing_pays", return_value=pays):
            packed = plain.packed(CODE_RULES["none"])
        assert (packed.stacked is None) == pays
        down = packed.down[0]
        assert isinstance(down, torch.Tensor)
        assert down.is_mkldnn == pays


# ---------------------------------------------------------------- GPUs that are not there


def compiled_experts(capability: int) -> list[int]:
    """Bytes of shared memory of each kernel, as Qwen3-30B-A3B and gpt-oss need them."""
    of: Any = importlib.import_module("deltaserve.compute.layers.triton_expert_kernels")
    language: Any = importlib.import_module("triton.language")
    kinds = {"*bf16": (2, language.bfloat16), "*fp16": (2, language.float16), "*fp32": (4, language.float32)}
    held = {"FIRST": 0, "HELD": 128, "EXPERTS": 128, "K": 8, "H": 2048, "I": 768, "W": 1024, "CHUNK": 1024}
    lists = {"chosen": "*i64", "gains": "*fp32", **dict.fromkeys(("counts", "order", "blocks"), "*i32")}
    found = [compiled_bytes(of.count_pairs, lists, held, capability)]
    for kind, (item_size, compute) in kinds.items():
        types = lists | dict.fromkeys(("x", "weights", "biases", "out", "outs", "total"), kind)
        types |= {"alpha": "fp32", "limit": "fp32"}
        found.append(compiled_bytes(of.sum_chosen, types, held, capability))
        for num_pairs in (8, 8192):
            tile = kernels().block_tile(num_pairs, 128, item_size)
            names = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "COMPUTE": compute}
            found.append(compiled_bytes(of.place_pairs, types, held | names, capability))
            for has_more in (False, True):
                fixed = held | names | {"IS_CLAMPED": has_more, "HAS_BIAS": has_more}
                for kernel in (of.gate_blocks, of.project_blocks):
                    found.append(compiled_bytes(kernel, types, fixed, capability, 4, tile.num_stages))
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[KernelProcess]:
    yield from compiling_process()


@pytest.fixture(params=cells([(80,), (90,), (100,)], lambda capability: capability != 90))
def sizes(compiler: KernelProcess, request: pytest.FixtureRequest) -> list[int]:
    """Compiled outside a test's time limit."""
    return run_in(compiler, compiled_experts, request.param)


def test_kernels_compile_for_gpus(sizes: list[int]) -> None:
    """Ampere, Hopper and Blackwell; and their tiles fit in what a multiprocessor of the smallest (99 KiB) has."""
    assert len(sizes) == 1 + 3 * (1 + 2 * (1 + 4))
    assert 0 < max(sizes) <= 99 << 10
