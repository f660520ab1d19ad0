"""What the transfer endpoint needs of a rank's memory besides moving it."""

from typing import Protocol

from deltaserve.base.ids import PageId, PoolId


class Memory(Protocol):
    """Pages of this rank. Safe to call from the transfer thread for pages no step writes."""

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...]) -> bytes:
        """Packed uint32 crc32 of each page, over all groups of the pool."""
        ...
