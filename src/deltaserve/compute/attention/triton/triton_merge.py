"""Merge of partial results of attention by a Triton kernel, for every backend that computes such. Needs triton when it
is imported.
"""

from typing import NamedTuple

import triton
from torch import Tensor

from deltaserve.compute.attention.triton.triton_kernels import merge_results

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
