"""The file under the tree of a simulated rank, as bytes in memory: headers and checks are those of production."""

from collections.abc import Callable

from deltaserve.control.transfer.slot_seal import HEADER_BYTES, SlotSeal
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.rank_memory import HeadMemory


def _never(kind: FaultKind) -> bool:
    """The file of a world without faults."""
    return False


class StampSlots:
    """The TierStore of control/transfer/tier_plane.py."""

    def __init__(self, memory: HeadMemory, of_whom: str) -> None:
        self._memory = memory
        self._seal = SlotSeal(of_whom)
        self._slots: dict[int, bytes] = {}
        self.fails: Callable[[FaultKind], bool] = _never
        self.on_store: Callable[[PageId], None] = lambda page: None
        """Called with the page that is copied."""
        self.on_load: Callable[[int, PageId], None] = lambda slot, page: None
        """Called with the slot that is read, and the page it is copied to."""

    def write(self, slot: int, key: bytes, page: PageId) -> int:
        self.on_store(page)
        if self.fails(FaultKind.SLOT_FAILS):
            raise TierError("the disk is full")
        data = bytes(self._page(page))
        sealed = self._seal.header(key, [memoryview(data)]) + data
        if self.fails(FaultKind.SLOT_SPOILS):  # the end of what stood there before
            sealed = sealed[:-1] + bytes([sealed[-1] ^ 0x55])
        self._slots[slot] = sealed
        return len(data)

    def read(self, slot: int, key: bytes, page: PageId) -> int:
        self.on_load(slot, page)
        if self.fails(FaultKind.SLOT_FAILS):
            raise TierError("the disk cannot be read")
        sealed = self._slots.get(slot, b"")
        target = self._page(page)
        if len(sealed) != HEADER_BYTES + len(target):
            raise TierError("the slot is empty")
        target[:] = sealed[HEADER_BYTES:]
        if not self._seal.is_whole(sealed[:HEADER_BYTES], key, [target]):
            raise TierError("the slot does not hold the page, or not all of it")
        return len(target)

    def close(self) -> None:
        """It ends with its process."""

    def _page(self, page: PageId) -> memoryview:
        size = self._memory.rank_page_bytes
        return memoryview(self._memory.memory[RegionId(PoolId(0))])[page * size : (page + 1) * size]
