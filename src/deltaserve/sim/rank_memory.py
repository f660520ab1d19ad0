"""Pages of a simulated rank, as bytearrays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from deltaserve.control.transfer.staging import STAGING
from deltaserve.core.extents import Region
from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.core.layout.copy_plan import PageSlice, PlacedPages, Route
from deltaserve.core.layout.kv import group_page_bytes
from deltaserve.core.layout.prompt_pages import tokens_before
from deltaserve.core.layout.shard import Shard, holders
from deltaserve.core.layout.spec import CacheGroup, CacheSpec, StateGroup
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import RegionInfo

STAMP_BYTES = 16


def poison_of(worker: str) -> bytes:
    """What stands in memory of `worker` that changed hands.

    No other worker writes that: bytes that were not written, sent with those that were, differ from what they land on.
    Evidence.CONTENTS demands as much (core/transport.py).
    """
    return xxhash.xxh3_128_digest(b"poison of " + worker.encode())


class _Cell(NamedTuple):
    """A head of a block."""

    num_bytes: int
    places: Sequence[tuple[int, int]]
    """(rank, offset in its page) of each copy."""


class HeadMemory:
    """The transfer.endpoint.Memory of a simulated rank: its heads of every page."""

    def __init__(self, cache: CacheSpec, num_pages: Sequence[int], shard: Shard = Shard()) -> None:
        self.regions: list[tuple[str, Region]] = []
        self.memory: dict[RegionId, bytearray] = {}
        self.rank_page_bytes = group_page_bytes(cache.groups[0], cache.page_size, shard)
        for group in cache.groups:
            self._add(group.name, num_pages[cache.pool_of(group)] * group_page_bytes(group, cache.page_size, shard))

    def _add(self, component: str, num_bytes: int) -> None:
        region = RegionId(len(self.regions))
        self.memory[region] = bytearray(num_bytes)
        self.regions.append((component, Region(region, 0, num_bytes, "cpu")))

    def add_staging(self, num_bytes: int) -> RegionId:
        """Memory that no page is in."""
        self._add(STAGING, num_bytes)
        return self.regions[-1][1].id

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        (of_group,) = slices
        size, arena = self.rank_page_bytes, self.memory[RegionId(pool)]
        return pack_u32(
            xxhash.xxh32_intdigest(b"".join(arena[page * size + at : page * size + at + num] for at, num in of_group))
            for page in pages
        )

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        (route,) = routes
        return pack_u32(map(xxhash.xxh32_intdigest, copied_pages(route, self.memory[RegionId(pool)], src, dst)))


def copied_pages(route: Route, arena: bytearray, src: PlacedPages, dst: PlacedPages) -> list[bytes]:
    """What a reader finds in each of its pages `dst` of what was copied from pages `src` of `arena`."""
    size, there = route.dst_page_bytes, PlacedPages(dst.region, dst.first, range(len(dst.pages)))
    pages = bytearray(size * len(dst.pages))
    for at, target, num_elements in route.element_copies(src, there):
        num_bytes = num_elements * route.src.dtype.itemsize
        pages[target : target + num_bytes] = arena[at : at + num_bytes]
    end = (src.first + len(src.pages)) * route.src.page_size
    written = tokens_before(end, dst.first, len(dst.pages), route.dst.page_size)
    return [
        b"".join(pages[page * size + at : page * size + at + num] for at, num in route.arriving(num_tokens))
        for page, num_tokens in enumerate(written)
    ]


class StampPages(ABC):
    """Pages of stamps, however they are cut."""

    _page_size: int

    @abstractmethod
    def write_stamp(self, pool: PoolId, page: PageId, offset: int, stamp: bytes) -> None: ...

    def write_stamps(self, pool: PoolId, table: Mapping[int, PageId], start: int, stamps: bytes) -> None:
        """Stamps of positions start, start + 1, ... into the pages of a row. `table`: page index |-> page."""
        size = self._page_size
        for index in range(len(stamps) // STAMP_BYTES):
            stamp = stamps[index * STAMP_BYTES : (index + 1) * STAMP_BYTES]
            self.write_stamp(pool, table[(start + index) // size], (start + index) % size, stamp)


class StampMemory(HeadMemory, StampPages):
    """All stamps of a worker of one rank."""

    def __init__(self, cache: CacheSpec, num_pages: Sequence[int], poison: bytes) -> None:
        super().__init__(cache, num_pages)
        self.page_bytes = self.rank_page_bytes
        self._page_size = cache.page_size
        self._poison = poison * cache.page_size

    @property
    def ranks(self) -> tuple[HeadMemory, ...]:
        """The ranks of an unsplit memory: itself alone."""
        return (self,)

    def pages(self, pool: PoolId, pages: Sequence[PageId]) -> bytes:
        """Bytes of `pages`, one after the other."""
        size, arena = self.page_bytes, self.memory[RegionId(pool)]
        return b"".join([arena[page * size : (page + 1) * size] for page in pages])

    def write_stamp(self, pool: PoolId, page: PageId, offset: int, stamp: bytes) -> None:
        at = (page * self._page_size + offset) * STAMP_BYTES
        self.memory[RegionId(pool)][at : at + STAMP_BYTES] = stamp

    def write_state(self, pool: PoolId, slot: PageId, state: bytes) -> None:
        """The whole slot: its blocks, of each its heads."""
        self.memory[RegionId(pool)][slot * self.page_bytes : (slot + 1) * self.page_bytes] = state

    def poison(self, pool: PoolId, page: PageId) -> None:
        """What stood there is of no use to anybody any more."""
        self.memory[RegionId(pool)][page * self.page_bytes : (page + 1) * self.page_bytes] = self._poison


class SplitMemory(StampPages):
    """All stamps of a worker of several ranks, cut into heads that each rank has its share of, of each block."""

    def __init__(self, cache: CacheSpec, num_pages: Sequence[int], num_ranks: int, poison: bytes) -> None:
        self._poison = poison
        self.ranks = tuple(HeadMemory(cache, num_pages, Shard(rank, num_ranks)) for rank in range(num_ranks))
        self.rank_page_bytes = self.ranks[0].rank_page_bytes
        self.page_bytes = cache.page_size * STAMP_BYTES
        self._page_size = cache.page_size
        self._num_heads = cache.groups[0].blocks[0].num_heads
        self._head_bytes = STAMP_BYTES // self._num_heads
        """Bytes of one head of a stamp."""
        firsts = [Shard(rank, num_ranks).heads(self._num_heads)[0] for rank in range(num_ranks)]
        self._places = [
            [(rank, head - firsts[rank]) for rank in holders(self._num_heads, head, num_ranks)]
            for head in range(self._num_heads)
        ]
        """Each head's places: the ranks that hold it, and as which of theirs."""
        self._state_pools = {cache.pool_of(group) for group in cache.groups if isinstance(group, StateGroup)}
        self._state_cells = [cell for pool in self._state_pools for cell in self._cells(cache.groups[pool], num_ranks)]

    def _cells(self, group: CacheGroup, num_ranks: int) -> Iterator[_Cell]:
        """Heads of the blocks of a state, in its order. Counted here and not by a PageFormat, which is under test."""
        start = 0
        for block in group.blocks:
            size = block.num_rows * block.row_width * group.dtype.itemsize
            for places in self._places:
                yield _Cell(size, [(rank, start + place * size) for rank, place in places])
            start += max(1, self._num_heads // num_ranks) * size

    def pages(self, pool: PoolId, pages: Sequence[PageId]) -> bytes:
        """Stamps of `pages`, one after the other; states likewise."""
        return b"".join([self._page(pool, page) for page in pages])

    def _page(self, pool: PoolId, page: PageId) -> bytes:
        if pool in self._state_pools:
            return b"".join([self._copied(pool, page, cell) for cell in self._state_cells])
        size, heads = self._head_bytes, [self._head(pool, page, head) for head in range(self._num_heads)]
        ends = range(0, self._page_size * size, size)
        return b"".join([head[at : at + size] for at in ends for head in heads])

    def _head(self, pool: PoolId, page: PageId, head: int) -> bytes:
        size = self._page_size * self._head_bytes
        return self._copied(pool, page, _Cell(size, [(rank, place * size) for rank, place in self._places[head]]))

    def _copied(self, pool: PoolId, page: PageId, cell: _Cell) -> bytes:
        """Where ranks hold unequal copies it is nobody's: who reads that is found out."""
        size, starts = cell.num_bytes, [(rank, page * self.rank_page_bytes + at) for rank, at in cell.places]
        first, *others = [bytes(self.ranks[rank].memory[RegionId(pool)][at : at + size]) for rank, at in starts]
        return first if all(copy == first for copy in others) else _common(first, others)

    def write_stamp(self, pool: PoolId, page: PageId, offset: int, stamp: bytes) -> None:
        size = self._head_bytes
        for head, places in enumerate(self._places):
            for rank, place in places:
                at = page * self.rank_page_bytes + (place * self._page_size + offset) * size
                self.ranks[rank].memory[RegionId(pool)][at : at + size] = stamp[head * size : (head + 1) * size]

    def write_state(self, pool: PoolId, slot: PageId, state: bytes) -> None:
        """Write a state, as StampMemory does."""
        start = 0
        for size, places in self._state_cells:
            for rank, at in places:
                first = slot * self.rank_page_bytes + at
                self.ranks[rank].memory[RegionId(pool)][first : first + size] = state[start : start + size]
            start += size

    def poison(self, pool: PoolId, page: PageId) -> None:
        """Overwrite a page, as StampMemory does."""
        if pool in self._state_pools:
            self.write_state(pool, page, self._poison * self._page_size)
            return
        for offset in range(self._page_size):
            self.write_stamp(pool, page, offset, self._poison)


def _common(first: bytes, others: Sequence[bytes]) -> bytes:
    """The bytes that are equal in all; elsewhere what no stamp has."""
    return bytes(0xEE if any(copy[at] != byte for copy in others) else byte for at, byte in enumerate(first))


def stamp_memory(cache: CacheSpec, num_pages: Sequence[int], num_ranks: int, worker: str) -> StampMemory | SplitMemory:
    """Memory of a worker for its heads and ranks."""
    poison = poison_of(worker)
    is_whole = num_ranks == cache.groups[0].blocks[0].num_heads == 1
    return StampMemory(cache, num_pages, poison) if is_whole else SplitMemory(cache, num_pages, num_ranks, poison)


def region_infos(memory: HeadMemory) -> tuple[RegionInfo, ...]:
    return tuple(
        RegionInfo(id=r.id, base=r.base, num_bytes=r.num_bytes, device=r.device, component=component)
        for component, r in memory.regions
    )
