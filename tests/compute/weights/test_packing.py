"""Packed matrices give the products of plain ones."""

import pytest
import torch
import torch.nn.functional as functional

from deltaserve.compute.weights.packing import pack_values, packed_rows, packing_pays, product


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_packed_product(dtype: torch.dtype, num_tokens: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 72, generator=generator).to(dtype) for size in (num_tokens, 200))
    bias = torch.randn(200, generator=generator).to(dtype) if biased else None
    got = product(x, pack_values(weight), bias)
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


def test_lengths_of_packed_products_are_few() -> None:
    """The CPU's matrix library keeps generated code for each."""
    lengths = [packed_rows(num_rows) for num_rows in range(1, 2049)]
    assert all(num_rows <= length for num_rows, length in enumerate(lengths, start=1))
    assert len(set(lengths)) < 64


def test_rows_that_fill_up_are_few() -> None:
    """Each costs as much as a token: 17 decoding rows are not computed as 32."""
    assert all(packed_rows(num_rows) < 1.25 * num_rows for num_rows in range(1, 2049))
    assert packed_rows(32) == 32


@pytest.mark.parametrize("num_rows", [1, 16, 17, 130])
@torch.inference_mode()
def test_rows_that_fill_up_change_nothing(num_rows: int) -> None:
    weight, x = torch.randn(24, 16), torch.randn(num_rows, 16)
    torch.testing.assert_close(product(x, pack_values(weight)), functional.linear(x, weight), atol=1e-4, rtol=1e-4)
