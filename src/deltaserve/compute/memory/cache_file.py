"""The file under the tree, of one rank: slots of a header and a page each.

Pages are read and written by single calls on the file, not through a mapping: what the disk cannot give is an error of
that call, and never a signal that ends the process. What was used lately is in the system's page cache, and so a slot
is mostly had by a copy in memory.

Pages of a GPU go through a buffer of one slot that the GPU copies from and to by itself. There a slot is checked before
any of it is written to the page; on a CPU it is read in place, and a page that nobody else knows of is given up.

The file has no name: whatever ends the process, its space is given back, and nobody else can open it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

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

    def __init__(
        self,
        folder: Path,
        num_slots: Sequence[int],
        kv: KvPool,
        of_whom: str,
        pages: "Callable[[Sequence[Arena]], PoolPages] | None" = None,
    ) -> None:
        """`num_slots`: of each pool. `pages`: how those of a pool are had; None: as their device has them. Sets aside
        all of its space on the disk of `folder`. Raises ConfigError."""
        pages = pages_of if pages is None else pages
        self._pools: list[_SlotsOfPool] = []
        end = 0
        for pool, count in enumerate(num_slots):
            arenas = [arena for arena in kv.arenas if kv.cache.pool_of(arena.layout.group) == pool]
            slots = _SlotsOfPool(pages(arenas), end, SlotSeal(f"{of_whom} pool {pool}"))
            self._pools.append(slots)
            end += count * slots.slot_bytes
        self._header = bytearray(HEADER_BYTES)
        self._opened = open_unnamed(folder, end, "--cache-dir")
        self._file = self._opened.fileno()

    def write(self, copy: SlotCopy) -> int:
        slots = self._pools[copy.pool]
        parts = slots.pages.of_page(copy.page)
        try:
            num_bytes = os.pwritev(self._file, [slots.seal.header(copy.key, parts), *parts], slots.offset(copy.slot))
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        return slots.whole(num_bytes)

    def read(self, copy: SlotCopy) -> int:
        slots = self._pools[copy.pool]
        parts = slots.pages.place_for(copy.page)
        try:
            num_bytes = os.preadv(self._file, [self._header, *parts], slots.offset(copy.slot))
        except OSError as error:
            raise TierError(error.strerror or str(error)) from None
        slots.whole(num_bytes)
        if not slots.seal.is_whole(self._header, copy.key, parts):
            raise TierError(f"slot {copy.slot} does not hold the page that was stored there, or not all of it")
        slots.pages.settle(copy.page)
        return num_bytes

    def close(self) -> None:
        self._opened.close()


class PoolPages(Protocol):
    """The pages of one pool, as bytes that a file is written from and read into."""

    page_bytes: int
    """Bytes of a page, of all groups."""

    def of_page(self, page: PageId) -> list[memoryview]:
        """What the page holds, group by group; valid until the next call."""
        ...

    def place_for(self, page: PageId) -> list[memoryview]:
        """Where to read what the page is to hold."""
        ...

    def settle(self, page: PageId) -> None:
        """What was read there is right: when this returns the page holds it."""
        ...


def pages_of(arenas: Sequence[Arena]) -> PoolPages:
    """Those of arenas of one device, of all groups of a pool."""
    return HostPages(arenas) if all(arena.bytes.device.type == "cpu" for arena in arenas) else DevicePages(arenas)


class HostPages:
    """PoolPages in memory of the CPU: read and written in place."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = [(memoryview(arena.bytes.numpy().data), arena.page_bytes) for arena in arenas]
        self.page_bytes = sum(arena.page_bytes for arena in arenas)

    def of_page(self, page: PageId) -> list[memoryview]:
        return [arena[page * size : (page + 1) * size] for arena, size in self._arenas]

    def place_for(self, page: PageId) -> list[memoryview]:
        return self.of_page(page)

    def settle(self, page: PageId) -> None:
        """It was read in place."""


class DevicePages:
    """PoolPages in memory of a GPU, copied by way of a pinned buffer on the current stream of the thread."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas
        self._device = arenas[0].bytes.device
        self.page_bytes = sum(arena.page_bytes for arena in arenas)
        self._buffer = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        sizes = [arena.page_bytes for arena in arenas]
        self._parts = list(torch.split(self._buffer, sizes))

    def of_page(self, page: PageId) -> list[memoryview]:
        for arena, part in zip(self._arenas, self._parts, strict=True):
            part.copy_(_page(arena, page), non_blocking=True)
        self._wait()
        return self.place_for(page)

    def place_for(self, page: PageId) -> list[memoryview]:
        return [memoryview(part.numpy().data) for part in self._parts]

    def settle(self, page: PageId) -> None:
        for arena, part in zip(self._arenas, self._parts, strict=True):
            _page(arena, page).copy_(part, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _page(arena: Arena, page: PageId) -> Tensor:
    return arena.bytes[page * arena.page_bytes : (page + 1) * arena.page_bytes]


@dataclass(frozen=True, slots=True)
class _SlotsOfPool:
    """Where the slots of one pool are, and the pages that go with them."""

    pages: PoolPages
    start: int
    """Offset of its first slot."""
    seal: SlotSeal

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.pages.page_bytes

    def offset(self, slot: int) -> int:
        return self.start + slot * self.slot_bytes

    def whole(self, num_bytes: int) -> int:
        """`num_bytes`, if that is a slot. Raises TierError."""
        if num_bytes != self.slot_bytes:
            raise TierError(f"{num_bytes} of {self.slot_bytes} bytes of a slot were moved")
        return num_bytes
