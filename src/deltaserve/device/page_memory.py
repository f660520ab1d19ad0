"""All memory of a rank that peers may reach: its pages."""

from collections.abc import Sequence

import torch

from deltaserve.base.extents import Region
from deltaserve.base.ids import PageId, PoolId, RegionId
from deltaserve.device.kv_pool import KvPool
from deltaserve.device.memory_block import Sharing
from deltaserve.layout.copy_plan import PageSlice
from deltaserve.layout.shard import Shard
from deltaserve.layout.spec import CacheSpec


class DeviceMemory:
    """Safe to use from the transfer thread for pages no step writes."""

    def __init__(
        self,
        cache: CacheSpec,
        num_pages: Sequence[int],
        device: torch.device,
        shard: Shard = Shard(),
        sharing: Sharing = Sharing.PRIVATE,
    ) -> None:
        """`num_pages` per pool of `cache.pools`."""
        self.kv = KvPool(cache, num_pages, device, shard, sharing)

    def regions(self) -> list[tuple[str, Region]]:
        """(component, region): one per group, named as it. Region ids count from 0."""
        arenas = self.kv.arenas
        return [(arena.layout.group.name, arena.region(RegionId(index))) for index, arena in enumerate(arenas)]

    def checksums(
        self, pool: PoolId, pages: Sequence[PageId], slices: Sequence[Sequence[PageSlice]] | None = None
    ) -> bytes:
        """Packed uint32 crc32 of each page, over these slices of each group of the pool, in order; None: all of it."""
        return self.kv.checksums(pool, pages, slices)
