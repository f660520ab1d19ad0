"""How the tokens of a route lie in a staging buffer: what a writer gathers, sends in one piece, and a reader scatters.

Tokens go in *granules*, the largest number that divides both page sizes: a granule lies in one page on either side. The
buffer holds, for each run of heads of the route,

    [granules, heads * rows, granule * row_width]   in the narrower of the two dtypes

so a granule's bytes are contiguous in the side with the smaller pages, and rows of the other. Both sides derive the
same from the two formats and the range of tokens; nothing but that range is told.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from deltaserve.core.layout.copy_plan import HeadRun, PageFormat, PlacedPages, Route
from deltaserve.core.layout.dtype import DType


class StagedRun(NamedTuple):
    """A run of heads in the buffer of some granules."""

    heads: HeadRun
    offset: int
    """Where the run's first granule begins in the buffer, in bytes."""
    num_rows: int
    """Rows of each granule: heads * rows of a head."""
    row_bytes: int
    """Bytes of a row in the buffer."""

    @property
    def granule_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class GranulePlaces(NamedTuple):
    """Where granules lie on one side: each is a part of a page."""

    page: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StagedRoute:
    """A route, as it goes through a staging buffer."""

    route: Route
    granule: int
    """Tokens per granule."""
    dtype: DType
    """Element type in the buffer. The wider side converts: the writer before the bytes travel, or the reader after."""
    granule_bytes: int
    """Bytes of one granule, over all runs."""

    @classmethod
    def of(cls, route: Route) -> Self:
        granule = gcd(route.src.page_size, route.dst.page_size)
        dtype = min(route.dst.dtype, route.src.dtype, key=lambda dtype: dtype.itemsize)
        elements = sum(run.num_heads * run.block.num_rows * run.block.row_width for run in route.heads)
        return cls(route, granule, dtype, elements * granule * dtype.itemsize)

    def tokens(self, src: PlacedPages, dst: PlacedPages) -> range:
        """Tokens of the prompt that both page lists hold."""
        sides = ((src, self.route.src), (dst, self.route.dst))
        first = max(placed.first * layout.page_size for placed, layout in sides)
        end = min((placed.first + len(placed.pages)) * layout.page_size for placed, layout in sides)
        return range(first, max(first, end))

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens // self.granule * self.granule_bytes

    def runs(self, num_tokens: int) -> tuple[StagedRun, ...]:
        """The runs of heads in the buffer of so many tokens."""
        runs, offset = [], 0
        for heads in self.route.heads:
            block = heads.block
            row_bytes = self.granule * block.row_width * self.dtype.itemsize
            run = StagedRun(heads, offset, heads.num_heads * block.num_rows, row_bytes)
            runs.append(run)
            offset += num_tokens // self.granule * run.granule_bytes
        return tuple(runs)

    def places(self, placed: PlacedPages, layout: PageFormat, tokens: range) -> GranulePlaces:
        """Where each granule of `tokens` lies, in order, on the side that `placed` and `layout` describe."""
        parts = layout.page_size // self.granule
        start = placed.first * parts
        granules = np.arange(tokens.start // self.granule - start, tokens.stop // self.granule - start)
        pages, part = np.divmod(granules, parts)
        return GranulePlaces(np.asarray(placed.pages, np.int64)[pages], part)
