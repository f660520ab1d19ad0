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
from deltaserve.control.transfer.slot_seal import HEADER_BYTES, SlotSeal
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.files.unnamed_file import open_unnamed
from deltaserve.core.ids import PageId, PoolId

_FULL = PoolId(0)


class CacheFile:
    """A TierStore (control/transfer/tier_plane.py): called from the transfer thread alone, for pages no step writes."""

    def __init__(self, folder: Path, num_slots: int, kv: KvPool, of_whom: str) -> None:
        """Sets aside all of its space on the disk of `folder`. Raises ConfigError."""
        arenas = [arena for arena in kv.arenas if kv.cache.pool_of(arena.layout.group) == _FULL]
        self._pages = [(memoryview(arena.bytes.numpy().data), arena.page_bytes) for arena in arenas]
        self._slot_bytes = slot_bytes(arenas)
        self._seal = SlotSeal(of_whom)
        self._header = bytearray(HEADER_BYTES)
        self._opened = open_unnamed(folder, num_slots * self._slot_bytes, "--cache-dir")
        self._file = self._opened.fileno()

    def write(self, slot: int, key: bytes, page: PageId) -> int:
        parts = self._parts(page)
        try:
            num_bytes = os.pwritev(self._file, [self._seal.header(key, parts), *parts], slot * self._slot_bytes)
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        return self._whole(num_bytes)

    def read(self, slot: int, key: bytes, page: PageId) -> int:
        parts = self._parts(page)
        try:
            num_bytes = os.preadv(self._file, [self._header, *parts], slot * self._slot_bytes)
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        self._whole(num_bytes)
        if not self._seal.is_whole(self._header, key, parts):
            raise TierError(f"slot {slot} does not hold the page that was stored there, or not all of it")
        return num_bytes

    def close(self) -> None:
        self._opened.close()

    def _parts(self, page: PageId) -> list[memoryview]:
        return [arena[page * size : (page + 1) * size] for arena, size in self._pages]

    def _whole(self, num_bytes: int) -> int:
        if num_bytes != self._slot_bytes:
            raise TierError(f"{num_bytes} of {self._slot_bytes} bytes of a slot were moved")
        return num_bytes


def slot_bytes(arenas: Sequence[Arena]) -> int:
    """Bytes of a slot of the file of a rank with these arenas."""
    return HEADER_BYTES + sum(arena.page_bytes for arena in arenas)
