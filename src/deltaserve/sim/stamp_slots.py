"""The file under the tree of a simulated rank, as bytes in memory: headers and checks are those of production."""

from collections.abc import Callable

from deltaserve.control.transfer.commands import SlotCopy
from deltaserve.control.transfer.slot_seal import HEADER_BYTES, SlotSeal
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.sim.faults import FaultKind, never
from deltaserve.sim.rank_memory import HeadMemory


class StampSlots:
    """The TierStore of control/transfer/tier_plane.py."""

    def __init__(self, memory: HeadMemory, of_whom: str) -> None:
        self._memory = memory
        self._of_whom = of_whom
        self._slots: dict[tuple[PoolId, int], bytes] = {}
        self.fails: Callable[[FaultKind], bool] = never
        self.on_store: Callable[[PoolId, PageId], None] = lambda pool, page: None
        """Called with the page that is copied."""
        self.on_load: Callable[[SlotCopy], None] = lambda copy: None
        """Called before a slot is read."""

    def write(self, copy: SlotCopy) -> int:
        self.on_store(copy.pool, copy.page)
        if self.fails(FaultKind.SLOT_FAILS):
            raise TierError("the disk is full")
        data = bytes(self._page(copy))
        sealed = self._seal(copy.pool).header(copy.key, [memoryview(data)]) + data
        if self.fails(FaultKind.SLOT_SPOILS):  # the end of what stood there before
            sealed = sealed[:-1] + bytes([sealed[-1] ^ 0x55])
        self._slots[copy.pool, copy.slot] = sealed
        return len(data)

    def read(self, copy: SlotCopy) -> int:
        self.on_load(copy)
        if self.fails(FaultKind.SLOT_FAILS):
            raise TierError("the disk cannot be read")
        sealed = self._slots.get((copy.pool, copy.slot), b"")
        target = self._page(copy)
        if len(sealed) != HEADER_BYTES + len(target):
            raise TierError("the slot is empty")
        target[:] = sealed[HEADER_BYTES:]
        if not self._seal(copy.pool).is_whole(sealed[:HEADER_BYTES], copy.key, [target]):
            raise TierError("the slot does not hold the page, or not all of it")
        return len(target)

    def close(self) -> None:
        """It ends with its process."""

    def _seal(self, pool: PoolId) -> SlotSeal:
        return SlotSeal(f"{self._of_whom} {pool}")

    def _page(self, copy: SlotCopy) -> memoryview:
        size = self._memory.rank_page_bytes
        return memoryview(self._memory.memory[RegionId(copy.pool)])[copy.page * size : (copy.page + 1) * size]
