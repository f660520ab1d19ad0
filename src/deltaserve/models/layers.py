"""The small functions every layer is made of."""

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.models.model_spec import Activation, ClampedGlu
from deltaserve.models.step_ops import StepOps
from deltaserve.models.weights import DenseWeights, Linear


class Projected(NamedTuple):
    """What attention makes of a layer's inputs."""

    q: Tensor  # [T, Hq, D]
    planes: tuple[Tensor, ...]  # [T, Hkv, D] each: what is kept
    gate: Tensor | None = None  # [T, Hq, D] of its output

    def part(self, tokens: Tensor) -> "Projected":
        """Of `tokens` [N], as far as it is not kept."""
        gate = None if self.gate is None else self.gate.index_select(0, tokens)
        return Projected(self.q.index_select(0, tokens), (), gate)


def linear(x: Tensor, weights: Linear) -> Tensor:
    """x [T, in] -> [T, out]"""
    return product(x, weights.weight, weights.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in], plain or packed (see packing.py) -> [T, out]"""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    num_more = packed_rows(num_rows) - num_rows
    if num_more:  # padding by nothing copies
        x = functional.pad(x, (0, 0, 0, num_more))  # [T', in]
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[:num_rows]


def packed_rows(num_rows: int) -> int:
    """Rows of a packed product: few different ones, for oneDNN keeps generated code for each, half a MiB a matrix shape
    (684 MiB after 256 lengths of 5 shapes, 1,024 pieces being the most it keeps). Rows that fill up cost what others
    cost, so they are less than a quarter of what was asked for."""
    if num_rows <= 8:
        return num_rows
    step = min(64, 1 << (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def clamped_gated(gate_up: Tensor, spec: ClampedGlu) -> Tensor:
    """[T, 2 I], gate and up of a channel side by side -> [T, I]"""
    gate = gate_up[..., 0::2].clamp(max=spec.limit)
    up = gate_up[..., 1::2].clamp(-spec.limit, spec.limit)
    return (gate * torch.sigmoid(gate * spec.alpha)).mul_(up.add_(1.0))


def dense_mlp(x: Tensor, weights: DenseWeights, ops: StepOps, activation: Activation = Activation.SILU) -> Tensor:
    """x [T, hidden] -> [T, hidden]"""
    return linear(ops.gated(linear(x, weights.gate_up), activation), weights.down)
