"""A writer's and a reader's endpoint over the loopback transport, with real bytes in their pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    EndpointAttached,
    EndpointOpened,
    Landed,
    OpenEndpoint,
    OpenGate,
    PageCheck,
    PagePairs,
    PostChunk,
    TicketId,
    TransferReport,
    VerifyPages,
)
from deltaserve.control.transfer.coverage import ALONE
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.core.extents import Copy
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, TicketSeq
from deltaserve.core.transport import Evidence, WriteId
from deltaserve.core.wire.messages import Done
from deltaserve.sim.loopback import Fabric, LoopbackTransport
from deltaserve.sim.oracle import stamp_spec
from deltaserve.sim.rank_memory import STAMP_BYTES, StampMemory, poison_of, region_infos
from tests.control.transfer.toys import DECODE, DECODE_BOOT, PREFILL, PREFILL_BOOT

PAGE_SIZE = 4
PAGE_BYTES = PAGE_SIZE * STAMP_BYTES
NUM_TOKENS = 32 * PAGE_SIZE
"""Tokens of the longest prompt."""


@dataclass(frozen=True)
class Write:
    """One post, as the transport saw it."""

    copies: tuple[Copy, ...]
    notification: bytes | None

    @property
    def num_bytes(self) -> int:
        return sum(copy.src.num_bytes for copy in self.copies)


class WatchedTransport(LoopbackTransport):
    """Keeps a list of what was posted."""

    def __init__(self, me: PeerName, fabric: Fabric, memory: StampMemory, evidence: Evidence) -> None:
        super().__init__(me, fabric, memory.memory, evidence=evidence)
        self.posts: list[Write] = []

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        write = super().write(peer, copies, notification, rank)
        self.posts.append(Write(tuple(copies), notification))
        return write


class Rank:
    """Memory, transport and endpoint of one process."""

    def __init__(
        self,
        me: PeerName,
        fabric: Fabric,
        num_pools: int,
        window_bytes: int,
        checksums: bool,
        evidence: Evidence = Evidence.COMPLETION,
    ) -> None:
        cache = stamp_spec(PAGE_SIZE, num_pools)
        self.memory = StampMemory(cache, (32,) * num_pools, poison_of(me))
        self.transport = WatchedTransport(me, fabric, self.memory, evidence)
        for _, region in self.memory.regions:
            self.transport.register(region)
        config = EndpointConfig(
            cache=cache,
            regions=region_infos(self.memory),
            window_bytes=window_bytes,
            checksums=checksums,
        )
        self.endpoint = Endpoint(config, self.transport, self.memory)

    def fill(self, pool: int, pages: Sequence[int]) -> None:
        """Bytes that no other page has."""
        for page in pages:
            for offset in range(PAGE_SIZE):
                stamp = bytes([pool + 1, page, offset]) + b"\x55" * (STAMP_BYTES - 3)
                self.memory.write_stamp(PoolId(pool), PageId(page), offset, stamp)

    def pages(self, pool: int, pages: Sequence[int]) -> bytes:
        return self.memory.pages(PoolId(pool), [PageId(p) for p in pages])


class Pair:
    """Attached writer and reader."""

    def __init__(
        self,
        num_pools: int = 1,
        window_bytes: int = 1 << 20,
        checksums: bool = True,
        evidence: Evidence = Evidence.COMPLETION,
    ) -> None:
        self.fabric = Fabric()
        self.writer = Rank(PREFILL, self.fabric, num_pools, window_bytes, checksums, evidence)
        self.reader = Rank(DECODE, self.fabric, num_pools, window_bytes, checksums, evidence)
        self.num_pools = num_pools
        self.connect()

    def connect(self) -> None:
        """(Re-)open both endpoints, as the handshake does."""
        (opened,) = self.reader.endpoint.perform(OpenEndpoint(PREFILL, 1), 0.0)
        assert isinstance(opened, EndpointOpened)
        ours, attached = self.writer.endpoint.perform(OpenEndpoint(DECODE, 1, opened.ends), 0.0)
        assert isinstance(ours, EndpointOpened)
        assert isinstance(attached, EndpointAttached)
        self.reader.endpoint.perform(AttachEndpoint(PREFILL, 1, ours.ends), 0.0)

    def open(self, seq: int = 1) -> TicketId:
        ticket = TicketId(Boot(DECODE_BOOT), Boot(PREFILL_BOOT), TicketSeq(seq))
        assert self.writer.endpoint.perform(OpenGate(DECODE, ticket), 0.0) == []
        return ticket

    def chunk(
        self,
        ticket: TicketId,
        index: int,
        first: int,
        src: Sequence[int],
        dst: Sequence[int],
        payload: bytes | None = None,
    ) -> PostChunk:
        """A chunk of equal page lists in every pool; `payload` makes it the last."""
        pairs = tuple(
            PagePairs(PoolId(p), first, first, tuple(map(PageId, src)), tuple(map(PageId, dst)))
            for p in range(self.num_pools if src else 0)
        )
        return PostChunk(DECODE, ticket, index, pairs, payload)

    def post(self, chunk: PostChunk) -> list[TransferReport]:
        return self.writer.endpoint.perform(chunk, self.fabric.now)

    def until(self, now: float) -> list[TransferReport]:
        """The writer's reports up to a time."""
        self.fabric.advance(now)
        return [report for _ in range(4) for report in self.writer.endpoint.poll(now)]

    def dones(self) -> list[Done]:
        """What the reader heard since the last call."""
        reports = self.reader.endpoint.poll(self.fabric.now)
        assert all(isinstance(r, Landed) and r.peer == PREFILL for r in reports)
        return [r.done for r in reports if isinstance(r, Landed)]

    def verify(self, ticket: TicketId, dones: Sequence[Done], dst: Sequence[int]) -> TransferReport:
        """What the reader reports at once, asked to compare its pages `dst` with the announced checksums."""
        (report,) = self.look(ticket, dones, dst)
        return report

    def look(self, ticket: TicketId, dones: Sequence[Done], dst: Sequence[int]) -> list[TransferReport]:
        """The same; it may report later."""
        checks = []
        for piece in (piece for done in dones for piece in done.pieces):
            pages = tuple(PageId(p) for p in dst[piece.first : piece.end])
            checks.append(PageCheck(ALONE, PoolId(piece.pool), piece.first, pages, piece.checksums))
        return self.reader.endpoint.perform(VerifyPages(PREFILL, ticket, tuple(checks), NUM_TOKENS), self.fabric.now)
