"""What a layer computes of its tokens beside attention: the seam, and its plain form in torch.

A token's result depends on that token alone. Statistics are computed in float32, and a norm in the type of its weights,
which is the tokens' own or float32.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.layers.activations import gelu_tanh, silu
from deltaserve.compute.layers.delta_rule import DeltaRuns, DeltaTokens, recurred
from deltaserve.compute.layers.exact_rows import ExactRows
from deltaserve.compute.layers.grouped_experts import GroupedExperts
from deltaserve.compute.layers.rope import rotate
from deltaserve.compute.weights.block_matrix import BlockMatrix, Matrix, Stacked, block_values, rounded_inputs
from deltaserve.model.layers.layer_spec import Activation


class StepOpsUnavailable(Exception):
    """Why operators do not compute here, in words for an operator."""


class HeadNorm(NamedTuple):
    """Each head is normalised alone."""

    weight: Tensor  # [H, D]
    eps: float


class Peaks(NamedTuple):
    """What is told of each row of logits."""

    finite: list[bool]
    """Whether it is free of NaN and Inf."""
    indexes: list[int]
    """The first of its largest values; anything where a row is not finite."""


def unread_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Peaks of [N, V], left on the device: [N] bool, [N] int64"""
    most, indexes = logits.max(-1)
    return torch.isfinite(most) & torch.isfinite(logits.amin(-1)), indexes  # both pass NaN on


class StepOps(Protocol):
    grouped: GroupedExperts | None
    """Experts of a layer all at once; None: the host counts the rows of each, and computes one after the other."""

    def product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in], plain, packed (packing.py) or codes (block_matrix.py) -> [T, out]"""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, N], weight [N] -> [T, N], divided by the root of its mean square, times weight"""
        ...

    def add_norm(
        self, x: Tensor, added: Tensor, after: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x, added [T, N] -> their sum, and the norm of that; `after`: weight of a norm of `added` before"""
        ...

    def turned(self, x: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, H, D], rope [T, 1, R] each (see Rope.tables) -> [T, H, D], normalised, then turned"""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2 I] -> activation(gate) * up, [T, I]"""
        ...

    def recurred(self, tokens: DeltaTokens, states: Tensor, runs: DeltaRuns) -> Tensor:
        """The gated delta rule: [T, Hk, G, V] float32, what tokens of `runs` read, anything for others.

        `states` [B, Hk, G, K, V] float32, which move on
        """
        ...

    def peaks(self, logits: Tensor) -> Peaks:
        """Peaks of `logits` [N, V] float32."""
        ...


class TorchOps:
    """Works everywhere; what other forms are compared with. For one thread at a time."""

    def __init__(self) -> None:
        self._exact = ExactRows()
        self.grouped: GroupedExperts | None = None

    def product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Codes become values each time."""
        if isinstance(weight, Stacked):
            slices = weight.slices()
            return torch.cat([self.product(x, part, None if bias is None else bias[rows]) for part, rows in slices], 1)
        if isinstance(weight, BlockMatrix):
            inputs = rounded_inputs(x) if weight.rounds_inputs else x.float()
            out = self._exact.product(inputs, block_values(weight), None if bias is None else bias.float())
            return out.to(x.dtype)
        return self._exact.product(x, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == weight.dtype:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return functional.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def add_norm(
        self, x: Tensor, added: Tensor, after: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + (added if after is None else self.norm(added, after, eps))
        return total, self.norm(total, weight, eps)

    def turned(self, x: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        if norm is not None:
            wide = functional.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), None, norm.eps)
            x = (wide * norm.weight).to(x.dtype)
        return rotate(x, *rope)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (silu(gate) if activation is Activation.SILU else gelu_tanh(gate)).mul_(up)

    def recurred(self, tokens: DeltaTokens, states: Tensor, runs: DeltaRuns) -> Tensor:
        return recurred(tokens, states, runs)

    def peaks(self, logits: Tensor) -> Peaks:
        finite, indexes = unread_peaks(logits)
        return Peaks(finite.tolist(), indexes.tolist())
