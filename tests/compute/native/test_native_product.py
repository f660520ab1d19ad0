"""Products in the memory that the CPU's matrix library packed, for each instruction set found here."""

import pytest
import torch
from torch import Tensor

from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.compute.weights.packing import pack, product
from deltaserve.core.rounding import Rounding
from tests.compute.native.native_build import compiled_library, native_context, sets_with_own

SHAPES = ((64, 64), (200, 72), (272, 64), (130, 2), (512, 1536), (96, 1000), (64, 2050))
"""[out, in]: whole panels and not, one and several blocks of the sum."""


@pytest.fixture(params=sets_with_own("product_kernel"))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(native_context(request.param))


def draw(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_products(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = draw(0, dtype, *shape) / shape[1] ** 0.5, draw(1, dtype, shape[0])
    packed = pack(weight)
    for num_rows in (0, 1, 2, 5, 6, 7, 16, 33, 64, 65, 100):
        x = draw(num_rows, dtype, num_rows, shape[1])
        for some_bias in (None, bias):
            got = ops.product(x, packed, some_bias)
            want = x.double() @ weight.double().T + (0.0 if some_bias is None else some_bias.double())
            assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, want.shape, True)
            epsilon = torch.finfo(dtype).eps
            torch.testing.assert_close(
                got.double(), want, rtol=epsilon, atol=(1e-5 if dtype == torch.float32 else 2e-3)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(330, 320), (70, 1056)])
@torch.inference_mode()
def test_products_of_many_rows(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Several blocks of rows, the last of them with rows that fill no tile, and several parts of the depth."""
    weight, bias, x = draw(0, dtype, *shape) / shape[1] ** 0.5, draw(1, dtype, shape[0]), draw(2, dtype, 530, shape[1])
    packed, want = pack(weight), x.double() @ weight.double().T + bias.double()
    for num_rows in (256, 257, 530):
        got = ops.product(x[:num_rows], packed, bias).double()
        torch.testing.assert_close(got, want[:num_rows], rtol=torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1100, 1184])
@pytest.mark.parametrize("isa", sets_with_own("product_kernel"))
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(isa: str, depth: int, dtype: torch.dtype) -> None:
    """A matrix of several tasks, of a depth that whole tiles make up or not."""
    alone, many = NativeOps(native_context(isa)), NativeOps(native_context(isa, 3))
    packed, wide = pack(draw(0, dtype, 330, depth)), draw(1, dtype, 600, depth + 100)
    if not is_native(alone, packed):
        pytest.skip(f"{dtype} is multiplied by torch here")
    x = wide[:, 50 : depth + 50]
    whole = many.product(x, packed)
    for first, end in ((0, 64), (3, 4), (17, 30), (32, 64), (250, 262), (240, 257), (96, 500), (599, 600)):
        assert torch.equal(alone.product(x[first:end], packed), whole[first:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_no_number_of_rows_changes_bits_where_they_follow_from_positions(dtype: torch.dtype) -> None:
    """By the native library, or where torch has to multiply."""
    isa = compiled_library().instruction_sets[-1].name
    ops = NativeOps(native_context(isa, 1, Rounding.OF_POSITION))
    weight, bias, x = draw(0, dtype, 200, 1100), draw(1, dtype, 200), draw(2, dtype, 150, 1100)
    for matrix in (pack(weight), weight):
        whole = ops.product(x, matrix, bias)
        torch.testing.assert_close(
            whole, product(x, weight, bias), rtol=0.02, atol=0.5 if dtype is torch.bfloat16 else 1e-3
        )
        for first, end in ((0, 1), (77, 150), (3, 67), (149, 150)):
            assert torch.equal(ops.product(x[first:end], matrix, bias), whole[first:end])


def is_native(ops: NativeOps, packed: Matrix) -> bool:
    """Where torch computes instead, every other test here holds too."""
    assert isinstance(packed, Tensor)
    ops.product(torch.zeros(1, packed.shape[1], dtype=packed.dtype), packed)
    return any(ops._panels.values())


@torch.inference_mode()
def test_a_plain_matrix_is_multiplied_by_torch(ops: NativeOps) -> None:
    x, weight = draw(0, torch.float32, 3, 8), draw(1, torch.float32, 5, 8)
    assert torch.equal(ops.product(x, weight), product(x, weight))


@torch.inference_mode()
def test_a_matrix_that_tells_nothing_of_its_layout_is_multiplied_by_torch(ops: NativeOps) -> None:
    packed = pack(torch.zeros(64, 64))
    assert torch.equal(ops.product(torch.ones(3, 64), packed), torch.zeros(3, 64))
    assert not is_native(ops, packed)


@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row(ops: NativeOps) -> None:
    x = torch.ones(8, 72)
    x[3, 7] = float("nan")
    got = ops.product(x, pack(draw(0, torch.float32, 200, 72)))
    assert got[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    assert got[3].isnan().all()
