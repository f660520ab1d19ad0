"""The memory of one group's pages, or slots, as peers see it."""

import torch
from torch import Tensor

from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.core.extents import Region
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import Sharing


class Arena:
    """`num_pages` pages of `page_bytes` each, one after the other."""

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device, sharing: Sharing) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self._block = MemoryBlock(num_pages * page_bytes, device, sharing)
        self.bytes = self._block.data  # [P * page_bytes] uint8

    @property
    def pages(self) -> Tensor:
        """[P, page_bytes] uint8"""
        return self.bytes.view(self.num_pages, self.page_bytes)

    def region(self, id: RegionId) -> Region:
        return self._block.region(id)
