"""Memory of a GPU that other processes may map, by CUDA's driver library.

What torch allocates is a part of a larger segment, all of which its IPC handle would open, and what becomes of memory
that another process has open when its owner dies is undefined. So such memory is an allocation of its own
(cuMemCreate) with a file descriptor: whoever it is handed to maps this allocation and nothing else, and it stays while
anybody has it mapped, as with a memfd.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from deltaserve.core.errors import DeltaserveError

_PINNED, _ON_DEVICE, _AS_FILE = 1, 1, 1
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
_READ, _READ_AND_WRITE = 1, 3
"""CU_MEM_ACCESS_FLAGS_PROT_READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class CudaError(DeltaserveError):
    """The driver is missing or refuses; the text names the call."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_handle", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
}


class CudaLibrary:
    """The driver's library. Nothing is allocated, and no context made."""

    def __init__(self) -> None:
        """Raises CudaError."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver library: {error}") from None
        for name, types in _CALLS.items():
            self._function(name).argtypes = types
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError."""
        status = self._function(name)(*arguments)
        if status:
            text = c_char_p()
            self._function("cuGetErrorString")(status, byref(text))
            raise CudaError(f"{name}: {(text.value or b'').decode(errors='replace') or status}")

    def device(self, ordinal: int) -> int:
        """The driver's number of a device. `ordinal`: as torch counts. Raises CudaError."""
        found = c_int()
        self.call("cuDeviceGet", byref(found), ordinal)
        return found.value

    def reaches(self, ordinal: int, other: int) -> bool:
        """Whether a device reads another one's memory. Raises CudaError."""
        can = c_int()
        self.call("cuDeviceCanAccessPeer", byref(can), self.device(ordinal), self.device(other))
        return bool(can.value)

    def _function(self, name: str) -> Any:
        return getattr(self._library, name)


class CudaMapping:
    """An allocation as this process sees it, until `close`."""

    def __init__(self, driver: "CudaDriver", address: int, reserved: int) -> None:
        self.address = address
        self._driver = driver
        self._reserved = reserved

    def close(self) -> None:
        """Unmap: nothing on the device may use it any more. Idempotent. Raises CudaError."""
        if not self._reserved:
            return
        reserved, self._reserved = self._reserved, 0
        self._driver.call("cuMemUnmap", self.address, reserved)
        self._driver.call("cuMemAddressFree", self.address, reserved)


class CudaDriver:
    """The driver, for one device. The process has a context on it."""

    def __init__(self, ordinal: int) -> None:
        """`ordinal`: as torch counts. Raises CudaError."""
        library = CudaLibrary()
        self.call = library.call
        self._location = _Location(_ON_DEVICE, library.device(ordinal))
        self._properties = _Properties(_PINNED, _AS_FILE, self._location)
        granularity = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
        self._granularity = granularity.value

    def allocate(self, num_bytes: int) -> tuple[CudaMapping, int]:
        """Memory with any content, and a descriptor of it, which the caller closes. Raises CudaError."""
        handle, file = c_uint64(), c_int(-1)
        self.call("cuMemCreate", byref(handle), self._rounded(num_bytes), byref(self._properties), 0)
        try:
            self.call("cuMemExportToShareableHandle", byref(file), handle, _AS_FILE, 0)
            os.set_inheritable(file.value, False)
            return self._mapped(handle, num_bytes, _READ_AND_WRITE), file.value
        except CudaError:
            if file.value >= 0:
                os.close(file.value)
            raise
        finally:
            self.call("cuMemRelease", handle)  # the mapping and the descriptor keep it

    def map(self, file: int, num_bytes: int) -> CudaMapping:
        """Memory of another process, or of another device, to be read. Raises CudaError, also where the descriptor
        stands for less memory, or for none."""
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), _AS_FILE)
        try:
            return self._mapped(handle, num_bytes, _READ)
        finally:
            self.call("cuMemRelease", handle)

    def _mapped(self, handle: c_uint64, num_bytes: int, access: int) -> CudaMapping:
        address, size = c_uint64(), self._rounded(num_bytes)
        self.call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        try:
            self.call("cuMemMap", address, size, 0, handle, 0)
        except CudaError:
            self.call("cuMemAddressFree", address, size)
            raise
        mapping = CudaMapping(self, address.value, size)
        try:
            self._allow(mapping.address, size, access)
        except CudaError:
            mapping.close()
            raise
        return mapping

    def _allow(self, address: int, size: int, access: int) -> None:
        """Raises CudaError, for memory of another device also where this one cannot reach it."""
        try:
            self.call("cuMemSetAccess", address, size, byref(_Access(self._location, access)), 1)
        except CudaError:
            if access != _READ:
                raise
            # Drivers that know no memory which is only read give access to write as well.
            self.call("cuMemSetAccess", address, size, byref(_Access(self._location, _READ_AND_WRITE)), 1)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity
