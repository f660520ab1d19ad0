"""What the transfer endpoint needs of a rank's memory besides moving it."""

from typing import Protocol

from deltaserve.base.ids import AuxSlot, PageId, PoolId


class Memory(Protocol):
    """Pages and aux slots of this rank. Safe to call from the transfer thread for pages no step writes."""

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...]) -> bytes:
        """Packed uint32 crc32 of each page, over all groups of the pool."""
        ...

    def read_aux(self, slot: AuxSlot) -> bytes:
        """The whole slot."""
        ...

    def write_aux(self, slot: AuxSlot, data: bytes) -> None:
        """Raises ValueError when `data` exceeds the slot."""
        ...
