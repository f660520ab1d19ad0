"""Merge of partial results of attention by a Triton kernel, for every backend that computes such. Needs triton when it
is imported.

A row's parts are added up in groups of so many at once, from its first on: the order follows from how many parts the
row has. One part has the same bits in a group of its own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deltaserve.compute.attention.triton_launch import KernelLauncher, power_of_two

_MERGED_VALUES = 4096
"""Values that a program adds up at once: parts times channels."""
_MOST_PARTS = 32


class PartialResults(NamedTuple):
    """R of them, and whose they are, in int32."""

    outs: Tensor  # [R, Hq, Dv] float32, bfloat16 or float16
    sums: Tensor  # [R, Hq] float32: log2 of the sum of exp2(score * log2(e))
    part_starts: Tensor  # [T + 1] a token's partial results, root to leaf
    order: Tensor | None = None  # [R] where each of them stands in `outs` and `sums`; None: as it is numbered
    is_single: bool = False
    """Whether no token has more than one."""


class PartialMerge:
    """The merge, for one thread at a time."""

    def __init__(self) -> None:
        self._merge_results = KernelLauncher(merge_results)

    def __call__(self, partial: PartialResults, sinks: Tensor | None, out: Tensor) -> None:
        """Into `out` [T, Hq, Dv], contiguous, of any float type, T at least 1. `sinks` [Hq]: see
        StepAttention.attend."""
        num_tokens, num_heads, value_dim = out.shape
        width = power_of_two(value_dim)
        parts = 1 if partial.is_single else min(_MOST_PARTS, max(1, _MERGED_VALUES // width))
        tensors = (
            partial.outs,
            partial.sums,
            partial.part_starts,
            partial.part_starts if partial.order is None else partial.order,
            partial.sums if sinks is None else sinks.float().contiguous(),
            out,
        )
        constants = num_heads, value_dim, width, parts, partial.order is not None, sinks is not None
        self._merge_results((num_tokens, num_heads), tensors, (), constants, 1 if parts == 1 else 4)


@triton.jit
def merge_results(
    outs,  # [R, Hq, DV]
    sums,  # [R, Hq] float32
    part_starts,  # [T + 1] int32: a token's partial results, root to leaf
    order,  # [R] int32: the row of `outs` and `sums` that a partial result is; anything unless HAS_ORDER
    sinks,  # [Hq] float32: score of a key without a value; anything unless HAS_SINKS
    out,  # [T, Hq, DV]
    NUM_HEADS: tl.constexpr,
    DV: tl.constexpr,
    V: tl.constexpr,  # DV or more, a power of two
    PARTS: tl.constexpr,  # at once
    HAS_ORDER: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid [T, Hq]."""
    token, head = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, V)
    is_value = v < DV
    if HAS_SINKS:
        top = tl.load(sinks + head) * 1.4426950408889634
        total = 1.0
    else:
        top = -float("inf")
        total = 0.0
    acc = tl.zeros([V], tl.float32)
    end = tl.load(part_starts + token + 1)
    for start in range(tl.load(part_starts + token), end, PARTS):
        part = start + tl.arange(0, PARTS)
        is_part = part < end
        row = tl.load(order + part, mask=is_part, other=0) if HAS_ORDER else part
        place = row.to(tl.int64) * NUM_HEADS + head
        part_sums = tl.load(sums + place, mask=is_part, other=-float("inf"))
        is_read = is_part[:, None] & is_value[None, :]
        values = tl.load(outs + place[:, None] * DV + v[None, :], mask=is_read, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, tl.max(part_sums, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink, weights = tl.exp2(top - base), tl.exp2(part_sums - base)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    divisor = tl.where(total == 0, 1.0, total)
    place = token.to(tl.int64) * NUM_HEADS + head
    tl.store(out + place * DV + v, (acc / divisor).to(out.dtype.element_ty), mask=is_value)
