"""Memory that peers may reach: allocated once, as private as the transport allows."""

import contextlib
import mmap
import os
import weakref
from enum import Enum

import torch
from torch import Tensor

from deltaserve.base.extents import Region
from deltaserve.base.ids import RegionId


class Sharing(Enum):
    """Who may map a block of CPU memory. The kernel gives huge pages to private memory more readily."""

    PRIVATE = "private"
    PROCESSES = "processes"
    """Also a process to which the block's file is handed: a transport whose library runs in a child process."""


class MemoryBlock:
    """Zeroed bytes on one device. On the CPU page aligned, and backed by memory when first touched."""

    def __init__(self, num_bytes: int, device: torch.device, sharing: Sharing = Sharing.PRIVATE) -> None:
        self.file: int | None = None
        """Descriptor of shared memory; closed with this object."""
        if device.type != "cpu" or num_bytes == 0:
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)  # [num_bytes]
        elif sharing is Sharing.PRIVATE:
            self.data = _tensor(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        else:
            self.file = os.memfd_create("deltaserve-pages")
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, num_bytes)
            self.data = _tensor(mmap.mmap(self.file, num_bytes, flags=mmap.MAP_SHARED))

    def region(self, id: RegionId) -> Region:
        return Region(id, self.data.data_ptr(), self.data.numel(), str(self.data.device), self.file)


def _tensor(mapping: mmap.mmap) -> Tensor:
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
