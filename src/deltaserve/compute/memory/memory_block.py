"""Memory that peers may reach: allocated once, as private as the transport allows."""

import contextlib
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from deltaserve.compute.memory.exported_memory import exported_zeros
from deltaserve.core.extents import Region
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import Sharing
from deltaserve.transports.cuda_driver import CudaError

_log = logging.getLogger(__name__)

_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which Python names from 3.13 on: what is mapped stays writable, nothing else becomes it."""
_READ_ONLY_TO_OTHERS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _FUTURE_WRITE

DeviceAllocator = Callable[[int, torch.device], Tensor]
"""(bytes, device) |-> [bytes] uint8, zeroed, of memory that the transport can register; it lives as long as the tensor.

The hook for memory from a pool of one's own. What torch allocates (cudaMalloc) cannot be mapped by another GPU over
NVLink; what comes from cuMemCreate can: such a pool is a `torch.cuda.MemPool` around an allocator of the platform, and
the function given here allocates under `torch.cuda.use_mem_pool`.
"""


def zeros_on(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory from torch's own allocator."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class MemoryBlock:
    """Zeroed bytes on one device. On the CPU page aligned, and backed by memory when first touched."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        sharing: Sharing = Sharing.PRIVATE,
        allocate: DeviceAllocator | None = None,
    ) -> None:
        """`allocate`: for devices other than the CPU. None: torch's own, or what peers can map where they read it."""
        self.file: int | None = None
        """Descriptor of shared memory; closed with this object."""
        if device.type == "cuda" and sharing is Sharing.READERS and allocate is None and num_bytes:
            self._export(num_bytes, device)
        elif device.type != "cpu" or num_bytes == 0:
            self.data = (allocate or zeros_on)(num_bytes, device)  # [num_bytes]
            if (self.data.numel(), self.data.dtype) != (num_bytes, torch.uint8):
                raise ValueError(f"an allocator gave {self.data.numel()} x {self.data.dtype} for {num_bytes} bytes")
        elif sharing is Sharing.PRIVATE:
            self.data = _tensor(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        else:
            self.file = os.memfd_create("deltaserve-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, num_bytes)
            self.data = _tensor(mmap.mmap(self.file, num_bytes, flags=mmap.MAP_SHARED))
            if sharing is Sharing.READERS:
                fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _READ_ONLY_TO_OTHERS)

    def _export(self, num_bytes: int, device: torch.device) -> None:
        """Where there is no such memory the transport says so when it is to move some: a worker without peers needs
        none."""
        try:
            self.data, self.file = exported_zeros(num_bytes, device)
        except CudaError as error:
            _log.warning("no memory of %s that other processes could map: %s", device, error)
            self.data = zeros_on(num_bytes, device)
        else:
            weakref.finalize(self, os.close, self.file)

    def region(self, id: RegionId) -> Region:
        return Region(id, self.data.data_ptr(), self.data.numel(), str(self.data.device), self.file)


def _tensor(mapping: mmap.mmap) -> Tensor:
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
