"""How memory of a kind of device is mapped from another process and copied: the seam below the local transport, and the
host's memory behind it. A GPU's: `cuda_access.py`.
"""

import ctypes
import fcntl
import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltaserve.core.transport import TransportError

Addresses = npt.NDArray[np.uint64]

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""A file without these can be made shorter under a reader, which then dies of SIGBUS."""
_HELD_BYTES = 256 << 10
"""A copy up to this size (some 50 us) keeps the interpreter lock: to give it up each time can cost a thread switch."""

_MOVE_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move = ctypes.CDLL(None).memmove
_move.argtypes, _move.restype = _MOVE_TYPES, ctypes.c_void_p
_move_held = ctypes.PyDLL(None).memmove
_move_held.argtypes, _move_held.restype = _MOVE_TYPES, ctypes.c_void_p


class MappedBlock(Protocol):
    """A block of another process's memory, as this one sees it."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Unmap. Idempotent."""
        ...


class MemoryAccess(Protocol):
    """Memory of one kind of device. Called from one thread."""

    @property
    def turn_bytes(self) -> int:
        """Most bytes that one call of the transport copies."""
        ...

    @property
    def slice_bytes(self) -> int:
        """Most bytes that are copied for one peer in a row while another one waits."""
        ...

    def check(self, file: int, num_bytes: int) -> None:
        """Raises TransportError unless peers can map these bytes of the file, now and later."""
        ...

    def map(self, file: int, num_bytes: int) -> MappedBlock:
        """Map a peer's memory, to be read. The file may be closed then. Raises TransportError."""
        ...

    def copy(self, targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
        """Copy spans, in any order. When it returns, also by an error, nothing of it is under way any more.

        Raises TransportError when the device is lost.
        """
        ...


def check_sealed(file: int, num_bytes: int) -> None:
    """Raises TransportError unless the file holds `num_bytes` and always will."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _FIXED_SIZE != _FIXED_SIZE or os.fstat(file).st_size < num_bytes:
        raise TransportError("memory of another size than announced, or one that can change")


def sealed_file(num_bytes: int, name: str) -> int:
    """Descriptor of zeroed memory that anybody it is handed to may map, and whose size nobody can change."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except OSError:
        os.close(file)
        raise
    return file


class HostMapping:
    """A sealed file, mapped to be read."""

    def __init__(self, file: int, num_bytes: int) -> None:
        """Raises TransportError."""
        check_sealed(file, num_bytes)
        try:
            self._mapping = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransportError(str(error)) from None
        self.address = int(np.frombuffer(self._mapping, np.uint8).__array_interface__["data"][0])

    def close(self) -> None:
        self._mapping.close()


class HostAccess:
    """Memory of the host: sealed files, copied by the thread that asks."""

    turn_bytes = 16 << 20
    """Some 4 ms."""
    slice_bytes = 4 << 20

    def check(self, file: int, num_bytes: int) -> None:
        check_sealed(file, num_bytes)

    def map(self, file: int, num_bytes: int) -> HostMapping:
        return HostMapping(file, num_bytes)

    def copy(self, targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
        for dst, src, num_bytes in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            (_move_held if num_bytes <= _HELD_BYTES else _move)(dst, src, num_bytes)
