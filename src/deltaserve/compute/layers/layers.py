"""The small functions every layer is made of."""

from typing import NamedTuple

from torch import Tensor

from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.weights import DenseWeights, Linear
from deltaserve.model.model_spec import Activation, ClampedGlu


class Projected(NamedTuple):
    """What attention makes of a layer's inputs."""

    q: Tensor  # [T, Hq, D]
    planes: tuple[Tensor, ...]  # [T, Hkv, D] each: what is kept
    gate: Tensor | None = None  # [T, Hq, D] of its output

    def part(self, tokens: Tensor) -> "Projected":
        """The projections of `tokens` [N], as far as they are not kept in pages."""
        gate = None if self.gate is None else self.gate.index_select(0, tokens)
        return Projected(self.q.index_select(0, tokens), (), gate)


def linear(x: Tensor, weights: Linear, ops: StepOps) -> Tensor:
    """x [T, in] -> [T, out]"""
    return ops.product(x, weights.weight, weights.bias)


def clamped_gated(gate_up: Tensor, spec: ClampedGlu) -> Tensor:
    """[T, 2 I], gate and up of a channel side by side -> [T, I]"""
    gate = gate_up[..., 0::2].clamp(max=spec.limit)
    up = gate_up[..., 1::2].clamp(-spec.limit, spec.limit)
    return (gate * sigmoid(gate * spec.alpha)).mul_(up.add_(1.0))


def dense_mlp(x: Tensor, weights: DenseWeights, ops: StepOps, activation: Activation = Activation.SILU) -> Tensor:
    """x [T, hidden] -> [T, hidden]"""
    return linear(ops.gated(linear(x, weights.gate_up, ops), activation), weights.down, ops)
