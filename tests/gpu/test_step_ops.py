"""Norms, rotation and gates on a CUDA device, by Triton's kernels against torch's: the checks of
tests/compute/layers."""

import pytest
import torch

from deltaserve.compute.layers.ops_choice import make_step_ops
from tests.compute.attention.triton_process import needs_triton
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

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_serve(dtype: torch.dtype) -> None:
    """Their self-test passes for every type of models."""
    assert type(make_step_ops(None, dtype, torch.device("cuda"))).__name__ == "TritonOps"


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("dim", [3, 86, 1024, 4096, 17000])
def test_norms(types: Types, dim: int) -> None:
    check_norms("cuda", types, dim)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(("head_dim", "turning"), HEADS)
def test_heads_normalised_and_turned(types: Types, head_dim: int, turning: int) -> None:
    check_turned("cuda", types, head_dim, turning)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [7, 96, 3072])
def test_gates(dtype: torch.dtype, dim: int) -> None:
    check_gates("cuda", dtype, dim)


@pytest.mark.parametrize("types", TYPES)
def test_no_bit_of_a_row_follows_from_others(types: Types) -> None:
    check_rows_stand_alone("cuda", types)


def test_edges() -> None:
    check_edges("cuda")
