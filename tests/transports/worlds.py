"""The same small world (`sides.py`) over each adapter."""

import mmap
import os
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import cast

from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Transport
from deltaserve.sim.loopback import Fabric, LoopbackTransport
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.mooncake.transport import MooncakeTransport
from deltaserve.transports.nixl.transport import NixlTransport
from tests.transports.local_world import CardWorld, LocalWorld
from tests.transports.puppets import NIXL_OPTIONS
from tests.transports.sides import REGION, Side, World, registered


class LoopbackWorld:
    def __init__(self) -> None:
        self.fabric = Fabric()

    def side(self, name: str, num_bytes: int) -> Side:
        memory = bytearray(num_bytes)
        transport = LoopbackTransport(PeerName(name), self.fabric, {REGION: memory})
        return _registered(name, memory, transport, 1 << 20)

    def pause(self) -> None:
        self.fabric.advance(self.fabric.now + 0.001)

    def close(self) -> None:
        """Nothing outlives the objects."""


class NixlWorld:
    """Both sides in this process: the library does not care, and only some rows need a second one."""

    def __init__(self) -> None:
        self._sides: list[Side] = []

    def side(self, name: str, num_bytes: int) -> Side:
        memory = bytearray(num_bytes)
        transport = NixlTransport(PeerName(name), Boot(len(self._sides) + 1), NIXL_OPTIONS)
        base = addressof((c_char * num_bytes).from_buffer(memory))
        self._sides.append(_registered(name, memory, transport, base))
        return self._sides[-1]

    def pause(self) -> None:
        time.sleep(0.001)

    def close(self) -> None:
        for side in self._sides:
            side.transport.close()


class MooncakeWorld:
    """Both sides in this process, each with engines in processes of their own."""

    def __init__(self) -> None:
        self._sides: list[Side] = []
        self._files: list[int] = []

    def side(self, name: str, num_bytes: int) -> Side:
        file = os.memfd_create(name.replace("/", "-"))
        self._files.append(file)
        os.ftruncate(file, num_bytes)
        mapping = mmap.mmap(file, num_bytes)
        base = addressof(c_char.from_buffer(mapping))
        memory = cast(bytearray, memoryview(mapping))  # sliced, compared and assigned as one
        self._sides.append(_registered(name, memory, MooncakeTransport(MooncakeOptions()), base, file))
        return self._sides[-1]

    def pause(self) -> None:
        time.sleep(0.001)

    def close(self) -> None:
        for side in self._sides:
            side.transport.close()
        for file in self._files:
            os.close(file)


def _registered(name: str, memory: bytearray, transport: Transport, base: int, file: int | None = None) -> Side:
    return registered(name, memory, transport, Region(REGION, base, len(memory), "cpu", file))


WORLDS: dict[str, Callable[[], World]] = {
    "loopback": LoopbackWorld,
    "local": LocalWorld,
    "local on a card": CardWorld,
    "nixl": NixlWorld,
    "mooncake": MooncakeWorld,
}
