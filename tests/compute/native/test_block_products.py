"""Products with matrices of codes, for each form and each instruction set of this machine, against their values."""

import pytest
import torch
from torch import Tensor

from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.weights.block_matrix import BlockMatrix, Stacked, block_values, round_matrix, rounded_inputs
from deltaserve.compute.weights.packing import pack_values
from deltaserve.model.formats.block_forms import TYPE_FORMS
from tests.compute.native.block_matrices import random_matrix
from tests.compute.native.native_build import compiled_library, native_context, sets_with_own

SHAPES = ((70, 96), (33, 544), (1, 32), (64, 1056))
"""[out, in]: whole panels and not; more than is expanded at once."""


@pytest.fixture(params=sets_with_own("blocks_kernel"))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(native_context(request.param))


def draw(dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: Tensor, matrix: BlockMatrix, bias: Tensor | None) -> Tensor:
    """In float64."""
    inputs = rounded_inputs(x) if matrix.rounds_inputs else x
    out = inputs.double() @ block_values(matrix).double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("kind", TYPE_FORMS)
@torch.inference_mode()
def test_any_number_of_rows_and_columns(ops: NativeOps, kind: str, rounds: bool) -> None:
    for rows, cols in SHAPES:
        matrix, bias = random_matrix(TYPE_FORMS[kind], rows, cols, rounds), draw(torch.float32, rows)
        for num_rows in (0, *range(1, 18), 40, 65, 300):
            wide = draw(torch.float32, num_rows, cols + 5, seed=num_rows)
            x = wide[:, 2 : cols + 2]
            for some_bias in (None, bias):
                got = ops.product(x, matrix, some_bias)
                assert (got.dtype, got.is_contiguous()) == (x.dtype, True)
                atol = 1e-6 * cols**0.5 * 4
                torch.testing.assert_close(got.double(), expected(x, matrix, some_bias), rtol=2e-6, atol=atol)


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@torch.inference_mode()
def test_rows_in_16_bits(ops: NativeOps, rounds: bool) -> None:
    matrix, bias = random_matrix(TYPE_FORMS["Q4_1"], 45, 160, rounds), draw(torch.bfloat16, 45)
    for num_rows in (1, 8, 9, 33):
        x = draw(torch.bfloat16, num_rows, 160)
        got = ops.product(x, matrix, bias)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), expected(x, matrix, bias), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(ops: NativeOps, kind: str, rounds: bool) -> None:
    """700 rows are worked on in several parts, 3,000 columns are several tasks."""
    matrix = random_matrix(TYPE_FORMS[kind], 3000, 544, rounds)
    many = NativeOps(native_context(ops_name(ops), 3))
    x = draw(torch.float32, 700, 544)
    whole = many.product(x, matrix)
    for first, end in ((0, 700), (3, 4), (17, 30), (32, 64), (300, 309)):
        assert torch.equal(ops.product(x[first:end], matrix), whole[first:end])


def ops_name(ops: NativeOps) -> str:
    return ops._context.instruction_set.name


@torch.inference_mode()
def test_rounded_products_are_the_same_on_every_instruction_set() -> None:
    """Sums of a run are whole numbers; those with fused products differ from those without in last bits only."""
    compiled_library()
    matrix, x = random_matrix(TYPE_FORMS["Q8_0"], 96, 256, True), draw(torch.float32, 5, 256)
    names = [one.name for one in compiled_library().instruction_sets if one.name != "generic"]
    results = [NativeOps(native_context(name)).product(x, matrix) for name in names]
    assert all(torch.equal(result, results[0]) for result in results)


@torch.inference_mode()
def test_largest_codes(ops: NativeOps) -> None:
    """Sums of 16 bits must hold them."""
    for kind in ("Q8_0", "Q4_1"):
        form = TYPE_FORMS[kind]
        matrix = random_matrix(form, 32, 64, True)
        full = torch.full_like(matrix.panels, 255)
        start = 32 * 2 * (1 + form.has_offsets)
        full[..., :start] = torch.tensor([0x00, 0x3C], dtype=torch.uint8).repeat(start // 2)  # 1.0
        largest = BlockMatrix(form, matrix.shape, full, True)
        for sign in (1.0, -1.0):
            x = torch.full((5, 64), sign * 127.0)
            torch.testing.assert_close(ops.product(x, largest).double(), expected(x, largest, None), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row(ops: NativeOps, bad: float, rounds: bool) -> None:
    matrix = round_matrix(draw(torch.float32, 40, 96), rounds)
    for num_rows in (8, 20):
        x = draw(torch.float32, num_rows, 96)
        x[3, 7] = bad
        got = ops.product(x, matrix)
        assert not got[3].isfinite().any()
        assert got[torch.arange(num_rows) != 3].isfinite().all()


@torch.inference_mode()
def test_rows_too_small_to_be_rounded(ops: NativeOps) -> None:
    matrix = round_matrix(draw(torch.float32, 40, 96), True)
    x = draw(torch.float32, 4, 96)
    x[1] = 0.0
    x[2] *= 1e-33
    torch.testing.assert_close(ops.product(x, matrix).double(), expected(x, matrix, None), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_matrices_that_are_not_kept_alike(ops: NativeOps) -> None:
    plain = draw(torch.float32, 24, 96)
    parts = (
        random_matrix(TYPE_FORMS["Q4_0"], 40, 96),
        pack_values(plain),
        plain,
        random_matrix(TYPE_FORMS["Q6_K"], 7, 96),
    )
    stacked, x, bias = Stacked(parts), draw(torch.float32, 11, 96), draw(torch.float32, 95)
    assert stacked.shape == (95, 96)
    for some_bias in (None, bias):
        torch.testing.assert_close(ops.product(x, stacked, some_bias), TorchOps().product(x, stacked, some_bias))


@torch.inference_mode()
def test_the_torch_form_multiplies_the_values() -> None:
    for rounds in (False, True):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
            matrix, x, bias = random_matrix(TYPE_FORMS["Q5_1"], 30, 64, rounds), draw(dtype, 5, 64), draw(dtype, 30)
            got = TorchOps().product(x, matrix, bias)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), expected(x, matrix, bias), rtol=tolerance, atol=tolerance)
