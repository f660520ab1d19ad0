"""Matrices of codes (block_forms.py): packed for the native kernels, unpacked as values, and made of float ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.model.formats.block_forms import INT8, PANEL, BlockForm

_CODES_OF_WORD = {8: 4, 4: 8}
_SCALE_TYPES = {2: torch.float16, 4: torch.float32}
ROWS_AT_ONCE = 4096
"""A multiple of the panel: what is packed or unpacked at a time, for it needs several times as much in passing."""
_LEAST = 1e-30
"""What is smaller is rounded to 0: no float32 factor would make it 127."""


class Codes(NamedTuple):
    """Some rows of a matrix, or all."""

    codes: Tensor  # [rows, cols] uint8
    scales: Tensor  # [rows, runs], exact in the form's type
    offsets: Tensor | None  # the same


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix of codes as the native library multiplies with it (DsBlocks of native.h)."""

    form: BlockForm
    shape: tuple[int, int]
    """(out, in) as of any weight."""
    panels: Tensor  # [panels, runs, bytes of a run] uint8
    rounds_inputs: bool = False
    """A product rounds its inputs, too: each 32 values to int8."""

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices of one length of rows, one on top of the other, that are not kept alike."""

    parts: tuple[Tensor | BlockMatrix, ...]
    """Codes, or plain, or packed by torch."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def slices(self) -> Iterator[tuple[Tensor | BlockMatrix, slice]]:
        """The parts, each with its rows."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.shape[0])
            start += part.shape[0]


Matrix = Tensor | BlockMatrix | Stacked
"""A weight [out, in] as `StepOps.product` takes it."""


def pack_codes(
    form: BlockForm, shape: tuple[int, int], parts: Iterable[Codes], rounds_inputs: bool = False
) -> BlockMatrix:
    """`parts`: rows one after the other, of all but the last a multiple of the panel."""
    rows, cols = shape
    panels = torch.empty((-(-rows // PANEL), cols // form.run_len, form.run_bytes), dtype=torch.uint8)
    first = 0
    for part in parts:
        packed = _packed(form, part)
        panels[first : first + len(packed)] = packed
        first += len(packed)
    return BlockMatrix(form, shape, panels, rounds_inputs)


def empty_matrix(form: BlockForm, shape: tuple[int, int], rounds_inputs: bool) -> BlockMatrix:
    """An empty matrix, to be filled by `write_rows`."""
    rows, cols = shape
    panels = torch.zeros((-(-rows // PANEL), cols // form.run_len, form.run_bytes), dtype=torch.uint8)
    return BlockMatrix(form, shape, panels, rounds_inputs)


def write_rows(matrix: BlockMatrix, first: int, rows: Codes) -> None:
    """Write rows from row `first` on, any number."""
    form, count = matrix.form, len(rows.codes)
    packed = _packed(form, rows)
    whole = count // PANEL if first % PANEL == 0 else 0
    matrix.panels[first // PANEL : first // PANEL + whole] = packed[:whole]
    if whole * PANEL == count:
        return
    source = torch.arange(whole * PANEL, count)
    target = source + first
    for ours, theirs in zip(_by_row(form, matrix.panels), _by_row(form, packed), strict=True):
        ours[target // PANEL, target % PANEL] = theirs[source // PANEL, source % PANEL]


def columns_of(rows: Codes, columns: slice) -> Codes:
    """`columns` begin and end between runs of any form."""
    run_len = rows.codes.shape[1] // rows.scales.shape[1]
    start, stop, _ = columns.indices(rows.codes.shape[1])
    runs = slice(start // run_len, stop // run_len)
    offsets = None if rows.offsets is None else rows.offsets[:, runs]
    return Codes(rows.codes[:, columns], rows.scales[:, runs], offsets)


def round_matrix(weight: Tensor, rounds_inputs: bool = False) -> BlockMatrix:
    """[out, in] float, `in` a multiple of 32 -> the nearest codes of 8 bits, each run with a scale of float16.

    Raises ValueError where a weight is not finite, or a scale larger than float16 has.
    """
    rows, cols = weight.shape
    parts = (_rounded(part.float()) for part in torch.split(weight, ROWS_AT_ONCE))
    return pack_codes(INT8, (rows, cols), parts, rounds_inputs)


def block_values(matrix: BlockMatrix) -> Tensor:
    """The matrix as values: [out, in] float32."""
    rows, cols = matrix.shape
    parts = [_unpacked(matrix.form, panels, cols) for panels in torch.split(matrix.panels, ROWS_AT_ONCE // PANEL)]
    return torch.cat(parts)[:rows] if parts else torch.empty(0, cols)


def rounded_inputs(x: Tensor) -> Tensor:
    """[T, in] -> float32, each run of 32 values rounded as products of `rounds_inputs` round them."""
    runs = x.float().reshape(len(x), x.shape[1] // 32, 32)
    most = runs.abs().amax(-1, keepdim=True)
    whole = torch.full_like(most, 127.0)  # a plain number over a tensor is rounded twice
    factor = torch.where(most < _LEAST, 0.0, whole / most)
    rounded = torch.round(runs * factor) * (most / 127.0)
    return rounded.flatten(1)


def _rounded(weight: Tensor) -> Codes:
    runs = weight.reshape(len(weight), -1, INT8.run_len)
    scales = (runs.abs().amax(-1) / 127.0).half()
    if not scales.isfinite().all():
        raise ValueError("a weight is not finite, or too large for a scale in float16")
    wide = scales.float()[..., None]
    codes = torch.where(wide > 0.0, runs / wide, 0.0).round_().clamp_(-INT8.zero, 127).add_(INT8.zero)
    return Codes(codes.to(torch.uint8).flatten(1), scales, None)


def _packed(form: BlockForm, rows: Codes) -> Tensor:
    """-> [panels, runs, bytes of a run]; rows that fill up the last panel are 0"""
    num_words = form.run_len // _CODES_OF_WORD[form.bits]
    codes = _panels(rows.codes)  # [panels, PANEL, cols]
    num_panels = len(codes)
    if form.bits == 4:
        halves = codes.view(num_panels, PANEL, -1, 2, 4)
        codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2)
    words = codes.view(num_panels, PANEL, -1, num_words, 4).permute(0, 2, 3, 1, 4)  # [panels, runs, words, PANEL, 4]
    parts = [_scale_bytes(form, some) for some in (rows.scales, rows.offsets) if some is not None]
    return torch.cat([*parts, words.flatten(2)], 2)


def _scale_bytes(form: BlockForm, scales: Tensor) -> Tensor:
    """[rows, runs] -> [panels, runs, bytes]"""
    kept = scales.to(_SCALE_TYPES[form.scale_bytes])
    return _panels(kept).transpose(1, 2).contiguous().view(torch.uint8)


def _by_row(form: BlockForm, panels: Tensor) -> Iterator[Tensor]:
    """Views of panels: each part of what they hold, [panels, PANEL, ...]"""
    size = PANEL * form.scale_bytes
    starts = [size * index for index in range(1 + form.has_offsets)]
    for start in starts:
        scales = panels[..., start : start + size].view(_SCALE_TYPES[form.scale_bytes])  # [panels, runs, PANEL]
        yield scales.transpose(1, 2)
    words = panels[..., starts[-1] + size :].view(torch.int32)
    yield words.view(*words.shape[:2], -1, PANEL).permute(0, 3, 1, 2)


def _panels(rows: Tensor) -> Tensor:
    """[rows, n] -> [panels, PANEL, n]"""
    missing = -len(rows) % PANEL
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
    return rows.contiguous().view(-1, PANEL, rows.shape[1])


def _unpacked(form: BlockForm, panels: Tensor, cols: int) -> Tensor:
    """-> [rows, cols] float32, with the rows that fill up"""
    sizes = [PANEL * form.scale_bytes] * (1 + form.has_offsets)
    *scales, words = torch.split(panels, [*sizes, panels.shape[2] - sum(sizes)], 2)
    kept = words.reshape(*words.shape[:2], -1, PANEL, 4).permute(0, 3, 1, 2, 4)  # [panels, PANEL, runs, words, 4]
    if form.bits == 4:
        kept = torch.stack((kept & 15, kept >> 4), -2)
    codes = kept.reshape(-1, cols // form.run_len, form.run_len).float()
    wide = [_scales_of(form, part) for part in scales]
    values = (codes - form.zero).mul_(wide[0])
    return (values.add_(wide[1]) if form.has_offsets else values).flatten(1)


def _scales_of(form: BlockForm, scales: Tensor) -> Tensor:
    """[panels, runs, bytes] -> [rows, runs, 1] float32"""
    kept = scales.contiguous().view(_SCALE_TYPES[form.scale_bytes])  # [panels, runs, PANEL]
    by_row: Tensor = kept.transpose(1, 2).reshape(-1, scales.shape[1], 1)
    return by_row.float()
