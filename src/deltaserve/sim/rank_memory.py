"""Pages of a simulated rank, as bytearrays."""

from collections.abc import Mapping, Sequence

import xxhash

from deltaserve.base.extents import Region
from deltaserve.base.ids import PageId, PoolId, RegionId
from deltaserve.base.tokens import pack_u32
from deltaserve.layout.copy_plan import PageSlice
from deltaserve.layout.kv import KvLayout
from deltaserve.layout.spec import CacheSpec
from deltaserve.wire.messages import RegionInfo

STAMP_BYTES = 16
_POISON = b"\xdb" * STAMP_BYTES


class StampMemory:
    """The transfer.endpoint.Memory of a simulated rank."""

    def __init__(self, cache: CacheSpec, num_pages: Sequence[int]) -> None:
        self.regions: list[tuple[str, Region]] = []
        self.memory: dict[RegionId, bytearray] = {}
        self.page_bytes = cache.page_size * STAMP_BYTES
        for pool, group in enumerate(cache.groups):
            self._add(group.name, KvLayout(group, cache.page_size).arena_bytes(num_pages[pool]))
        self._page_size = cache.page_size
        self._poison = _POISON * cache.page_size

    def _add(self, component: str, num_bytes: int) -> None:
        region = RegionId(len(self.regions))
        self.memory[region] = bytearray(num_bytes)
        self.regions.append((component, Region(region, 0, num_bytes, "cpu")))

    def pages(self, pool: PoolId, pages: Sequence[PageId]) -> bytes:
        """Bytes of `pages`, one after the other."""
        size, arena = self.page_bytes, self.memory[RegionId(pool)]
        return b"".join([arena[page * size : (page + 1) * size] for page in pages])

    def write_stamp(self, pool: PoolId, page: PageId, offset: int, stamp: bytes) -> None:
        at = (page * self._page_size + offset) * STAMP_BYTES
        self.memory[RegionId(pool)][at : at + STAMP_BYTES] = stamp

    def write_stamps(self, pool: PoolId, table: Mapping[int, PageId], start: int, stamps: bytes) -> None:
        """Stamps of positions start, start + 1, ... into the pages of a row. `table`: page index |-> page."""
        size = self._page_size
        for index in range(len(stamps) // STAMP_BYTES):
            stamp = stamps[index * STAMP_BYTES : (index + 1) * STAMP_BYTES]
            self.write_stamp(pool, table[(start + index) // size], (start + index) % size, stamp)

    def write_state(self, pool: PoolId, slot: PageId, stamp: bytes) -> None:
        """All over the slot, so that no part of another one passes for it."""
        self.memory[RegionId(pool)][slot * self.page_bytes : (slot + 1) * self.page_bytes] = stamp * self._page_size

    def poison(self, pool: PoolId, page: PageId) -> None:
        """What stood there is of no use to anybody any more."""
        self.memory[RegionId(pool)][page * self.page_bytes : (page + 1) * self.page_bytes] = self._poison

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        (of_group,) = slices
        size, arena = self.page_bytes, self.memory[RegionId(pool)]
        return pack_u32(
            xxhash.xxh32_intdigest(b"".join(arena[page * size + at : page * size + at + num] for at, num in of_group))
            for page in pages
        )


def region_infos(memory: StampMemory) -> tuple[RegionInfo, ...]:
    return tuple(
        RegionInfo(id=r.id, base=r.base, num_bytes=r.num_bytes, device=r.device, component=component)
        for component, r in memory.regions
    )
