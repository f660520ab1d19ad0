"""Checks of the operators by Triton's kernels, on a device that runs them: a GPU, or the CPU of a process in which they
are interpreted."""

import importlib

import torch
from torch import Tensor

from deltaserve.compute.layers.ops_choice import check_step_ops
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, TorchOps
from deltaserve.model.layers.layer_spec import Activation
from tests.compute.native.test_step_ops import EPS, Draw, assert_last_bits

Types = tuple[torch.dtype, torch.dtype]
"""Type of the rows, type of the weights."""
TYPES: list[Types] = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]
HEADS = ((8, 4), (16, 16), (44, 36), (80, 80), (128, 32), (128, 128), (256, 256))
"""Channels of a head, and how many of them turn."""


def opened(device: str) -> StepOps:
    module = importlib.import_module("deltaserve.compute.layers.triton_ops")
    ops: StepOps = module.open_triton_ops(torch.device(device))
    return ops


class DeviceDraw(Draw):
    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed)
        self._device = device

    def __call__(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        return super().__call__(dtype, *shape, scale=scale).to(self._device)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Equal but for the last bits. The interpreter cuts to bfloat16 where devices round, several times in a row."""
    if got.is_cuda or got.dtype != torch.bfloat16:
        assert_last_bits(got, want)
    else:
        assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
        torch.testing.assert_close(got, want, rtol=2.0**-5, atol=2.0**-5)


@torch.inference_mode()
def check_norms(device: str, types: Types, dim: int) -> None:
    """Rows by a stride, weights of another type, a norm of what is added, and more channels than a program takes."""
    draw, torch_ops, ops = DeviceDraw(dim, device), TorchOps(), opened(device)
    x, added = (draw(types[0], 9, dim, scale=3.0) for _ in range(2))
    weight, after = (draw(types[1], dim) for _ in range(2))
    assert_close(ops.norm(x, weight, EPS), torch_ops.norm(x, weight, EPS))
    wide = draw(types[0], 5, dim + 7)[:, 3:-4]
    assert_close(ops.norm(wide, weight, EPS), torch_ops.norm(wide, weight, EPS))
    for before in (None, after):
        want = torch_ops.add_norm(x, added, before, weight, EPS)
        for got_one, want_one in zip(ops.add_norm(x, added, before, weight, EPS), want, strict=True):
            assert_close(got_one, want_one)


@torch.inference_mode()
def check_turned(device: str, types: Types, head_dim: int, turning: int) -> None:
    """Heads with others before and after, as one product makes them; with and without a norm."""
    draw, torch_ops, ops = DeviceDraw(head_dim, device), TorchOps(), opened(device)
    heads = draw(types[0], 7, 12, head_dim)[:, 2:11]
    angles = draw(torch.float32, 7, 1, turning)
    rope = angles.cos().to(types[0]), angles.sin().to(types[0])
    for norm in (None, HeadNorm(draw(types[1], 9, head_dim), EPS)):
        assert_close(ops.turned(heads, norm, rope), torch_ops.turned(heads, norm, rope))
    apart = draw(types[0], 7, 3, 2 * head_dim)[..., ::2]
    assert_close(ops.turned(apart, None, rope), torch_ops.turned(apart, None, rope))


@torch.inference_mode()
def check_gates(device: str, dtype: torch.dtype, dim: int) -> None:
    """Torch's GELU loses the last bits of small results, so what is compared with is made in float64; large numbers
    too."""
    gate_up, ops = DeviceDraw(dim, device)(dtype, 6, 2 * dim, scale=4.0), opened(device)
    ones = torch.ones(6, dim, dtype=torch.float64, device=device)
    for activation in Activation:
        active = TorchOps().gated(torch.cat((gate_up[:, :dim].double(), ones), 1), activation).to(dtype)
        assert_close(ops.gated(gate_up, activation), active * gate_up[:, dim:])
        gate = torch.tensor([-6e4, -300.0, -90.0, -0.0, 0.0, 88.0, 90.0, 6e4], dtype=dtype, device=device)
        large = torch.cat((gate, torch.ones_like(gate)))[None]
        got, want = ops.gated(large, activation), TorchOps().gated(large, activation)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-30)


def results(ops: StepOps, types: Types, device: str, rows: slice, bad: float = 0.0) -> tuple[Tensor, ...]:
    """Results of some of 40 rows, of which row 5 has one number that is `bad`; each [rows, ...]."""
    draw = DeviceDraw(1, device)
    x, added = (draw(types[0], 40, 256) for _ in range(2))
    x[5, 7] += bad
    weight, head_weight = draw(types[1], 256), draw(types[1], 8, 32)
    rope = draw(types[0], 40, 1, 32)[rows], draw(types[0], 40, 1, 32)[rows]
    x, added = x[rows], added[rows]
    turned = ops.turned(x.view(-1, 8, 32), HeadNorm(head_weight, EPS), rope)
    return *ops.add_norm(x, added, weight, weight, EPS), ops.norm(x, weight, EPS), turned, ops.gated(x, Activation.SILU)


@torch.inference_mode()
def check_rows_stand_alone(device: str, types: Types) -> None:
    """No bit of a row follows from the rows beside it, and what is not finite stays in its own."""
    ops = opened(device)
    whole = results(ops, types, device, slice(0, 40))
    for first, end in ((0, 1), (5, 6), (17, 18), (3, 33), (39, 40)):
        for part, all_rows in zip(results(ops, types, device, slice(first, end)), whole, strict=True):
            assert torch.equal(part, all_rows[first:end])
    for bad in (float("nan"), float("inf")) if device == "cuda" else (float("nan"),):  # numpy warns of inf * 0
        for spoilt, clean in zip(results(ops, types, device, slice(0, 40), bad), whole, strict=True):
            others = [row for row in range(40) if row != 5]
            assert torch.equal(spoilt[others], clean[others])
            assert not spoilt[5].isfinite().all()


@torch.inference_mode()
def check_edges(device: str) -> None:
    """The self-test of the start, no rows at all, and tensors that begin at no multiple of 16 bytes."""
    ops, draw = opened(device), DeviceDraw(3, device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if device == "cuda" else (torch.float32, torch.float16):
        check_step_ops(ops, dtype, torch.device(device))
    weight = draw(torch.bfloat16, 64)
    assert ops.norm(weight.new_empty(0, 64), weight, EPS).shape == (0, 64)
    assert ops.add_norm(weight.new_empty(0, 64), weight.new_empty(0, 64), None, weight, EPS)[0].shape == (0, 64)
    assert ops.gated(weight.new_empty(0, 64), Activation.SILU).shape == (0, 32)
    assert ops.turned(weight.new_empty(0, 2, 32), None, (weight.new_empty(0, 1, 32),) * 2).shape == (0, 2, 32)
    aligned = draw(torch.bfloat16, 5, 64)
    apart = torch.cat((aligned.new_zeros(3), aligned.flatten()))[3:].view(5, 64)
    assert apart.data_ptr() % 16
    for _ in range(2):  # what was compiled first is launched the second time
        for rows in (aligned, apart, aligned):
            assert torch.equal(ops.norm(rows, weight, EPS), ops.norm(aligned, weight, EPS))
            assert torch.equal(ops.gated(rows, Activation.SILU), ops.gated(aligned, Activation.SILU))
