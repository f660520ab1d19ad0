"""Packed matrices give the products of plain ones."""

import pytest
import torch
import torch.nn.functional as functional

from deltaserve.models.layers import product
from deltaserve.models.packing import pack, packing_pays


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_packed_product(dtype: torch.dtype, num_tokens: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 72, generator=generator).to(dtype) for size in (num_tokens, 200))
    bias = torch.randn(200, generator=generator).to(dtype) if biased else None
    got = product(x, pack(weight), bias)
    assert (got.shape, got.dtype) == ((num_tokens, 200), dtype)
    torch.testing.assert_close(got, functional.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("capability", "packed"),
    [
        ("AVX512", {torch.bfloat16, torch.float32}),
        ("AVX2", {torch.float32}),
        ("DEFAULT", set()),
    ],
)
def test_what_is_packed(capability: str, packed: set[torch.dtype]) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    assert {dtype for dtype in dtypes if packing_pays(dtype, capability)} == packed
