"""The memory of one group's pages, or slots, as peers see it."""

import zlib
from collections.abc import Sequence

import torch

from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.core.extents import Region
from deltaserve.core.ids import PageId, RegionId
from deltaserve.core.layout.copy_plan import PageSlice
from deltaserve.core.transport import Sharing


class Arena:
    """`num_pages` pages of `page_bytes` each, one after the other."""

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device, sharing: Sharing) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._block = MemoryBlock(num_pages * page_bytes, device, sharing)
        self.bytes = self._block.data  # [P * page_bytes] uint8

    def page_checksum(self, page: PageId, slices: Sequence[PageSlice], seed: int) -> int:
        """crc32 of these bytes of the page, continued from `seed`."""
        start = page * self.page_bytes
        for offset, num_bytes in slices:
            part = self.bytes[start + offset : start + offset + num_bytes]
            seed = zlib.crc32(part.cpu().numpy().data, seed)
        return seed

    def region(self, id: RegionId) -> Region:
        return self._block.region(id)
