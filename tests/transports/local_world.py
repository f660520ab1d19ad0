"""The local transport between sides of this process: over memory of the host, and over what stands for a card's."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from ctypes import addressof, c_char
from pathlib import Path
from typing import cast

from deltaserve.core.extents import Region
from deltaserve.core.transport import WriteId
from deltaserve.transports.local.memory_access import HostAccess, MemoryAccess, sealed_file
from deltaserve.transports.local.transport import LocalTransport
from tests.transports.host_card import HostCard
from tests.transports.sides import REGION, Side, registered


class LocalWorld:
    """A reader copies while it is polled, and only then: a pause lets everybody."""

    device = "cpu"

    def __init__(self, make_access: Callable[[], MemoryAccess] = HostAccess) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="local-"))
        self._make_access = make_access
        self._sides: list[Side] = []
        self._files: list[int] = []

    def side(self, name: str, num_bytes: int) -> Side:
        memory, base, file = self.allocate(num_bytes)
        self._files.append(file)
        transport = LocalTransport(self.folder, lambda _: self._make_access())
        self._sides.append(registered(name, memory, transport, Region(REGION, base, num_bytes, self.device, file)))
        return self._sides[-1]

    def allocate(self, num_bytes: int) -> tuple[bytearray, int, int]:
        """Memory of a side, its address, and a descriptor of it."""
        file = sealed_file(num_bytes, "side")
        mapping = mmap.mmap(file, num_bytes)
        base = addressof(c_char.from_buffer(mapping))
        return cast(bytearray, memoryview(mapping)), base, file  # sliced, compared and assigned as one

    def pause(self) -> None:
        for side in self._sides:
            side.transport.poll(WriteId(0))

    def close(self) -> None:
        for side in self._sides:
            side.transport.close()
        for file in self._files:
            os.close(file)
        shutil.rmtree(self.folder)


class CardWorld(LocalWorld):
    """The way of a GPU's memory, with host memory behind its seam."""

    device = "cuda:0"

    def __init__(self) -> None:
        super().__init__(HostCard)
