"""What rules of decoding rows change in their logits before a draw, by what stands on the device: penalties, biases,
stop tokens that come too early.

Penalties need how often a row had which token. A recorded step counts the token that it computes before it draws
behind it, so the host tells the device of a row's tokens only when it joins, and of those that it drew itself since.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.executor.penalties import Penalties, penalised
from deltaserve.compute.executor.row_rules import BANNED_LOGIT, BIAS_WIDTH, LARGEST_LOGIT, MOST_BIASES, packed_biases
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.memory.host_arrays import on_device, write_over
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId

IN_PROMPT = 1 << 30
"""Bit of a count: the prompt has the token, too. Those below are how often the row produced it."""


class AdjustedRow(NamedTuple):
    """A row of a step whose logits are changed before its draw."""

    line: RowId
    row: Row
    start: int
    """Position that it computes."""


class AdjustmentTables(NamedTuple):
    """Tables of all rows, by line."""

    counts: Tensor  # [lines, V] int32, see IN_PROMPT
    biases: Tensor  # [lines, MOST_BIASES, BIAS_WIDTH] int64; how many there are is one of the row's rules


class CountsOfLine:
    """TokenCounts of one row, as the device counts when it has done what it was given. What is asked for is made each
    time: rows of a step have it one after the other."""

    def __init__(self, counts: Tensor) -> None:
        """counts [V] int32, see IN_PROMPT"""
        self._counts = counts

    @property
    def seen(self) -> Tensor:
        return self._counts > 0

    @property
    def output_counts(self) -> Tensor:
        return _num_produced(self._counts)


class ResidentAdjustments:
    """For one thread. Whatever it tells the device holds for what the device is given from then on."""

    def __init__(self, num_lines: int, device: torch.device) -> None:
        self._num_lines = num_lines
        self._device = device
        self._tables: AdjustmentTables | None = None

    def tables(self, vocab_size: int) -> AdjustmentTables:
        """Made when they are asked for first, and the same from then on: recorded steps keep them."""
        if self._tables is None:
            counts = torch.zeros((self._num_lines, vocab_size), dtype=torch.int32, device=self._device)
            shape = (self._num_lines, MOST_BIASES, BIAS_WIDTH)
            self._tables = AdjustmentTables(counts, torch.zeros(shape, dtype=torch.int64, device=self._device))
        return self._tables

    def bring_up(self, rows: Sequence[AdjustedRow]) -> None:
        """Tell the device what it needs to know of them: all of a row that is new to it, or else the output before
        `start` that it did not count itself. Raises StateError where the host does not know those."""
        missing = []
        for line, row, start in rows:
            least = max(1, min(start, row.prompt_len))  # those of the prompt are counted otherwise
            if not least <= row.num_counted <= start:  # it may compute a position again
                self._begin(line, row, start)
            elif row.sampling.needs_history and row.num_counted < start:
                missing.append(line * row.vocab_size + _known(row, row.num_counted, start))
            row.num_counted = start
        if missing:
            places = on_device(np.concatenate(missing), self._device)
            counts = self._counts(rows)
            counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def count(self, rows: Sequence[AdjustedRow], last_drawn: Tensor) -> None:
        """Count the tokens at `start`, which the rows drew there and the host does not know. last_drawn [lines]"""
        if rows:
            counts, lines = self._counts(rows), on_device(np.array([one.line for one in rows], np.int64), self._device)
            places = lines * counts.shape[1] + last_drawn.index_select(0, lines)
            counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        for _, row, start in rows:
            row.num_counted = start + 1

    def of_line(self, line: RowId, row: Row) -> CountsOfLine:
        """Those of a row that was brought up."""
        return CountsOfLine(self.tables(row.vocab_size).counts[line])

    def _counts(self, rows: Sequence[AdjustedRow]) -> Tensor:
        return self.tables(rows[0].row.vocab_size).counts

    def _begin(self, line: RowId, row: Row, start: int) -> None:
        tables = self.tables(row.vocab_size)
        biases = packed_biases(row.sampling, row.prompt_len)
        if len(biases) and row.way is not None:
            write_over(tables.biases[line, : len(biases)], biases)
        if not row.sampling.needs_history:
            return
        known, counts = on_device(_known(row, 0, start).copy(), self._device), tables.counts[line]
        of_output = known[row.prompt_len :]
        counts.zero_()
        counts.index_fill_(0, known[: row.prompt_len], IN_PROMPT)
        counts.index_add_(0, of_output, torch.ones_like(of_output, dtype=torch.int32))


def count_inputs(counts: Tensor, places: Tensor, is_output: Tensor, is_stored: Tensor) -> None:
    """places [B] in counts [lines * V] of tokens that rows compute; is_output, is_stored [B] bool: whether they stand
    behind the prompt, and whether they are counted at all."""
    before = counts.index_select(0, places)
    behind = torch.where(is_output, before + 1, before | IN_PROMPT)
    counts.index_copy_(0, places, torch.where(is_stored, behind, before))


def adjusted(
    logits: Tensor, counts: Tensor, penalties: Penalties, biases: Tensor, is_bias: Tensor, positions: Tensor
) -> Tensor:
    """logits [B, V] float32, counts [B, V], biases [B, MOST_BIASES, BIAS_WIDTH] of which `is_bias` [B, MOST_BIASES] are
    some, positions [B, 1] of the tokens to draw -> logits of that shape. Finite ones stay finite, so that who draws
    sees which were not."""
    found = _limited(penalised(logits, counts > 0, _num_produced(counts), penalties))
    tokens, added, banned_until = (column[..., 0] for column in torch.split(biases, 1, -1))
    bias = torch.where(positions < banned_until, -torch.inf, added.view(torch.float64).to(torch.float32))
    found = found.scatter_add(1, torch.where(is_bias, tokens, 0), torch.where(is_bias, bias, 0.0))
    return torch.where(logits.isfinite(), _limited(found), logits)


def _limited(logits: Tensor) -> Tensor:
    """Finite where they are numbers."""
    return torch.where(logits == -torch.inf, BANNED_LOGIT, logits.clamp(max=LARGEST_LOGIT))


def _num_produced(counts: Tensor) -> Tensor:
    """int32 -> float32 of that shape"""
    return (counts & (IN_PROMPT - 1)).to(torch.float32)


def _known(row: Row, start: int, end: int) -> npt.NDArray[np.int64]:
    tokens = row.tokens(start, end)
    if len(tokens) < end - start:
        raise StateError(f"a row with penalties computes position {end}, but only {row.num_known} tokens are known")
    return tokens
