"""GroupedExperts by Triton's kernels: five launches for all experts of a layer. Needs triton when it is imported."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deltaserve.compute.attention.triton_launch import IS_INTERPRETED, KernelLauncher, power_of_two
from deltaserve.compute.layers.grouped_experts import StackedExperts
from deltaserve.compute.layers.triton_expert_kernels import (
    count_pairs,
    gate_blocks,
    place_pairs,
    project_blocks,
    sum_chosen,
)

_CHUNK = 1024
"""Pairs that a program looks at at once: one number, or kernels would be compiled for several."""
_MANY_ROWS = 32
"""Pairs of an expert on average from which its blocks are tall."""
_SUMMED_CHANNELS = 1024
"""Channels that one program adds up."""
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.float32 if IS_INTERPRETED else tl.bfloat16,  # the interpreter multiplies none
    torch.float16: tl.float16,
}
"""Type of the rows |-> type in which they are multiplied."""


class BlockTile(NamedTuple):
    """What a program multiplies at once."""

    rows: int
    columns: int
    depth: int
    num_stages: int

    @property
    def constants(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.depth


def block_tile(num_pairs: int, num_held: int, item_size: int) -> BlockTile:
    """16 rows are the fewest that tensor cores multiply: what a decode step has of an expert, whose matrices are then
    read once. Stages of 18 or 24 KiB lie in shared memory, 72 KiB of them. `item_size`: bytes of a value."""
    depth = 128 // item_size
    return BlockTile(64, 64, depth, 3) if num_pairs >= _MANY_ROWS * num_held else BlockTile(16, 64, depth, 4)


def most_blocks(num_pairs: int, num_held: int, rows: int) -> int:
    """Most blocks that so many pairs, one at least, can be cut into: each expert's last may have one row."""
    num_met = min(num_pairs, num_held)
    return num_met + (num_pairs - num_met) // rows


class TritonExperts:
    """GroupedExperts on one GPU. For one thread at a time.

    Guarantee: with blocks of one height (`block_tile`: it follows from the number of rows) a row has equal bits
    whatever else is in its step.
    """

    def __init__(self) -> None:
        self._count_pairs, self._place_pairs, self._gate_blocks, self._project_blocks, self._sum_chosen = map(
            KernelLauncher, (count_pairs, place_pairs, gate_blocks, project_blocks, sum_chosen)
        )

    def __call__(self, x: Tensor, chosen: Tensor, gains: Tensor, experts: StackedExperts) -> Tensor:
        x, chosen, gains = x.contiguous(), chosen.contiguous(), gains.contiguous()
        (num_tokens, hidden), (num_held, _, inner) = x.shape, experts.down.shape
        num_chosen, num_pairs = chosen.shape[1], chosen.numel()
        total = torch.empty_like(x)
        if not num_pairs:
            return total
        tile, compute = block_tile(num_pairs, num_held, x.itemsize), _TYPES[x.dtype]
        order, blocks = self._placed(chosen, experts, tile.rows)
        gated = x.new_empty(num_pairs, inner)
        up_bias, glu = experts.gate_up_bias, experts.clamped
        kind = num_chosen, hidden, inner, glu is not None, up_bias is not None
        self._gate_blocks(
            (len(blocks), -(-inner // tile.columns)),
            (x, order, blocks, experts.gate_up, x if up_bias is None else up_bias, gated),
            (0.0, 0.0) if glu is None else (glu.alpha, glu.limit),
            (*kind, *tile.constants, compute),
            num_stages=tile.num_stages,
        )
        outs, bias = x.new_empty(num_pairs, hidden), experts.down_bias
        self._project_blocks(
            (len(blocks), -(-hidden // tile.columns)),
            (gated, order, blocks, experts.down, x if bias is None else bias, outs),
            (),
            (hidden, inner, bias is not None, *tile.constants, compute),
            num_stages=tile.num_stages,
        )
        width = min(_SUMMED_CHANNELS, power_of_two(hidden))
        held = experts.first_expert, num_held, num_chosen, hidden, width
        self._sum_chosen((num_tokens, -(-hidden // width)), (outs, chosen, gains, total), (), held)
        return total

    def _placed(self, chosen: Tensor, experts: StackedExperts, rows: int) -> tuple[Tensor, Tensor]:
        """Pairs in the order of their experts [P] int32, and blocks of that order [N, 3] int32."""
        num_pairs, first, num_held = chosen.numel(), experts.first_expert, len(experts.down)
        num_blocks = most_blocks(num_pairs, num_held, rows)
        counts, order, blocks = (
            torch.empty(shape, dtype=torch.int32, device=chosen.device)
            for shape in ((num_held,), (num_pairs,), (num_blocks, 3))
        )
        self._count_pairs((num_held, 1), (chosen, counts), (num_pairs,), (first, _CHUNK))
        constants = first, num_held, power_of_two(num_held), rows, _CHUNK
        self._place_pairs((num_held + 1, 1), (chosen, counts, order, blocks), (num_pairs, num_blocks), constants)
        return order, blocks
