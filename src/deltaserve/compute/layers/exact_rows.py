"""Products by torch of which a row has equal bits whatever rows are multiplied beside it.

oneDNN and MKL choose by the number of rows, and of threads, in which order they add up. So a product is defined by
parts in which a row's bits do not depend on the others: blocks of 16 rows, which are always computed alike, or a kernel
that promises it. All rows at once are multiplied only where that was seen to give the same bits.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.weights.packing import packed_rows, product

BLOCK_ROWS = 16
_HEAD_ROWS = 8
"""Rows of a block where each head has a matrix of its own: all heads together are work enough."""
_TESTED = {torch.float32: 1 << 12}
"""Type |-> results that are compared. In another order of summation every second float32 differs."""
_TESTED_ROUNDED = 1 << 18
"""Tested results where they are rounded to 16 bits: one of some 20,000 shows the order."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] -> [T, out]"""


class _Case(NamedTuple):
    """What the choice of a kernel depends on."""

    dtype: torch.dtype
    shape: torch.Size
    is_packed: bool
    has_bias: bool
    num_rows: int
    num_threads: int


class ExactRows:
    """Remembers how many rows torch may multiply at once. For one thread at a time."""

    def __init__(self) -> None:
        self._agrees: dict[_Case, bool] = {}

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in], plain or packed (packing.py) -> [T, out]"""
        if x.device.type != "cpu":
            return product(x, weight, bias)
        is_seen = weight.dtype == torch.float32  # of 16 bits most show nothing: to look at enough takes too long
        if is_seen and self.may_multiply(len(x), weight, bias, in_blocks):
            return product(x, weight, bias)
        return in_blocks(x, weight, bias)

    def may_multiply(self, num_rows: int, weight: Tensor, bias: Tensor | None, by_parts: Product) -> bool:
        """Whether so many rows at once, by torch on the CPU, have the bits of `by_parts`. The first time for each case
        takes as long as such a product or two."""
        if num_rows == 0 or (num_rows == BLOCK_ROWS and by_parts is in_blocks):
            return True
        rows = packed_rows(num_rows) if weight.is_mkldnn else num_rows
        case = _Case(weight.dtype, weight.shape, weight.is_mkldnn, bias is not None, rows, torch.get_num_threads())
        if case not in self._agrees:
            self._agrees[case] = _agrees(rows, weight, bias, by_parts)
        return self._agrees[case]


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as it is defined where no kernel promises more: rows of zeros fill up the last block."""
    num_rows = len(x)
    if num_rows == 0:
        return product(x, weight, bias)
    filled = functional.pad(x, (0, 0, 0, -num_rows % BLOCK_ROWS))
    blocks = [product(block, weight, bias) for block in torch.split(filled, BLOCK_ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:num_rows]


def product_by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, H, in] times matrices [H, in, out], one of each head -> [T, H, out]"""
    num_rows = len(x)
    if x.device.type != "cpu" or num_rows == 0:
        return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)
    filled = functional.pad(x, (0, 0, 0, 0, 0, -num_rows % _HEAD_ROWS))
    blocks = [
        torch.bmm(block.transpose(0, 1).contiguous(), matrices).transpose(0, 1)
        for block in torch.split(filled, _HEAD_ROWS)
    ]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:num_rows]


def _agrees(num_rows: int, weight: Tensor, bias: Tensor | None, by_parts: Product) -> bool:
    """Whether products by parts have equal bits: of random rows, those at the start, middle and end are compared."""
    starts = sorted({0, max(0, num_rows // 2 - BLOCK_ROWS), max(0, num_rows - BLOCK_ROWS)})
    num_results = min(num_rows, len(starts) * BLOCK_ROWS) * weight.shape[0]
    generator = torch.Generator().manual_seed(num_rows)
    for _ in range(math.ceil(_TESTED.get(weight.dtype, _TESTED_ROUNDED) / num_results)):
        some = torch.randn(min(num_rows, 3 * BLOCK_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
        x = some.repeat(-(-num_rows // len(some)), 1)[:num_rows]
        whole = product(x, weight, bias)
        for start in starts:
            rows = slice(start, start + BLOCK_ROWS)
            if not torch.equal(whole[rows], by_parts(x[rows], weight, bias)):
                return False
    return True
