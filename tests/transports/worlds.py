"""The same small world over each adapter: named sides, each with one region of bytes, joined pairwise.

A conformance check is written against `World` and never knows which library moves the bytes.
"""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import Notification, RemoteRank, RemoteRegion, Transport, WriteId, WriteState
from deltaserve.sim.loopback import Fabric, LoopbackTransport
from deltaserve.transports.local.memory import sealed_file
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.mooncake.transport import MooncakeTransport
from deltaserve.transports.nixl.options import NixlOptions
from deltaserve.transports.nixl.transport import NixlTransport
from tests.patience import PATIENCE_S

NIXL_OPTIONS = NixlOptions(tls="tcp,self", net_devices="lo")
REGION = RegionId(7)


@dataclass(slots=True)
class Side:
    """A worker as the transport sees it."""

    name: PeerName
    memory: bytearray
    transport: Transport
    region: Region

    @property
    def remote_region(self) -> RemoteRegion:
        return RemoteRegion(self.region.id, self.region.base, self.region.num_bytes, self.region.device)

    def rank(self, metadata: bytes) -> RemoteRank:
        """As a peer sees it."""
        return RemoteRank(metadata, (self.remote_region,))


class World(Protocol):
    """Makes sides, and lets a little time pass."""

    def side(self, name: str, num_bytes: int) -> Side: ...

    def pause(self) -> None: ...

    def close(self) -> None: ...


class LoopbackWorld:
    def __init__(self) -> None:
        self.fabric = Fabric()

    def side(self, name: str, num_bytes: int) -> Side:
        memory = bytearray(num_bytes)
        transport = LoopbackTransport(PeerName(name), self.fabric, {REGION: memory})
        return _registered(name, memory, transport, base=1 << 20)

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


class LocalWorld:
    """Both sides in this process. A reader copies while it is polled, and only then: a pause lets everybody."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="local-"))
        self._sides: list[Side] = []
        self._files: list[int] = []

    def side(self, name: str, num_bytes: int) -> Side:
        file = sealed_file(num_bytes, "side")
        self._files.append(file)
        mapping = mmap.mmap(file, num_bytes)
        base = addressof(c_char.from_buffer(mapping))
        memory = cast(bytearray, memoryview(mapping))  # sliced, compared and assigned as one
        self._sides.append(_registered(name, memory, LocalTransport(self.folder), base, file))
        return self._sides[-1]

    def pause(self) -> None:
        for side in self._sides:
            side.transport.poll(WriteId(0))

    def close(self) -> None:
        for side in self._sides:
            side.transport.close()
        for file in self._files:
            os.close(file)
        shutil.rmtree(self.folder)


def _registered(name: str, memory: bytearray, transport: Transport, base: int, file: int | None = None) -> Side:
    region = Region(REGION, base, len(memory), "cpu", file)
    transport.register(region)
    return Side(PeerName(name), memory, transport, region)


WORLDS: dict[str, Callable[[], World]] = {
    "loopback": LoopbackWorld,
    "local": LocalWorld,
    "nixl": NixlWorld,
    "mooncake": MooncakeWorld,
}


def join(a: Side, b: Side) -> None:
    """Open and attach both ends."""
    of_a, of_b = a.transport.open(b.name), b.transport.open(a.name)
    a.transport.attach(b.name, [b.rank(of_b)])
    b.transport.attach(a.name, [a.rank(of_a)])


def join_ranks(ours: Sequence[Side], theirs: Sequence[Side]) -> None:
    """Two workers of several ranks each: every rank is attached to all ranks of the other."""
    of_ours = [side.rank(side.transport.open(theirs[0].name)) for side in ours]
    of_theirs = [side.rank(side.transport.open(ours[0].name)) for side in theirs]
    for side in ours:
        side.transport.attach(theirs[0].name, of_theirs)
    for side in theirs:
        side.transport.attach(ours[0].name, of_ours)


def copy(src: int, dst: int, num_bytes: int) -> Copy:
    return Copy(Span(REGION, src, num_bytes), Span(REGION, dst, num_bytes))


def until(world: World, done: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up, f"{what} did not happen"
        world.pause()


def finish(world: World, side: Side, write: WriteId) -> WriteState:
    """Poll a write to its end."""
    states: list[WriteState] = []

    def ended() -> bool:
        states.append(side.transport.poll(write))
        return states[-1] is not WriteState.PENDING

    until(world, ended, f"the end of write {write}")
    return states[-1]


def receive(world: World, side: Side, count: int = 1) -> list[tuple[PeerName, bytes]]:
    """Poll until `count` notifications are there, of peers of one rank."""
    return [(peer, data) for peer, data, _ in hear(world, side, count)]


def hear(world: World, side: Side, count: int = 1) -> list[Notification]:
    """Poll until `count` notifications are there."""
    arrived: list[Notification] = []

    def complete() -> bool:
        arrived.extend(side.transport.notifications())
        return len(arrived) >= count

    until(world, complete, f"{count} notifications")
    return arrived


def pattern(num_bytes: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat, different for each seed."""
    return b"".join(((i * 2654435761 + seed * 40503) & 0xFFFFFFFF).to_bytes(4, "little") for i in range(num_bytes // 4))
