"""What rules change in logits before a draw, by a kernel of Triton's: one pass over the logits, and over the counts of
rows with penalties. Needs triton when it is imported.

A row's logits are those of `resident_adjustments.adjusted` to the bit: products are rounded before they are subtracted,
and quotients as IEEE says.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.compute.executor.resident_adjustments import IN_PROMPT
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.row_rules import (
    BANNED_LOGIT,
    BIAS_WIDTH,
    LARGEST_LOGIT,
    MOST_BIASES,
    NUM_RULES,
)

_CHUNK = 4096
_NUM_RULES = tl.constexpr(NUM_RULES)
_MOST_BIASES, _BIAS_WIDTH = tl.constexpr(MOST_BIASES), tl.constexpr(BIAS_WIDTH)
_IN_PROMPT, _LARGEST, _BANNED = tl.constexpr(IN_PROMPT), tl.constexpr(LARGEST_LOGIT), tl.constexpr(BANNED_LOGIT)


class TritonAdjusting:
    """Adjustments of steps of so many rows. Its memory is what `rows` lends."""

    def __init__(self, rows: ResidentRows, num_rows: int, num_logits: int) -> None:
        self._rows, self._num_rows, self._num_logits = rows, num_rows, num_logits
        self._tables = rows.adjustments.tables(num_logits)
        self._adjusted = rows.float_logits(num_logits)

    def adjusted(self, logits: Tensor, lines: Tensor) -> Tensor:
        """logits [B, num_logits or more] with a stride of 1, lines [B] -> float32 [B or more, num_logits], valid until
        other logits are adjusted or scaled. The tokens that the rows have computed are counted first."""
        rows = self._rows
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            adjust[self._num_rows, triton.cdiv(self._num_logits, _CHUNK)](
                logits,
                logits.stride(0),
                lines,
                rows.rules,
                rows.positions,
                rows.last_drawn,
                rows.num_stored,
                self._tables.counts,
                self._tables.biases,
                self._adjusted,
                self._num_logits,
                CHUNK=_CHUNK,
                enable_fp_fusion=False,
            )
        return self._adjusted


@triton.jit
def _number(at):
    return tl.load(at).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _limited(x):
    return tl.where(x == -float("inf"), _BANNED, tl.minimum(x, _LARGEST))


@triton.jit
def adjust(
    logits,  # [B, V] by stride
    stride,
    lines,  # [B] int64
    rules,  # [lines, NUM_RULES] int64, see row_rules.py
    positions,  # [lines] int64 of the tokens that were computed
    last_drawn,  # [lines] int64, those tokens
    num_stored,  # [1] int32, rows whose tokens are counted
    counts,  # [lines, V] int32, in and out
    biases,  # [lines, MOST_BIASES, BIAS_WIDTH] int64
    adjusted,  # [B or more, V] float32, out
    num_logits,
    CHUNK: tl.constexpr,
):
    """Grid [B, C]: each changes a chunk of a row's logits, and counts the row's token where it is of the chunk."""
    row, first = tl.program_id(0), tl.program_id(1) * CHUNK
    line = tl.load(lines + row)
    own = rules + line * _NUM_RULES
    position = tl.load(positions + line)
    index = first + tl.arange(0, CHUNK)
    is_held = index < num_logits
    given = tl.load(logits + row.to(tl.int64) * stride + index, mask=is_held, other=0.0).to(tl.float32)
    is_bad = (given != given) | (tl.abs(given) == float("inf"))
    x = tl.where(is_bad, 0.0, given)
    repetition, frequency, presence = _number(own + 8), _number(own + 9), _number(own + 10)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        at = counts + line * num_logits + index
        had = tl.load(at, mask=is_held, other=0)
        is_new = is_held & (index == tl.load(last_drawn + line)) & (row < tl.load(num_stored))
        is_output = position >= tl.load(own + 1)
        had = tl.where(is_new, tl.where(is_output, had + 1, had | _IN_PROMPT), had)
        tl.store(at, had, mask=is_new)
        times = (had & (_IN_PROMPT - 1)).to(tl.float32)
        x = tl.where(had > 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - frequency * times
        x = x - presence * (times > 0).to(tl.float32)
    kept = adjusted + row.to(tl.int64) * num_logits
    tl.store(kept + index, tl.where(is_bad, given, _limited(x)), mask=is_held)
    num_biases = tl.load(own + 4)
    if num_biases > 0:
        tl.debug_barrier()
        place = tl.arange(0, _MOST_BIASES)
        bias = biases + (line * _MOST_BIASES + place) * _BIAS_WIDTH
        token = tl.load(bias, mask=place < num_biases, other=-1)
        is_own = (token >= first) & (token < first + CHUNK) & (token < num_logits)
        before = tl.load(kept + token, mask=is_own, other=0.0)
        is_bad_too = (before != before) | (tl.abs(before) == float("inf"))
        added = tl.load(bias + 1, mask=is_own, other=0).to(tl.float64, bitcast=True).to(tl.float32)
        is_banned = position + 1 < tl.load(bias + 2, mask=is_own, other=0)
        after = tl.where(is_banned, _BANNED, _limited(before + added))
        tl.store(kept + token, tl.where(is_bad_too, before, after), mask=is_own)
