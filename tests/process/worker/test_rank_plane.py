"""The data planes of a worker's ranks as one, over real sockets: what its transfer thread sees of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    ChunkSent,
    EndpointAttached,
    EndpointOpened,
    FencePeer,
    Landed,
    OpenEndpoint,
    OpenGate,
    PagePairs,
    PeerFenced,
    PostChunk,
    TicketId,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.rank_plane import RankPlane, RankTurns, take_entries
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, TicketSeq
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.transport import FenceResult
from deltaserve.process.children.exits import Exit
from deltaserve.process.links.rank_link import RankSocket, RankSockets
from deltaserve.process.worker.rank_group import RankLost, failed_rank_ends_process
from deltaserve.process.worker.rank_log import RankChannel
from deltaserve.sim.loopback import Fabric
from tests.control.transfer.ranked import RankedWorker
from tests.patience import PATIENCE_S
from tests.process.worker.server import wait_until

P, D = PeerName("prefill-0"), PeerName("decode-0")
TICKET = TicketId(Boot(2), Boot(1), TicketSeq(1))
CACHE = CacheSpec(4, (PageGroup("kv", 2, 4, 8, DType.FLOAT32),))
NUM_PAGES = 16


@dataclass
class EndpointPlane:
    """One rank's plane; remembers whether it was told that a ticket is open."""

    endpoint: Endpoint
    is_expecting: bool = False

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        return self.endpoint.perform(command, now)

    def poll(self, now: float) -> list[TransferReport]:
        return self.endpoint.poll(now)

    def is_idle(self) -> bool:
        return self.endpoint.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        self.is_expecting = is_active

    def close(self) -> None:
        pass


class World:
    """A writing worker and a reading one, each of two ranks; rank 1 of each is spoken to through sockets."""

    def __init__(self, sockets: RankSockets, folder: Path) -> None:
        self.fabric = Fabric()
        self.channels: list[RankChannel] = []
        self.sockets_of_rank_1: dict[PeerName, RankSocket] = {}
        self.followers: list[tuple[RankTurns, RankChannel]] = []
        self.planes: dict[PeerName, list[EndpointPlane]] = {}
        self.workers = {name: RankedWorker(name, self.fabric, CACHE, 2, NUM_PAGES) for name in (P, D)}
        self.whole = {name: self._joined(name, sockets, folder) for name in (P, D)}
        self.heard: list[tuple[PeerName, TransferReport]] = []

    def _joined(self, name: PeerName, sockets: RankSockets, folder: Path) -> RankPlane:
        own, other = self.planes[name] = [EndpointPlane(endpoint) for endpoint in self.workers[name].endpoints]
        ours = self._channel(sockets.bind(f"ipc://{folder / name}"))
        self.sockets_of_rank_1[name] = sockets.connect(f"ipc://{folder / name}")
        theirs = self._channel(self.sockets_of_rank_1[name])
        self.followers.append((RankTurns(other, theirs, lambda: self.fabric.now), theirs))
        return RankPlane(own, [ours], PATIENCE_S)

    def _channel(self, socket: RankSocket) -> RankChannel:
        channel = RankChannel(socket, PATIENCE_S)
        self.channels.append(channel)
        return channel

    def tell(self, name: PeerName, command: TransferCommand) -> None:
        reports = self.whole[name].perform(command, self.fabric.now)
        self.heard += [(name, report) for report in reports]

    def turn(self) -> None:
        self.fabric.advance(self.fabric.now + 0.001)
        for turns, channel in self.followers:
            turns.turn(take_entries(channel, 0.0))
        for name, plane in self.whole.items():
            with failed_rank_ends_process():
                self.heard += [(name, report) for report in plane.poll(self.fabric.now)]

    def until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        wait_until(turned)

    def told(self, name: PeerName, kind: type[TransferReport]) -> list[TransferReport]:
        return [report for who, report in self.heard if who == name and isinstance(report, kind)]

    def connect(self) -> None:
        self.tell(D, OpenEndpoint(P, 1))
        self.until(lambda: bool(self.told(D, EndpointOpened)))
        (opened,) = self.told(D, EndpointOpened)
        assert isinstance(opened, EndpointOpened)
        self.tell(P, OpenEndpoint(D, 1, opened.ends))
        self.until(lambda: bool(self.told(P, EndpointAttached)))
        (ours,) = self.told(P, EndpointOpened)
        assert isinstance(ours, EndpointOpened)
        self.tell(D, AttachEndpoint(P, 1, ours.ends))
        self.until(lambda: bool(self.told(D, EndpointAttached)))

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@contextmanager
def connected() -> Iterator[World]:
    sockets = RankSockets()
    with TemporaryDirectory(prefix="rank-") as folder:
        world = World(sockets, Path(folder))
        try:
            world.connect()
            yield world
        finally:
            world.close()
            sockets.close()


def test_all_ranks_move_their_heads_and_one_report_tells_of_it() -> None:
    with connected() as world:
        writer, reader = world.workers[P], world.workers[D]
        for memory in writer.memories:
            memory.fill(3, content=7)
        world.tell(P, OpenGate(D, TICKET))
        pairs = (PagePairs(PoolId(0), 0, 0, (PageId(3),), (PageId(5),)),)
        world.tell(P, PostChunk(D, TICKET, 0, pairs, b"token"))
        world.until(lambda: bool(world.told(P, ChunkSent)) and len(world.told(D, Landed)) == 2)
        assert [memory.problems(5, content=7) for memory in reader.memories] == [[], []]
        assert len(world.told(P, ChunkSent)) == 1
        world.until(lambda: all(plane.is_idle() for plane in world.whole.values()))


def test_a_fence_is_over_when_every_rank_has_fenced() -> None:
    with connected() as world:
        world.tell(D, FencePeer(P))
        assert not world.told(D, PeerFenced)
        assert not world.whole[D].is_idle()
        world.until(lambda: bool(world.told(D, PeerFenced)))
        assert world.told(D, PeerFenced) == [PeerFenced(P, FenceResult.CLOSED)]
        world.until(world.whole[D].is_idle)


@pytest.mark.parametrize("is_active", [True, False])
def test_every_rank_hears_that_a_ticket_is_open(is_active: bool) -> None:
    with connected() as world:
        for plane in world.planes[D]:
            plane.is_expecting = not is_active
        world.whole[D].expect(is_active, world.fabric.now)
        world.until(lambda: [plane.is_expecting for plane in world.planes[D]] == [is_active, is_active])


def test_a_rank_that_answers_nothing_ends_the_worker() -> None:
    with connected() as world:
        world.until(world.whole[D].is_idle)
        world.whole[D].poll(world.fabric.now + 10 * PATIENCE_S)  # it owes nothing
        now = world.fabric.now
        world.whole[D].perform(FencePeer(P), now)
        world.whole[D].poll(now + PATIENCE_S)
        silent = f"rank 1: has answered nothing for {PATIENCE_S:.0f} s"
        with pytest.raises(RankLost, match=silent) as over, failed_rank_ends_process():
            world.whole[D].poll(now + PATIENCE_S + 0.1)
        assert over.value.code is Exit.RANK_ENDED


def test_a_rank_whose_log_is_another_one_ends_the_worker() -> None:
    with connected() as world:
        world.sockets_of_rank_1[D].send(b"\0" * 40, PATIENCE_S)
        with pytest.raises(RankLost, match="rank 1: entry 0 came where entry"):
            world.until(lambda: False)
