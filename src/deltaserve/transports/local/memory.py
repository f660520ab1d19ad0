"""Memory that one process writes and others only read, and the word that says whether it stood still meanwhile.

A reader that copies from a living writer cannot be stopped by it. So it asks afterwards: the writer's fence first makes
its epoch word say OVER and only then lets go of the pages. Whoever has copied and still reads STANDS has copied bytes
that nobody was allowed to change. That needs two orders: at the writer the word before anything the pages are used for
next, at the reader the copy before the word. x86-64 keeps both (stores stay in order, loads stay in order; string moves
are ordered by the locked instructions of the interpreter's hand-overs between threads and calls). A machine with weaker
order (aarch64) needs a full barrier after the store of the word (`dmb ish`) and a load barrier before it is read
(`dmb ishld`), which Python does not offer: there this transport is refused.

On a GPU the same holds across the device: the reader looks at the word after it has waited for the end of its copies,
and the writer gives the device nothing that writes to the pages before it has set the word. What a step wrote may be
read by anybody when the step has been waited for (`LaunchedStep.wait`), and its pages are offered only then: so the
reader needs no event of the writer's to wait for.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterable, Mapping

import numpy as np

from deltaserve.core.extents import Region
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import TransportError
from deltaserve.transports.local.memory_access import Addresses, HostMapping, MappedBlock, MemoryAccess, sealed_file

_WORD_BYTES = mmap.PAGESIZE
_STANDS, _OVER = 1, 2


def machine_problem() -> str | None:
    """Why pages cannot be read by others on this machine; None when they can."""
    found = platform.machine()
    return None if found in ("x86_64", "AMD64") else f"the order of memory accesses of {found} is not covered"


class EpochWord:
    """The epoch word of one endpoint: `end` is its fence as far as readers are concerned."""

    def __init__(self) -> None:
        self.file = sealed_file(_WORD_BYTES, "deltaserve-epoch")
        try:
            self._mapping = mmap.mmap(self.file, _WORD_BYTES)
        except OSError:
            os.close(self.file)
            raise
        self._word: ctypes.c_uint64 | None = ctypes.c_uint64.from_buffer(self._mapping)
        self._word.value = _STANDS

    def end(self) -> None:
        """What is copied from now on counts for nothing. Idempotent."""
        if self._word is None:
            return
        self._word.value = _OVER
        self._word = None
        self._mapping.close()
        os.close(self.file)


class FarMemory:
    """A writer's regions and its epoch word, mapped to be read. Does not own the files it is given."""

    def __init__(self, word: int, regions: Mapping[RegionId, tuple[int, int]], access: MemoryAccess) -> None:
        """`regions`: (file, bytes) of each. Raises TransportError for files that could harm us."""
        self._mappings: list[MappedBlock] = []
        try:
            self._word = ctypes.c_uint64.from_address(self._keep(HostMapping(word, _WORD_BYTES)))
            bases = {id: self._keep(access.map(file, num_bytes)) for id, (file, num_bytes) in regions.items()}
        except TransportError as error:
            self.close()
            raise TransportError(f"cannot map a peer's memory: {error}") from None
        self.table = RegionTable(Region(id, bases[id], num_bytes, "") for id, (_, num_bytes) in regions.items())

    def stands(self) -> bool:
        """Whether everything copied so far was in place all the time."""
        return self._word.value == _STANDS

    def close(self) -> None:
        """Unmap. Nothing may be copied from it, nor the word be read, afterwards."""
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()

    def _keep(self, mapping: MappedBlock) -> int:
        self._mappings.append(mapping)
        return mapping.address


class RegionTable:
    """Where regions are in this process: many spans are checked and located at once."""

    def __init__(self, regions: Iterable[Region]) -> None:
        known = sorted(regions, key=lambda region: region.id)
        self._ids = np.array([region.id for region in known], np.uint64)
        self._bases = np.array([region.base for region in known], np.uint64)
        self._sizes = np.array([region.num_bytes for region in known], np.uint64)

    def locate(self, ids: Addresses, offsets: Addresses, lengths: Addresses) -> Addresses | None:
        """Addresses of the spans; None when any of them is not wholly inside a region."""
        if not len(ids):
            return ids
        rows = np.searchsorted(self._ids, ids)
        if not len(self._ids) or rows.max() >= len(self._ids) or (self._ids[rows] != ids).any():
            return None
        sizes = self._sizes[rows]
        if (lengths == 0).any() or (lengths > sizes).any() or (offsets > sizes - lengths).any():
            return None
        return self._bases[rows] + offsets


class LocalRegions:
    """This side's regions, all on one device, and what maps and copies there."""

    def __init__(self, regions: Iterable[Region], access: MemoryAccess) -> None:
        self.all = tuple(regions)
        self.access = access
        self.table = RegionTable(self.all)
