"""Cores that the workers of one server divide: each computes on its own, and on any other while nobody does there."""

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

_PLACE_BYTES = 64
"""Bytes of a CorePlace in shared_cores.h."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's share of the cores. What differs between the workers is `place` and `own_threads`."""

    path: str
    """A file in a folder of this user alone; whoever comes first makes it."""
    place: int
    """Place of this worker: 0 .. num_places - 1."""
    num_places: int
    num_cores: int
    """Cores that all workers together compute on."""
    own_threads: int
    """Threads that compute whether a core is free or not; those beyond compute on cores where nobody else does."""


class SharedPage:
    """The page of a CoreShare, mapped."""

    def __init__(self, share: CoreShare) -> None:
        """Map the file of the workers' places. Raises OSError."""
        num_bytes = share.num_places * _PLACE_BYTES
        descriptor = os.open(Path(share.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # keeps what is there; a full disk says so now
            self._memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """Valid while this object lives."""
