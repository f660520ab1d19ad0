"""Staging memory of a simulated rank: pages of stamps are gathered and scattered a granule at a time."""

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.core.layout.copy_plan import PageFormat, PlacedPages
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.sim.rank_memory import HeadMemory


class _Row(NamedTuple):
    """Bytes that lie together, in a page and in a buffer."""

    in_page: int
    in_buffer: int
    num_bytes: int


class _Granule(NamedTuple):
    page: PageId
    rows: tuple[_Row, ...]


PageSeen = Callable[[PoolId, PageId], None]


def _unseen(pool: PoolId, page: PageId) -> None:
    """The observer of a world that nobody watches."""


class StampStaging:
    """The transfer.staging.StagingMemory of a simulated rank."""

    def __init__(self, memory: HeadMemory, region: RegionId, num_pauses: int = 0) -> None:
        """`num_pauses`: slices that move nothing, before the others of a gather or scatter: large pages take long."""
        self._num_pauses = num_pauses
        self._memory = memory.memory
        self._buffer = memory.memory[region]
        self._pools = {component: PoolId(of.id) for component, of in memory.regions}
        self._page_bytes = memory.rank_page_bytes
        self.on_gather: PageSeen = _unseen
        """Called with every page just before it is read."""
        self.on_scatter: PageSeen = _unseen
        """Called with every page just before it is written."""

    def gather(self, group: str, staged: StagedRoute, src: PlacedPages, tokens: range, offset: int) -> Iterator[int]:
        offsets = [run.src_offset for run in staged.route.heads]
        pool = self._pools[group]
        pages = self._memory[RegionId(pool)]
        yield from (0 for _ in range(self._num_pauses))
        for page, rows in _granules(staged, src, staged.route.src, tokens, offsets):
            self.on_gather(pool, page)
            for at, into, num in rows:
                start = page * self._page_bytes + at
                self._buffer[offset + into : offset + into + num] = pages[start : start + num]
            yield sum(row.num_bytes for row in rows)

    def scatter(self, group: str, staged: StagedRoute, offset: int, dst: PlacedPages, tokens: range) -> Iterator[int]:
        offsets = [run.dst_offset for run in staged.route.heads]
        pool = self._pools[group]
        pages = self._memory[RegionId(pool)]
        yield from (0 for _ in range(self._num_pauses))
        for page, rows in _granules(staged, dst, staged.route.dst, tokens, offsets):
            self.on_scatter(pool, page)
            for at, of, num in rows:
                start = page * self._page_bytes + at
                pages[start : start + num] = self._buffer[offset + of : offset + of + num]
            yield sum(row.num_bytes for row in rows)

    def scatter_microseconds(self) -> int:
        return 0

    def checksum(self, offset: int, num_bytes: int) -> int:
        return zlib.crc32(memoryview(self._buffer)[offset : offset + num_bytes])

    def wipe(self, offset: int, num_bytes: int) -> None:
        self._buffer[offset : offset + num_bytes] = bytes(num_bytes)

    def num_pages(self, group: str) -> int:
        return len(self._memory[RegionId(self._pools[group])]) // self._page_bytes


def _granules(
    staged: StagedRoute, placed: PlacedPages, layout: PageFormat, tokens: range, offsets: list[int]
) -> Iterator[_Granule]:
    """Granules of every run of heads, which starts in a page at one of `offsets`. Elements are equal on both sides."""
    for run, offset in zip(staged.runs(len(tokens)), offsets, strict=True):
        in_page = run.row_bytes * (layout.page_size // staged.granule)
        places = staged.places(placed, layout, tokens)
        for index, (page, part) in enumerate(zip(places.page.tolist(), places.part.tolist(), strict=True)):
            first = run.offset + index * run.granule_bytes
            rows = tuple(
                _Row(offset + row * in_page + part * run.row_bytes, first + row * run.row_bytes, run.row_bytes)
                for row in range(run.num_rows)
            )
            yield _Granule(PageId(page), rows)
