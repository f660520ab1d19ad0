"""Norms, rotation and gates by Triton's kernels, run by its interpreter on the CPU, against torch's."""

import pytest
import torch

from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.layers.step_ops import TorchOps
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.layers.triton_ops_checks import (
    HEADS,
    TYPES,
    Types,
    check_edges,
    check_gates,
    check_norms,
    check_rows_stand_alone,
    check_turned,
)

pytestmark = needs_triton


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("dim", [3, 64, 86, 17000])
def test_norms(process: KernelProcess, types: Types, dim: int) -> None:
    run_in(process, check_norms, "cpu", types, dim)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(("head_dim", "turning"), HEADS[1:-2])
def test_heads_normalised_and_turned(process: KernelProcess, types: Types, head_dim: int, turning: int) -> None:
    run_in(process, check_turned, "cpu", types, head_dim, turning)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [7, 1100])
def test_gates(process: KernelProcess, dtype: torch.dtype, dim: int) -> None:
    run_in(process, check_gates, "cpu", dtype, dim)


@pytest.mark.parametrize("types", TYPES)
def test_no_bit_of_a_row_follows_from_others(process: KernelProcess, types: Types) -> None:
    run_in(process, check_rows_stand_alone, "cpu", types)


def test_edges(process: KernelProcess) -> None:
    run_in(process, check_edges, "cpu")


def test_a_device_without_kernels_is_computed_on_by_torch() -> None:
    """Here they are compiled for GPUs, and there is none; a device of another kind has no kernels at all."""
    assert type(make_step_ops(None, torch.float32, torch.device("meta"))) is TorchOps
