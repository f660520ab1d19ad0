"""Experts of a layer, all at once: the seam, and what its forms are compared with when a worker starts.

Rows are brought to their experts on the device, in launches whose shapes follow from how many rows there are alone. So
a decode step can be recorded, and no step waits for the device to count.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.layers.activations import sigmoid
from deltaserve.model.layers.moe import ClampedGlu


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Matrices of the experts held, as they lie in memory: contiguous, of one type."""

    gate_up: Tensor  # [E, 2 I, hidden]; the rows of gate, then those of up; clamped: those of a channel side by side
    down: Tensor  # [E, hidden, I]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, hidden]
    first_expert: int = 0
    """Id of the first; of others than these E nothing is held."""
    clamped: ClampedGlu | None = None
    """Present: how gate and up are multiplied; else it is SwiGLU."""


class GroupedExperts(Protocol):
    def __call__(self, x: Tensor, chosen: Tensor, gains: Tensor, experts: StackedExperts) -> Tensor:
        """x [T, hidden], ids of experts [T, k] int64, their weights [T, k] float32 -> [T, hidden], the sum over those
        held, added up in float32 in the order of k and rounded once. Waits for nothing."""
        ...


def experts_one_by_one(x: Tensor, chosen: Tensor, gains: Tensor, experts: StackedExperts) -> Tensor:
    """The same in float32 throughout, for a few rows: [T, hidden] float32. Waits for the device at each."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, ids in enumerate(chosen.tolist()):
        for rank, expert in enumerate(ids):
            if 0 <= expert - experts.first_expert < len(experts.down):
                total[token] += gains[token, rank] * _of_expert(x[token], expert - experts.first_expert, experts)
    return total


def _of_expert(x: Tensor, index: int, experts: StackedExperts) -> Tensor:
    """x [hidden] -> [hidden] float32"""
    biases = [None if bias is None else bias[index].float() for bias in (experts.gate_up_bias, experts.down_bias)]
    both = functional.linear(x.float(), experts.gate_up[index].float(), biases[0])
    if experts.clamped is None:
        gate, up = both.chunk(2)
        hidden = functional.silu(gate) * up
    else:
        hidden = clamped_gated(both, experts.clamped)
    return functional.linear(hidden, experts.down[index].float(), biases[1])


def clamped_gated(gate_up: Tensor, glu: ClampedGlu) -> Tensor:
    """[.., 2 I], gate and up of a channel side by side -> [.., I]"""
    gate = gate_up[..., 0::2].clamp(max=glu.limit)
    up = gate_up[..., 1::2].clamp(-glu.limit, glu.limit)
    return (gate * sigmoid(gate * glu.alpha)).mul_(up.add_(1.0))
