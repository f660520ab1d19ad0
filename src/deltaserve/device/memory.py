"""All memory of a rank that peers may reach: pages and aux slots."""

from collections.abc import Sequence

import torch

from deltaserve.base.extents import Region
from deltaserve.base.ids import AuxSlot, PageId, PoolId, RegionId
from deltaserve.device.aux_pool import DEFAULT_SLOT_BYTES, AuxPool
from deltaserve.device.kv_pool import KvPool
from deltaserve.layout.spec import CacheSpec

AUX_COMPONENT = "aux"


class DeviceMemory:
    """Pages and aux slots. Safe to use from the transfer thread for pages no step writes."""

    def __init__(
        self,
        cache: CacheSpec,
        num_pages: Sequence[int],
        device: torch.device,
        num_aux_slots: int,
        aux_slot_bytes: int = DEFAULT_SLOT_BYTES,
    ) -> None:
        """`num_pages` per pool of `cache.pools`."""
        self.kv = KvPool(cache, num_pages, device)
        self.aux = AuxPool(num_aux_slots, aux_slot_bytes)

    def regions(self) -> list[tuple[str, Region]]:
        """(component, region): one per page group, named as the group, then `aux`. Region ids count from 0."""
        names = [arena.layout.group.name for arena in self.kv.arenas]
        regions = [arena.region(RegionId(index)) for index, arena in enumerate(self.kv.arenas)]
        pairs = list(zip(names, regions, strict=True))
        return [*pairs, (AUX_COMPONENT, self.aux.region(RegionId(len(names))))]

    def checksums(self, pool: PoolId, pages: Sequence[PageId]) -> bytes:
        """Packed uint32 crc32 of each page, over all groups of the pool."""
        return self.kv.checksums(pool, pages)

    def read_aux(self, slot: AuxSlot) -> bytes:
        """The whole slot."""
        return self.aux.read(slot)

    def write_aux(self, slot: AuxSlot, data: bytes) -> None:
        """Raises ValueError when `data` exceeds the slot."""
        self.aux.write(slot, data)
