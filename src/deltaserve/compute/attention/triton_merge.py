"""Merge of partial results of attention by a Triton kernel, for every backend that computes such. Needs triton when it
is imported.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in numpy, on tensors of the CPU: see triton_kernels.py."""
_MERGED_VALUES = 2048
"""Values that one program of the merge writes."""


class PartialResults(NamedTuple):
    """R of them, and whose they are, in int32."""

    outs: Tensor  # [R, Hq, Dv] float32, bfloat16 or float16
    sums: Tensor  # [R, Hq] float32: log2 of the sum of exp2(score * log2(e))
    part_starts: Tensor  # [T + 1] a token's partial results, root to leaf
    order: Tensor | None = None  # [R] where each of them stands in `outs` and `sums`; None: as it is numbered


def merge_partial_results(partial: PartialResults, sinks: Tensor | None, out: Tensor) -> None:
    """Into `out` [T, Hq, Dv], contiguous, of any float type, T at least 1. `sinks` [Hq]: see StepAttention.attend."""
    num_tokens, num_heads, value_dim = out.shape
    width = triton.next_power_of_2(value_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, _MERGED_VALUES // width))
    merge_results[num_tokens, -(-num_heads // heads)](
        partial.outs,
        partial.sums,
        partial.part_starts,
        partial.part_starts if partial.order is None else partial.order,
        partial.sums if sinks is None else sinks.float().contiguous(),
        out,
        NUM_HEADS=num_heads,
        DV=value_dim,
        V=width,
        HEADS=heads,
        HAS_ORDER=partial.order is not None,
        HAS_SINKS=sinks is not None,
    )


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
    HEADS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid [T, ceil(Hq / HEADS)]."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    v = tl.arange(0, V)
    is_head = head < NUM_HEADS
    is_value = is_head[:, None] & (v < DV)[None, :]
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
        total = tl.full([HEADS], 1.0, tl.float32)
    else:
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, V], tl.float32)
    for part in range(tl.load(part_starts + token), tl.load(part_starts + token + 1)):
        row = tl.load(order + part) if HAS_ORDER else part
        place = (row * NUM_HEADS + head).to(tl.int64)
        part_sum = tl.load(sums + place, mask=is_head, other=0.0)
        values = tl.load(outs + place[:, None] * DV + v[None, :], mask=is_value, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, part_sum)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(part_sum - base)
        acc = acc * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        top = new_top
    divisor = tl.where(total == 0, 1.0, total)
    place = token.to(tl.int64) * NUM_HEADS + head
    tl.store(out + place[:, None] * DV + v[None, :], acc / divisor[:, None], mask=is_value)
