"""A card made of host memory: the seam of a GPU's memory (`MemoryAccess`) where there is none.

Its memory is sealed files, which other processes map as they map a card's allocations by their descriptors. Its one
stream is a thread beside the one that asks: it copies the pieces of a table by their addresses, as the kernel does.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from deltaserve.transports.local.memory_access import Addresses, HostAccess, HostMapping
from deltaserve.transports.local.pieces import cut

NUM_PROGRAMS = 3


class HostCard:
    """Behind `MemoryAccess`, as `CudaAccess` is."""

    turn_bytes = 16 << 20
    slice_bytes = 8 << 20

    def __init__(self) -> None:
        self._host = HostAccess()
        self._stream = ThreadPoolExecutor(1, "stream")

    def check(self, file: int, num_bytes: int) -> None:
        self._host.check(file, num_bytes)

    def map(self, file: int, num_bytes: int) -> HostMapping:
        return self._host.map(file, num_bytes)

    def copy(self, targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
        self._stream.submit(run_pieces, cut(targets, sources, lengths).table).result()


def run_pieces(table: npt.NDArray[np.int64]) -> None:
    """What the kernel does with a table [3, pieces]: each program has every so many-th piece."""
    pieces = table.T.tolist()
    for program in range(NUM_PROGRAMS):
        for target, source, num_bytes in pieces[program::NUM_PROGRAMS]:
            ctypes.memmove(target, source, num_bytes)
