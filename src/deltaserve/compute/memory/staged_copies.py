"""Gather and scatter: a route's tokens from a rank's pages into a staging buffer, and from one into pages.

Both go in slices of at most `SLICE_BYTES`, one for each `next()`: whoever drives them does something else in between.
(The thread that scatters is the one that polls the transport, and over TCP nothing lands while nobody polls.)

Bytes move as the widest integers that divide everything; elements are only looked at where the dtypes differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.memory.element_conversion import ElementConversion
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.core.layout.copy_plan import PageFormat, PlacedPages
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.staged_route import StagedRoute, StagedRun

SLICE_BYTES = 2 << 20
"""Bytes per slice in the wider of the dtypes: a few milliseconds also where elements are converted."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some granules of a run, or some rows of one granule."""

    granules: slice
    rows: range


@dataclass(frozen=True, slots=True)
class _Side:
    """A run of heads in the pages of one rank's arena."""

    arena: Tensor
    """The arena's bytes: [pages * page_bytes] uint8."""
    page_bytes: int
    offset: int
    """Where the run's first row begins in a page, in bytes."""
    row_bytes: int
    """Bytes of a granule's part of a row."""
    alignment: int
    """Bytes that divide every place where a part of the run begins in a buffer."""
    parts: int
    """Granules per page."""
    pages: _Ids
    """Page of each granule: [granules]."""
    part: _Ids
    """Place of each granule in its page: [granules]."""

    def take(self, where: _Slice, out: Tensor) -> None:
        """Pages -> `out` [granules * rows * row_bytes] uint8."""
        view, values = self._view(where), out.view(_INTEGERS[self._width])
        pages, part = self.pages[where.granules], self.part[where.granules]
        if self.parts == 1:
            torch.index_select(view[:, 0].flatten(1), 0, _ids(pages, out), out=values.view(len(pages), -1))
        elif out.device.type == "cpu":
            values.view(len(pages), *view.shape[2:]).numpy()[:] = view.numpy()[pages, part]
        else:
            values.view(len(pages), *view.shape[2:]).copy_(view[_ids(pages, out), _ids(part, out)])

    def put(self, where: _Slice, data: Tensor) -> None:
        """`data` [granules * rows * row_bytes] uint8 -> pages."""
        view, values = self._view(where), data.view(_INTEGERS[self._width])
        pages, part = self.pages[where.granules], self.part[where.granules]
        values = values.view(len(pages), *view.shape[2:])
        if data.device.type == "cpu":  # numpy's assignment is three times faster than torch's index_copy_
            view.numpy()[pages, part] = values.numpy()
        else:
            view[_ids(pages, data), _ids(part, data)] = values

    @property
    def _width(self) -> int:
        return gcd(self.page_bytes, self.offset, self.row_bytes, self.alignment, 8)

    def _view(self, where: _Slice) -> Tensor:
        """[pages, parts, rows, elements of a granule's part of a row] of these rows."""
        width = self._width
        row, page = self.row_bytes // width, self.page_bytes // width
        shape = (self.arena.numel() // self.page_bytes, self.parts, len(where.rows), row)
        start = self.offset // width + where.rows.start * self.parts * row
        return self.arena.view(_INTEGERS[width]).as_strided(shape, (page, row, self.parts * row, 1), start)


class StagedCopies:
    """Copies between one rank's arenas and its staging region. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self._conversion = ElementConversion(device)
        self._scratch = Workspace(device)

    def gather(
        self, staged: StagedRoute, arena: Tensor, src: PlacedPages, tokens: range, buffer: Tensor
    ) -> Iterator[int]:
        """Writer: fill `buffer` [num_bytes] uint8 from `arena` [bytes] uint8. Yields the bytes of each slice."""
        layout = staged.route.src
        for run in staged.runs(len(tokens)):
            side = _side(staged, run, arena, src, tokens, layout, run.heads.src_offset)
            for where in _slices(run, len(side.pages), _slice_bytes(staged, layout)):
                target = _part_of(buffer, run, where)
                if layout.dtype is staged.dtype:
                    side.take(where, target)
                else:
                    raw = self._raw(target, layout.dtype, staged.dtype)
                    side.take(where, raw)
                    self._conversion.convert(raw, layout.dtype, target, staged.dtype)
                yield target.numel()

    def scatter(
        self, staged: StagedRoute, buffer: Tensor, arena: Tensor, dst: PlacedPages, tokens: range
    ) -> Iterator[int]:
        """Reader: empty `buffer` [num_bytes] uint8 into `arena` [bytes] uint8. Yields the bytes of each slice."""
        layout = staged.route.dst
        for run in staged.runs(len(tokens)):
            side = _side(staged, run, arena, dst, tokens, layout, run.heads.dst_offset)
            for where in _slices(run, len(side.pages), _slice_bytes(staged, layout)):
                source = _part_of(buffer, run, where)
                if layout.dtype is staged.dtype:
                    side.put(where, source)
                else:
                    raw = self._raw(source, layout.dtype, staged.dtype)
                    self._conversion.convert(source, staged.dtype, raw, layout.dtype)
                    side.put(where, raw)
                yield source.numel()

    def _raw(self, part: Tensor, dtype: DType, of: DType) -> Tensor:
        """Bytes for the elements of `part` in another dtype."""
        return self._scratch.take("raw", (part.numel() // of.itemsize * dtype.itemsize,), torch.uint8)


def _side(
    staged: StagedRoute,
    run: StagedRun,
    arena: Tensor,
    placed: PlacedPages,
    tokens: range,
    layout: PageFormat,
    offset: int,
) -> _Side:
    places = staged.places(placed, layout, tokens)
    row_bytes = run.row_bytes // staged.dtype.itemsize * layout.dtype.itemsize
    parts = layout.page_size // staged.granule
    return _Side(arena, layout.page_bytes, offset, row_bytes, run.offset, parts, *places)


def _slice_bytes(staged: StagedRoute, layout: PageFormat) -> int:
    """Bytes of a slice in the buffer, where a side's elements may be narrower than in its pages."""
    return SLICE_BYTES // layout.dtype.itemsize * staged.dtype.itemsize


def _slices(run: StagedRun, num_granules: int, num_bytes: int) -> Iterator[_Slice]:
    """All rows of as many granules as `num_bytes` hold, or of each granule as many rows."""
    granules = num_bytes // run.granule_bytes
    if granules:
        for first in range(0, num_granules, granules):
            yield _Slice(slice(first, min(first + granules, num_granules)), range(run.num_rows))
        return
    rows = max(1, num_bytes // run.row_bytes)
    for granule in range(num_granules):
        for row in range(0, run.num_rows, rows):
            yield _Slice(slice(granule, granule + 1), range(row, min(row + rows, run.num_rows)))


def _part_of(buffer: Tensor, run: StagedRun, where: _Slice) -> Tensor:
    start = run.offset + where.granules.start * run.granule_bytes + where.rows.start * run.row_bytes
    num_granules = where.granules.stop - where.granules.start
    return buffer[start : start + num_granules * len(where.rows) * run.row_bytes]


def _ids(ids: _Ids, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids)).to(like.device)
