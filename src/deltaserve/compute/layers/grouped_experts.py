"""Experts of a layer, all at once: the seam, and what its forms are compared with when a worker starts.

Rows are brought to their experts on the device, in launches whose shapes follow from how many rows there are alone. So
a decode step can be recorded, and no step waits for the device to count.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor


class GateClamp(NamedTuple):
    """Numbers of ClampedGlu (model/layers/moe.py)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Matrices of the experts held, as they lie in memory: contiguous, of one type."""

    gate_up: Tensor  # [E, 2 I, hidden]; the rows of gate, then those of up; clamped: those of a channel side by side
    down: Tensor  # [E, hidden, I]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, hidden]
    first_expert: int = 0
    """Id of the first; of others than these E nothing is held."""
    clamp: GateClamp | None = None
    """Present: the gate is ClampedGlu's; else SwiGLU."""


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
    if experts.clamp is None:
        gate, up = both.chunk(2)
        hidden = functional.silu(gate) * up
    else:
        gate, up = (
            both[0::2].clamp(max=experts.clamp.limit),
            both[1::2].clamp(-experts.clamp.limit, experts.clamp.limit),
        )
        hidden = gate * (gate * experts.clamp.alpha).sigmoid() * (up + 1.0)
    return functional.linear(hidden, experts.down[index].float(), biases[1])
