"""A layer's experts all at once on a CUDA device, by Triton's kernels: the checks of tests/compute/layers, at the sizes
of Qwen3-30B-A3B, too."""

import warnings

import pytest
import torch

from deltaserve.compute.executor.step_recorder import GraphRecorder
from deltaserve.compute.layers.ops_choice import make_step_ops
from tests.compute.attention.triton_process import needs_triton
from tests.compute.layers.expert_checks import (
    SMALL,
    VARIANTS,
    LayerSize,
    check_choices,
    check_layer,
    check_places,
    check_recorded,
    check_rows_are_apart,
    layer,
)
from tests.compute.layers.triton_ops_checks import DeviceDraw, opened

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]
LARGE = LayerSize(128, 8, 2048, 768)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_serve(dtype: torch.dtype) -> None:
    """Their self-test passes for every type of models."""
    assert make_step_ops(None, dtype, torch.device("cuda"), has_experts=True).grouped is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer(variant: str, dtype: torch.dtype) -> None:
    check_layer("cuda", variant, dtype, SMALL, (1, 5, 100, 3000))


@pytest.mark.parametrize("variant", ["softmax", "clamped"])
def test_a_large_layer(variant: str) -> None:
    """Decode steps, and prompts, whose blocks are tall from 512 tokens on."""
    check_layer("cuda", variant, torch.bfloat16, LARGE, (1, 8, 64, 511, 512, 2048))


def test_whatever_is_chosen() -> None:
    check_choices("cuda")
    check_places("cuda")


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_follows_from_others(dtype: torch.dtype, size: LayerSize) -> None:
    check_rows_are_apart("cuda", dtype, size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_as_a_graph(variant: str) -> None:
    check_recorded("cuda", GraphRecorder(torch.device("cuda")), variant, torch.bfloat16)


@torch.inference_mode()
def test_a_layer_waits_for_nothing() -> None:
    weights, ops = layer("groups", torch.bfloat16, "cuda"), opened("cuda")
    for count in (4, 200):
        x = DeviceDraw(count, "cuda")(torch.bfloat16, count, SMALL.hidden)
        weights.compute(x, ops)  # compiles
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            weights.compute(x, ops)
        finally:
            torch.cuda.set_sync_debug_mode("default")
