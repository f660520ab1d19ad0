"""The memory of a puppet: private, shared host memory, host memory as a card's, or a GPU's."""

import importlib
import mmap
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from deltaserve.transports.local.memory_access import HostAccess, MemoryAccess, sealed_file
from tests.transports.host_card import HostCard


class PrivateMemory:
    """Memory of the host, and nobody else's."""

    device = "cpu"
    file: int | None = None

    def __init__(self, num_bytes: int) -> None:
        self.bytes: Any = self._map(num_bytes)  # [num_bytes] uint8, numpy's or torch's
        self.base: int = self._address()

    def access(self, device: str) -> MemoryAccess:
        raise NotImplementedError(device)

    def settle(self) -> None:
        """What was assigned to `bytes` is there for others."""

    def num_of(self, value: int) -> int:
        """Bytes that are `value`."""
        return sum(int(np.count_nonzero(self.bytes[part] == value)) for part in _parts(len(self.bytes)))

    def num_changed(self, before: Any, end: int | None) -> int:
        """Bytes below `end` (None: all) that differ from `before`."""
        parts = _parts(len(self.bytes[:end]))
        return sum(int(np.count_nonzero(self.bytes[part] != before[part])) for part in parts)

    def _map(self, num_bytes: int) -> Any:
        self._mapping = mmap.mmap(-1 if self.file is None else self.file, num_bytes)
        return np.frombuffer(self._mapping, dtype=np.uint8)

    def _address(self) -> int:
        return addressof(c_char.from_buffer(self._mapping))


class SharedMemory(PrivateMemory):
    """Memory of the host, in a file that peers map."""

    def __init__(self, num_bytes: int) -> None:
        self.file = sealed_file(num_bytes, "puppet")
        super().__init__(num_bytes)

    def access(self, device: str) -> MemoryAccess:
        return HostAccess()


class CardMemory(SharedMemory):
    """Memory of the host, in place of a card's."""

    device = "cuda:0"

    def access(self, device: str) -> MemoryAccess:
        return HostCard()


class CudaMemory(PrivateMemory):
    """Memory of the first GPU, as the arenas of a worker are allocated."""

    device = "cuda:0"

    def __init__(self, num_bytes: int) -> None:
        self._torch = importlib.import_module("torch")
        super().__init__(num_bytes)

    def access(self, device: str) -> MemoryAccess:
        access: Any = importlib.import_module("deltaserve.transports.local.cuda_access").CudaAccess(device)
        access.turn_bytes, access.slice_bytes = HostCard.turn_bytes, HostCard.slice_bytes  # to be met amid a write
        found: MemoryAccess = access
        return found

    def settle(self) -> None:
        self._torch.cuda.synchronize()

    def num_of(self, value: int) -> int:
        return int((self.bytes == value).sum())

    def num_changed(self, before: Any, end: int | None) -> int:
        return int((self.bytes[:end] != before[:end]).sum())

    def _map(self, num_bytes: int) -> Any:
        exported: Any = importlib.import_module("deltaserve.compute.memory.exported_memory")
        data, self.file = exported.exported_zeros(num_bytes, self._torch.device(self.device))
        return data

    def _address(self) -> int:
        return int(self.bytes.data_ptr())


def _parts(num_bytes: int) -> Iterator[slice]:
    """Parts so small that comparing one takes little memory: to touch new pages takes longer than to compare."""
    return (slice(start, min(start + _PART, num_bytes)) for start in range(0, num_bytes, _PART))


_PART = 1 << 16
PuppetMemory = PrivateMemory
MEMORY: dict[str, Callable[[int], PuppetMemory]] = {"host": SharedMemory, "card": CardMemory, "cuda": CudaMemory}
