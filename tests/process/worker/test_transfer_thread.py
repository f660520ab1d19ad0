"""The transfer thread over the real endpoint and the loopback transport: what it reports, and when it polls."""

import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from deltaserve.control.sched.plan import StepResult
from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    ChunkSent,
    EndpointAttached,
    EndpointOpened,
    Landed,
    OpenEndpoint,
    OpenGate,
    PagePairs,
    PostChunk,
    TicketId,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.plane_turns import Polling
from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, RegionId, TicketSeq
from deltaserve.core.layout.copy_plan import PageSlice, PlacedPages, Route
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.transport import TransportError
from deltaserve.core.wire.messages import RegionInfo
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.transfer_thread import Reports, TransferThread
from deltaserve.sim.loopback import Fabric, Fate, LoopbackTransport
from tests.patience import PATIENCE_S

WRITER, READER = PeerName("prefill-0"), PeerName("decode-0")
GROUP = PageGroup("kv", 2, 1, 8, DType.FLOAT32)
CACHE = CacheSpec(4, (GROUP,))
LAYOUT = KvLayout(GROUP, CACHE.page_size)
NUM_PAGES = 8
SIZES = {"kv": LAYOUT.page_bytes * NUM_PAGES}
REGIONS = {"kv": RegionId(0)}
TICKET = TicketId(Boot(1), Boot(2), TicketSeq(1))


class Side:
    """One rank: memory, transport, endpoint; counts its polls."""

    def __init__(self, name: PeerName, fabric: Fabric) -> None:
        self.bytes = {REGIONS[component]: bytearray(size) for component, size in SIZES.items()}
        self.transport = LoopbackTransport(name, fabric, self.bytes)
        for component, size in SIZES.items():
            self.transport.register(Region(REGIONS[component], base=1 << 20, num_bytes=size, device="cpu"))
        config = EndpointConfig(CACHE, self.announced)
        self.endpoint = Endpoint(config, self.transport, self)
        self.num_polls = 0
        self.is_closed = False

    @property
    def announced(self) -> tuple[RegionInfo, ...]:
        return tuple(
            RegionInfo(id=REGIONS[c], base=1 << 20, num_bytes=size, device="cpu", component=c)
            for c, size in SIZES.items()
        )

    # what the transfer thread drives

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        return self.endpoint.perform(command, now)

    def poll(self, now: float) -> list[TransferReport]:
        self.num_polls += 1
        return self.endpoint.poll(now)

    def expect(self, is_active: bool, now: float) -> None:
        pass

    def is_idle(self) -> bool:
        return self.endpoint.is_idle()

    def close(self) -> None:
        self.is_closed = True
        self.transport.close()

    # what the endpoint needs of memory

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        return b""

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        return b""


@dataclass
class Rig:
    """A writer behind its thread, and a reader the test drives while the writer is quiet."""

    fabric: Fabric
    writer: Side
    reader: Side
    thread: TransferThread
    mailbox: Mailbox[StepResult | Reports]
    reports: list[TransferReport] = field(default_factory=list)

    def next_reports(self, count: int) -> list[TransferReport]:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.reports) < count:
            assert time.monotonic() < deadline, f"only {self.reports}"
            select.select([self.mailbox], [], [], 1.0)
            for item in self.mailbox.take_all():
                assert isinstance(item, Reports)
                self.reports += item.reports
        taken, self.reports = self.reports[:count], self.reports[count:]
        return taken

    def attach(self) -> None:
        [opened] = self.reader.perform(OpenEndpoint(WRITER, 1), 0.0)
        assert isinstance(opened, EndpointOpened)
        self.thread.submit(OpenEndpoint(READER, 1, opened.ends))
        ours, attached = self.next_reports(2)
        assert isinstance(ours, EndpointOpened)
        assert isinstance(attached, EndpointAttached)
        self.reader.perform(AttachEndpoint(WRITER, 1, ours.ends), 0.0)

    def post(self) -> None:
        self.thread.submit(OpenGate(READER, TICKET))
        pairs = PagePairs(PoolId(0), 0, 0, (PageId(1), PageId(2)), (PageId(5), PageId(6)))
        self.thread.submit(PostChunk(READER, TICKET, chunk=0, pairs=(pairs,), payload=b"first token"))

    def polls_until(self, count: int) -> None:
        """Wait until the writer has polled `count` times more."""
        target, deadline = self.writer.num_polls + count, time.monotonic() + PATIENCE_S
        while self.writer.num_polls < target:
            assert time.monotonic() < deadline, "the thread does not poll"
            time.sleep(0.001)

    def is_quiet(self) -> bool:
        """Whether it stops polling for a good while."""
        before = -1
        for _ in range(100):
            before, seen = self.writer.num_polls, before
            if before == seen:
                return True
            time.sleep(0.1)
        return False


@contextmanager
def rig(policy: Callable[..., Fate | None] = lambda posted: Fate()) -> Iterator[Rig]:
    fabric = Fabric(policy)
    writer, reader = Side(WRITER, fabric), Side(READER, fabric)
    mailbox: Mailbox[StepResult | Reports] = Mailbox()
    thread = TransferThread(lambda: writer, mailbox)
    yield Rig(fabric, writer, reader, thread, mailbox)
    assert thread.stop(PATIENCE_S)
    assert writer.is_closed


def test_a_chunk_travels_with_its_payload() -> None:
    with rig() as world:
        page = LAYOUT.page_bytes
        world.writer.bytes[REGIONS["kv"]][page : 3 * page] = b"k" * (2 * page)
        world.attach()
        world.post()
        [sent] = world.next_reports(1)
        assert isinstance(sent, ChunkSent)
        assert sent.is_last
        [landed] = world.reader.poll(0.0)
        assert isinstance(landed, Landed)
        assert landed.done.payload == b"first token"
        assert world.reader.bytes[REGIONS["kv"]][5 * page : 7 * page] == b"k" * (2 * page)


def test_it_sleeps_while_there_is_nothing_to_wait_for() -> None:
    with rig() as world:
        world.attach()
        world.post()
        world.next_reports(1)
        assert world.is_quiet()


def test_it_polls_while_a_ticket_is_open() -> None:
    with rig() as world:
        world.thread.submit(Polling(is_active=True))
        world.polls_until(20)
        world.thread.submit(Polling(is_active=False))
        assert world.is_quiet()


def test_it_polls_while_its_own_write_is_out() -> None:
    with rig(lambda posted: Fate(lands=(), notified_s=None, told_s=None)) as world:
        world.attach()
        world.post()
        world.polls_until(20)


def test_what_keeps_the_transport_from_opening_is_raised() -> None:
    def refuse() -> Side:
        raise TransportError("no such device")

    with pytest.raises(TransportError, match="no such device"):
        TransferThread(refuse, Mailbox())
