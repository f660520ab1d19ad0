"""Products and functions of values by torch: no bit of a row follows from the rows beside it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.layers.activations import gelu_tanh, sigmoid, silu, softplus
from deltaserve.compute.layers.exact_rows import ExactRows, product_by_head
from deltaserve.compute.weights.packing import pack_values

Function = Callable[[Tensor], Tensor]
FUNCTIONS: list[tuple[Function, Function]] = [
    (sigmoid, torch.sigmoid),
    (silu, functional.silu),
    (softplus, functional.softplus),
    (gelu_tanh, partial(functional.gelu, approximate="tanh")),
]
ROWS = ((0, 1), (3, 4), (0, 7), (5, 38), (20, 150))


def draw(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 64), (130, 50), (64, 2050)])
@torch.inference_mode()
def test_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = draw(0, dtype, *shape) / shape[1] ** 0.5, draw(1, dtype, shape[0]), draw(2, dtype, 150, shape[1])
    exact = ExactRows()
    for matrix in (weight, pack_values(weight)):
        for some_bias in (None, bias):
            whole = exact.product(x, matrix, some_bias)
            want = x.double() @ weight.double().T + (0.0 if some_bias is None else some_bias.double())
            torch.testing.assert_close(whole.double(), want, rtol=torch.finfo(dtype).eps, atol=5e-3)
            for first, end in ROWS:
                assert torch.equal(exact.product(x[first:end], matrix, some_bias), whole[first:end])
    assert exact.product(x[:0], weight).shape == (0, shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_products_by_head(dtype: torch.dtype) -> None:
    x, matrices = draw(0, dtype, 150, 5, 48), draw(1, dtype, 5, 48, 20)
    whole = product_by_head(x, matrices)
    torch.testing.assert_close(
        whole.float(), torch.einsum("thi,hio->tho", x.float(), matrices.float()), rtol=0.02, atol=0.2
    )
    for first, end in ROWS:
        assert torch.equal(product_by_head(x[first:end], matrices), whole[first:end])
    assert product_by_head(x[:0], matrices).shape == (0, 5, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "reference"), FUNCTIONS)
@torch.inference_mode()
def test_functions_of_values(function: Function, reference: Function, dtype: torch.dtype) -> None:
    x = torch.cat((draw(0, torch.float32, 2000) * 4, torch.tensor([-1e4, -90.0, 0.0, 19.9, 20.1, 90.0, 1e4]))).to(dtype)
    whole = function(x)
    torch.testing.assert_close(whole.double(), reference(x.double()), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    for first, end in ((0, 1), (7, 8), (3, 40), (1000, 2007)):
        assert torch.equal(function(x[first:end]), whole[first:end])
