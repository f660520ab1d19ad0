"""Named sides, each with one region of bytes, joined pairwise: the small world of the conformance checks.

A check is written against `World` and never knows which library moves the bytes. Nothing here needs one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import Notification, RemoteRank, RemoteRegion, Transport, WriteId, WriteState
from tests.patience import PATIENCE_S

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


def registered(name: str, memory: bytearray, transport: Transport, region: Region) -> Side:
    """A side whose only region is `region`."""
    transport.register(region)
    return Side(PeerName(name), memory, transport, region)


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
