"""Norms, rotation and gates of the native library against torch, for each instruction set of this machine."""

import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention_choice import open_native
from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.layers.ops_choice import check_step_ops, make_step_ops
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, StepOpsUnavailable, TorchOps
from deltaserve.core.errors import ConfigError
from deltaserve.model.layers.layer_spec import Activation
from tests.compute.native.native_build import compiled_library, native_context, sets_with_own

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Type of the rows, type of the weights."""
EPS = 1e-6
CPU = torch.device("cpu")


@pytest.fixture(params=sets_with_own("step_ops_kernel"))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(native_context(request.param))


class Draw:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype)


def assert_last_bits(got: Tensor, want: Tensor) -> None:
    """Equal but for the last bits, also those of numbers of size 16 of which one was subtracted from another."""
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    epsilon = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * epsilon, atol=16 * epsilon)
    if want.dtype == torch.bfloat16:  # statistics are of float32: few results are near where they round elsewhere
        assert ((got != want) & (want.abs() > 2.0**-10)).float().mean() < 0.01


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("dim", [1, 3, 16, 31, 64, 86, 512, 1000])
@torch.inference_mode()
def test_norms(ops: NativeOps, types: tuple[torch.dtype, torch.dtype], dim: int) -> None:
    draw, torch_ops = Draw(dim), TorchOps()
    x, added = (draw(types[0], 9, dim, scale=3.0) for _ in range(2))
    weight, after = (draw(types[1], dim) for _ in range(2))
    assert_last_bits(ops.norm(x, weight, EPS), torch_ops.norm(x, weight, EPS))
    wide = draw(types[0], 5, dim + 7)
    assert_last_bits(ops.norm(wide[:, 3:-4], weight, EPS), torch_ops.norm(wide[:, 3:-4], weight, EPS))
    for before in (None, after):
        want = torch_ops.add_norm(x, added, before, weight, EPS)
        for got_one, want_one in zip(ops.add_norm(x, added, before, weight, EPS), want, strict=True):
            assert_last_bits(got_one, want_one)
    columns = added.t().contiguous().t()
    assert torch.equal(ops.add_norm(x, columns, None, weight, EPS)[1], ops.add_norm(x, added, None, weight, EPS)[1])


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    ("head_dim", "turning"), [(2, 2), (8, 4), (16, 16), (44, 36), (64, 64), (80, 80), (128, 32), (256, 256)]
)
@torch.inference_mode()
def test_heads_normalised_and_turned(
    ops: NativeOps, types: tuple[torch.dtype, torch.dtype], head_dim: int, turning: int
) -> None:
    draw, torch_ops = Draw(head_dim), TorchOps()
    rows = draw(types[0], 7, 6, head_dim)
    angles = draw(torch.float32, 7, 1, turning)
    rope = angles.cos().to(types[0]), angles.sin().to(types[0])
    norm = HeadNorm(draw(types[1], 3, head_dim), EPS)
    heads = rows[:, 2:5]  # with others before and after, as one product makes them
    for of_norm in (None, norm):
        assert_last_bits(ops.turned(heads, of_norm, rope), torch_ops.turned(heads, of_norm, rope))
    apart = draw(types[0], 7, 3, 2 * head_dim)[..., ::2]
    assert_last_bits(ops.turned(apart, None, rope), torch_ops.turned(apart, None, rope))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 7, 32, 96, 515])
@torch.inference_mode()
def test_gates(ops: NativeOps, dtype: torch.dtype, dim: int, activation: Activation) -> None:
    """Torch's GELU loses the last bits of small results, so what is compared with is made in float64."""
    gate_up = Draw(dim)(dtype, 6, 2 * dim, scale=4.0)
    active = TorchOps().gated(torch.cat((gate_up[:, :dim].double(), torch.ones(6, dim)), 1), activation).to(dtype)
    assert_last_bits(ops.gated(gate_up, activation), active * gate_up[:, dim:])
    if activation is Activation.SILU:
        assert_last_bits(ops.gated(gate_up, activation), TorchOps().gated(gate_up, activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_gates_of_large_numbers(ops: NativeOps, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -300.0, -90.0, -88.0, -0.0, 0.0, 88.0, 90.0, 300.0, 1e30], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    for activation in Activation:
        got, want = ops.gated(gate_up, activation), TorchOps().gated(gate_up, activation)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row(ops: NativeOps, dtype: torch.dtype, bad: float) -> None:
    x, rope = torch.ones(3, 32, dtype=dtype), (torch.ones(3, 1, 16, dtype=dtype),) * 2
    x[1, 5] = bad
    weight = torch.ones(32, dtype=dtype)
    results = (
        *ops.add_norm(x, torch.ones_like(x), weight, weight, EPS),
        ops.norm(x, weight, EPS),
        ops.turned(x.view(3, 2, 16), HeadNorm(weight.view(2, 16), EPS), rope),
        ops.gated(x, Activation.SILU),
    )
    for result in results:
        rows = result.view(3, -1)
        assert rows[[0, 2]].isfinite().all()
        assert not rows[1].isfinite().all()


@pytest.mark.parametrize("types", TYPES)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(types: tuple[torch.dtype, torch.dtype]) -> None:
    """2,400 rows are several tasks."""
    isa = compiled_library().instruction_sets[-1].name
    alone, many = NativeOps(native_context(isa)), NativeOps(native_context(isa, 3))
    draw = Draw(1)
    x, added = (draw(types[0], 2400, 256) for _ in range(2))
    weight, head_weight = draw(types[1], 256), draw(types[1], 8, 32)
    rope = draw(types[0], 2400, 1, 32), draw(types[0], 2400, 1, 32)

    def results(of: StepOps, first: int, end: int) -> tuple[Tensor, ...]:
        rows, turns = x[first:end], (rope[0][first:end], rope[1][first:end])
        turned = of.turned(rows.view(-1, 8, 32), HeadNorm(head_weight, EPS), turns)
        return *of.add_norm(rows, added[first:end], weight, weight, EPS), turned, of.gated(rows, Activation.SILU)

    whole = results(many, 0, 2400)
    for first, end in ((0, 2400), (17, 18), (300, 333)):
        for part, all_rows in zip(results(alone, first, end), whole, strict=True):
            assert torch.equal(part, all_rows[first:end])


@pytest.mark.parametrize("vocab", [1, 3, 15, 16, 17, 64, 200, 1003])
@torch.inference_mode()
def test_peaks(ops: NativeOps, vocab: int) -> None:
    """Equal values among them: the first counts."""
    logits = Draw(vocab)(torch.float32, 40, vocab + 2)[:, 1:-1].round(decimals=1)
    logits[3] = -7.0
    logits[4, vocab // 2] = 1e38
    got, want = ops.peaks(logits), TorchOps().peaks(logits)
    assert (got.finite, got.indexes) == (want.finite, want.indexes)
    assert want.indexes == logits.argmax(-1).tolist()
    for row, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        for place in {0, vocab // 2, vocab - 1}:
            spoilt = logits.clone()
            spoilt[row, place] = bad
            for found in (ops.peaks(spoilt), TorchOps().peaks(spoilt)):
                assert [index for index, is_finite in enumerate(found.finite) if not is_finite] == [row]


def test_no_rows(ops: NativeOps) -> None:
    weight = torch.ones(8)
    assert ops.norm(torch.empty(0, 8), weight, EPS).shape == (0, 8)
    assert ops.gated(torch.empty(0, 8), Activation.SILU).shape == (0, 4)


def test_which_ops_serve() -> None:
    compiled_library()
    native = open_native("auto", CPU, 1)
    assert isinstance(make_step_ops(native, torch.bfloat16), NativeOps)
    assert isinstance(make_step_ops(native, torch.float32), NativeOps)
    assert isinstance(make_step_ops(native, torch.float16), TorchOps)
    assert isinstance(make_step_ops(None, torch.float32), TorchOps)


def test_native_is_not_opened_where_it_cannot_compute() -> None:
    assert open_native("torch", CPU, 1) is None
    assert open_native("auto", torch.device("meta"), 1) is None
    with pytest.raises(ConfigError, match="native: it computes on the CPU, and the pages are on meta"):
        open_native("native", torch.device("meta"), 1)


class Wrong(TorchOps):
    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return super().gated(gate_up, activation) * 1.02


def test_the_self_test_finds_what_is_wrong() -> None:
    check_step_ops(TorchOps(), torch.bfloat16)
    with pytest.raises(StepOpsUnavailable, match="self-test"):
        check_step_ops(Wrong(), torch.float32)
