"""Draws by rules that stand on the device beside the rows: part of a recorded step.

A row draws what `sampler.sample` draws for it. Which ways of drawing a step computes follows from its rows: all rows
go through the widest that one of them needs, and each takes its own result.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deltaserve.compute.executor.candidates import SamplingLimits
from deltaserve.compute.executor.penalties import Penalties
from deltaserve.compute.executor.resident_adjustments import AdjustmentTables, adjusted, count_inputs
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.row_rules import DrawKind, WayToDraw
from deltaserve.compute.executor.unread_draws import UnreadDraws, draw_free, draw_limited
from deltaserve.compute.layers.step_ops import unread_peaks

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class _Rules(NamedTuple):
    """Rules of B rows, [B, 1] each."""

    stream: Tensor
    prompt_len: Tensor
    top_k: Tensor
    way: Tensor
    num_biases: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, rules: Tensor) -> "_Rules":
        columns = torch.split(rules, 1, -1)
        return cls(*columns[:5], *(column.contiguous().view(torch.float64) for column in columns[5:]))


class RowDraws(Protocol):
    """Draws for the rows of a recorded step."""

    def draw(self, logits: Tensor, lines: Tensor, draws: Tensor) -> None:
        """logits [B, V or more] of any float type, lines [B] -> draws [2, B] int64: tokens, and 1 where logits are
        finite. The rows of these lines have moved on by a token. Rows of a wider way than the step's draw anything."""
        ...


MakeDraws = Callable[[ResidentRows, int, int, DrawKind], RowDraws]
"""Makes those of a step of so many rows, over so many logits, of this kind."""


class TorchDraws:
    """RowDraws by torch."""

    def __init__(self, rows: ResidentRows, num_rows: int, num_logits: int, kind: DrawKind) -> None:
        self._rows, self._num_logits, self._kind = rows, num_logits, kind
        self._tables = rows.adjustments.tables(num_logits) if kind.is_adjusted else None

    def draw(self, logits: Tensor, lines: Tensor, draws: Tensor) -> None:
        rows, positions = self._rows, self._rows.positions.index_select(0, lines) + 1
        wide, rules = logits[:, : self._num_logits].contiguous().to(torch.float32), rows.rules.index_select(0, lines)
        if self._tables is not None:
            wide = self._adjusted(self._tables, wide, lines, rules, positions)
        drawn, is_finite = draw_by_rules(wide, rules, positions, self._kind.way)
        draws[0].copy_(drawn)
        draws[1].copy_(is_finite)
        rows.last_drawn.index_copy_(0, lines, drawn)
        rows.positions.index_copy_(0, lines, positions)

    def _adjusted(
        self, tables: AdjustmentTables, logits: Tensor, lines: Tensor, rules: Tensor, positions: Tensor
    ) -> Tensor:
        """Logits of rows whose last tokens, which the step has computed, are counted first."""
        of_rows = _Rules.of(rules)
        places = lines * self._num_logits + self._rows.last_drawn.index_select(0, lines)
        is_stored = torch.arange(len(lines), device=lines.device) < self._rows.num_stored
        count_inputs(tables.counts.view(-1), places, positions > of_rows.prompt_len[:, 0], is_stored)
        columns = (of_rows.repetition, of_rows.frequency, of_rows.presence)
        penalties = Penalties(*(column.to(torch.float32) for column in columns))
        biases = tables.biases.index_select(0, lines)
        is_bias = torch.arange(biases.shape[1], device=lines.device) < of_rows.num_biases
        counts = tables.counts.index_select(0, lines)
        return adjusted(logits, counts, penalties, biases, is_bias, positions[:, None])


def draw_by_rules(logits: Tensor, rules: Tensor, positions: Tensor, way: WayToDraw) -> UnreadDraws:
    """logits [B, V] float32, rules [B, NUM_RULES], positions [B] of the tokens to draw. Rows of a wider way than `way`
    draw anything."""
    is_finite, tokens = unread_peaks(logits)
    if way is not WayToDraw.LARGEST:
        of_rows = _Rules.of(rules)
        points = uniform_on_device(of_rows.stream, positions[:, None] - of_rows.prompt_len)
        limits = SamplingLimits(
            of_rows.temperature.to(torch.float32),
            of_rows.top_k,
            of_rows.top_p,
            of_rows.min_p.to(torch.float32),
            points,
            needs_mass=True,
        )
        of_row = of_rows.way[:, 0]
        tokens = torch.where(of_row == WayToDraw.FREE, draw_free(logits, limits), tokens)
        if way is WayToDraw.LIMITED:
            tokens = torch.where(of_row == WayToDraw.LIMITED, draw_limited(logits, limits), tokens)
    return UnreadDraws(tokens.clamp(0, logits.shape[1] - 1), is_finite)


def uniform_on_device(stream: Tensor, position: Tensor) -> Tensor:
    """int64 -> float64 in [0, 1): `randomness.uniform` in arithmetic of 64 bits that wraps around."""
    mixed = _mixed(stream + (position + 1) * _GOLDEN)
    return _shifted(mixed, 32).to(torch.float64) * 2.0**-32


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << 64 - bits) - 1)
