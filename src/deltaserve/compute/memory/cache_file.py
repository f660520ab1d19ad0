"""The file under the tree, of one rank with pages on the CPU: slots of a header and a page each.

Pages are read and written by single calls on the file, not through a mapping: what the disk cannot give is an error of
that call, and never a signal that ends the process. What was used lately is in the system's page cache, and so a slot
is mostly had by a copy in memory.

The file has no name: whatever ends the process, its space is given back, and nobody else can open it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from deltaserve.compute.memory.arena import Arena
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.control.transfer.commands import SlotCopy
from deltaserve.control.transfer.slot_seal import HEADER_BYTES, SlotSeal
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.files.unnamed_file import open_unnamed
from deltaserve.core.ids import PageId


class CacheFile:
    """A TierStore (control/transfer/tier_plane.py): called from the transfer thread alone, for pages no step writes.

    The slots of one pool follow those of the pool before it.
    """

    def __init__(self, folder: Path, num_slots: Sequence[int], kv: KvPool, of_whom: str) -> None:
        """`num_slots`: of each pool. Sets aside all of its space on the disk of `folder`. Raises ConfigError."""
        self._pools: list[_SlotsOfPool] = []
        end = 0
        for pool, count in enumerate(num_slots):
            arenas = [arena for arena in kv.arenas if kv.cache.pool_of(arena.layout.group) == pool]
            slots = _SlotsOfPool(arenas, end, SlotSeal(f"{of_whom} pool {pool}"))
            self._pools.append(slots)
            end += count * slots.slot_bytes
        self._header = bytearray(HEADER_BYTES)
        self._opened = open_unnamed(folder, end, "--cache-dir")
        self._file = self._opened.fileno()

    def write(self, copy: SlotCopy) -> int:
        slots = self._pools[copy.pool]
        parts = slots.parts(copy.page)
        try:
            num_bytes = os.pwritev(self._file, [slots.seal.header(copy.key, parts), *parts], slots.offset(copy.slot))
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        return slots.whole(num_bytes)

    def read(self, copy: SlotCopy) -> int:
        slots = self._pools[copy.pool]
        parts = slots.parts(copy.page)
        try:
            num_bytes = os.preadv(self._file, [self._header, *parts], slots.offset(copy.slot))
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        slots.whole(num_bytes)
        if not slots.seal.is_whole(self._header, copy.key, parts):
            raise TierError(f"slot {copy.slot} does not hold the page that was stored there, or not all of it")
        return num_bytes

    def close(self) -> None:
        self._opened.close()


class _SlotsOfPool:
    """Where the slots of one pool are, and the pages that go with them."""

    def __init__(self, arenas: Sequence[Arena], start: int, seal: SlotSeal) -> None:
        """`arenas`: of all groups of the pool. `start`: offset of its first slot."""
        self._pages = [(memoryview(arena.bytes.numpy().data), arena.page_bytes) for arena in arenas]
        self._start = start
        self.seal = seal
        self.slot_bytes = HEADER_BYTES + sum(arena.page_bytes for arena in arenas)

    def offset(self, slot: int) -> int:
        return self._start + slot * self.slot_bytes

    def parts(self, page: PageId) -> list[memoryview]:
        """The bytes of a page, of each group."""
        return [arena[page * size : (page + 1) * size] for arena, size in self._pages]

    def whole(self, num_bytes: int) -> int:
        """`num_bytes`, if that is a slot. Raises TierError."""
        if num_bytes != self.slot_bytes:
            raise TierError(f"{num_bytes} of {self.slot_bytes} bytes of a slot were moved")
        return num_bytes
