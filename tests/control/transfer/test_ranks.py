"""Workers of several ranks: every head arrives, from one writer each, however far the ranks are out of step."""

import itertools
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    ChunkSent,
    CloseGate,
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    FencePeer,
    GateDrained,
    GateDraining,
    Landed,
    OpenEndpoint,
    OpenGate,
    PageCheck,
    PagePairs,
    PagesVerified,
    PeerFenced,
    PostChunk,
    TicketId,
    TransferReport,
    VerifyPages,
    WriteFailed,
)
from deltaserve.control.transfer.coverage import Coverage, Landing
from deltaserve.control.transfer.ranks import RankGroup
from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, RegionId, TicketSeq
from deltaserve.core.layout.copy_plan import RankPair, plan_cache
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup, StateGroup
from deltaserve.core.lifetime import Lifetime, Retention
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Drain, RankEnd
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from tests.control.transfer.ranked import RankedWorker

T = TypeVar("T")
P, D = PeerName("prefill-0"), PeerName("decode-0")
TICKET = TicketId(Boot(2), Boot(1), TicketSeq(1))
SIZES = [(p, d) for p, d in itertools.product((1, 2, 4, 8), repeat=2)]


KEY, VALUE = HeadBlock(4, 6, 3), HeadBlock(8, 6, 5)
STATES = (
    StateGroup("conv", 2, (KEY, KEY, VALUE), DType.BFLOAT16),
    StateGroup("ssm", 2, (HeadBlock(8, 2, 15),), DType.FLOAT32),
)


def spec(kv_heads: int, states: tuple[StateGroup, ...]) -> CacheSpec:
    full = PageGroup("kv", 2, kv_heads, 8, DType.FLOAT32)
    latent = PageGroup("latent", 1, 1, 24, DType.BFLOAT16, planes=1)
    window = PageGroup("window", 1, kv_heads, 4, DType.FLOAT32, Retention(Lifetime.WINDOW, 32))
    return CacheSpec(4, (full, latent, window, *states))


class Scene:
    """A writing and a reading worker, attached."""

    def __init__(
        self,
        num_writers: int,
        num_readers: int,
        kv_heads: int = 4,
        seed: int | None = None,
        states: tuple[StateGroup, ...] = (),
    ) -> None:
        self.chance = Random(seed) if seed is not None else None
        self.fabric = Fabric(self.fate)
        self.cache = spec(kv_heads, states)
        self.writer = self.worker(P, num_writers)
        self.reader = self.worker(D, num_readers)
        self.heard: list[TransferReport] = []
        self.said: list[TransferReport] = []
        self.reader_does(OpenEndpoint(P, 1))
        opened = self.until_heard(EndpointOpened)
        self.writer_does(OpenEndpoint(D, 1, opened.ends))
        ours = self.until_said(EndpointOpened)
        self.until_said(EndpointAttached)
        assert len(ours.ends) == num_writers
        self.reader_does(AttachEndpoint(P, 1, ours.ends))
        self.until_heard(EndpointAttached)

    def worker(self, name: PeerName, num_ranks: int) -> RankedWorker:
        return RankedWorker(name, self.fabric, self.cache, num_ranks, window_bytes=700, chance=self.chance)

    def fate(self, posted: Posted) -> Fate:
        if self.chance is None:
            return Fate()
        lands = self.chance.random()
        return Fate(lands=(Part(lands / 2, posted.num_copies // 2), Part(lands)), notified_s=lands, told_s=lands * 1.5)

    def writer_does(self, command: object) -> None:
        self.said += self.writer.perform(command, self.fabric.now)  # type: ignore[arg-type]

    def reader_does(self, command: object) -> None:
        self.heard += self.reader.perform(command, self.fabric.now)  # type: ignore[arg-type]

    def turn(self) -> None:
        self.fabric.advance(self.fabric.now + 0.1)
        self.said += self.writer.poll(self.fabric.now)
        self.heard += self.reader.poll(self.fabric.now)

    def until_said(self, kind: type[T]) -> T:
        return self._until(self.said, kind)

    def until_heard(self, kind: type[T]) -> T:
        return self._until(self.heard, kind)

    def _until(self, reports: list[TransferReport], kind: type[T]) -> T:
        for _ in range(1000):
            found = next((report for report in reports if isinstance(report, kind)), None)
            if found is not None:
                reports.remove(found)
                return found
            self.turn()
        raise AssertionError(f"no {kind.__name__}: {reports}")

    def post(self, chunk: int, first: int, src: list[int], dst: list[int], payload: bytes | None = None) -> None:
        pairs = tuple(
            PagePairs(PoolId(pool), first, first, tuple(map(PageId, src)), tuple(map(PageId, dst)))
            for pool in range(self.cache.num_pools)
        )
        self.writer_does(PostChunk(D, TICKET, chunk, pairs, payload))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("num_writers", "num_readers"), SIZES)
def test_every_head_arrives_and_is_verified(num_writers: int, num_readers: int, kv_heads: int) -> None:
    scene = Scene(num_writers, num_readers, kv_heads, num_writers * 100 + num_readers, STATES)
    src, dst = [3, 4, 9, 1, 7], [0, 5, 6, 11, 2]
    for index, page in enumerate(src):
        for memory in scene.writer.memories:
            memory.fill(page, index)
    pairs = plan_cache(scene.cache, num_writers, scene.cache, num_readers).pairs
    coverage = Coverage([range(5)] * scene.cache.num_pools, pairs)
    scene.writer_does(OpenGate(D, TICKET))
    scene.post(0, 0, src[:2], dst[:2])
    scene.post(1, 2, src[2:4], dst[2:4])
    scene.post(2, 4, src[4:], dst[4:], b"first token")
    sent: list[ChunkSent] = []
    for _ in range(3 * len(pairs)):
        landed = scene.until_heard(Landed)
        assert coverage.land(landed.done, landed.pair) is Landing.ACCEPTED
    while len(sent) < 3:
        sent.append(scene.until_said(ChunkSent))
    assert coverage.is_complete
    assert coverage.payload == b"first token"
    assert sorted(report.chunk for report in sent) == [0, 1, 2]
    for index, page in enumerate(dst):
        assert [problem for memory in scene.reader.memories for problem in memory.problems(page, index)] == []
    checks = tuple(
        PageCheck(
            pair, PoolId(piece.pool), piece.first, tuple(map(PageId, dst[piece.first : piece.end])), piece.checksums
        )
        for pair, done in coverage.dones()
        for piece in done.pieces
    )
    scene.reader_does(VerifyPages(P, TICKET, checks, 20))
    assert scene.until_heard(PagesVerified).problem is None
    scene.reader.memories[-1].arenas[RegionId(0)][dst[1] * scene.reader.memories[-1].layouts[0].page_bytes] ^= 1
    scene.reader_does(VerifyPages(P, TICKET, checks, 20))
    assert scene.until_heard(PagesVerified).problem is not None
    assert scene.writer.group.num_pending == scene.reader.group.num_pending == 0


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_a_closed_gate_drains_on_every_rank_whatever_has_been_sent(seed: int) -> None:
    scene = Scene(2, 4, seed=seed)
    chance = Random(seed)
    scene.writer_does(OpenGate(D, TICKET))
    for chunk in range(chance.randint(0, 4)):
        scene.post(chunk, 2 * chunk, [2 * chunk, 2 * chunk + 1], [3, 5], b"t" if chunk == 3 else None)
        for _ in range(chance.randint(0, 6)):
            scene.turn()
    scene.writer_does(CloseGate(D, TICKET))
    for _ in range(60):
        scene.turn()
    drained = [report for report in scene.said if isinstance(report, GateDrained)]
    is_through = any(isinstance(report, ChunkSent) and report.is_last for report in scene.said)
    assert drained == [GateDrained(TICKET, Drain.CLEAN)] or (is_through and not drained)
    assert scene.writer.is_quiet
    assert scene.writer.group.num_pending == 0


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_a_fence_ends_all_that_is_under_way(seed: int) -> None:
    scene = Scene(4, 2, seed=seed)
    chance = Random(seed)
    scene.writer_does(OpenGate(D, TICKET))
    for chunk in range(3):
        scene.post(chunk, 2 * chunk, [2 * chunk, 2 * chunk + 1], [3, 5])
        for _ in range(chance.randint(0, 3)):
            scene.turn()
    if chance.random() < 0.5:
        scene.writer_does(CloseGate(D, TICKET))
    scene.said.clear()
    for _ in range(2):
        scene.writer_does(FencePeer(D))
    for _ in range(60):
        scene.turn()
    fences = [report for report in scene.said if isinstance(report, PeerFenced)]
    assert fences == [PeerFenced(D, FenceResult.CLOSED)] * 2
    assert scene.said[-1:] == fences[-1:], "nothing is told of what was under way after that"
    assert scene.writer.group.num_pending == 0


# ---------------------------------------------------------------- reports of ranks, by hand


def end(rank: int) -> tuple[RankEnd, ...]:
    return (RankEnd(metadata=b"rank %d" % rank, regions=()),)


def opened_gate(num_ranks: int = 2, chunks: int = 1) -> RankGroup:
    group = RankGroup(num_ranks)
    group.fan_out(OpenGate(D, TICKET))
    for chunk in range(chunks):
        group.fan_out(PostChunk(D, TICKET, chunk, (), b"t" if chunk == chunks - 1 else None))
    return group


def test_ends_are_told_in_the_order_of_the_ranks() -> None:
    group = RankGroup(2)
    assert group.fan_out(OpenEndpoint(D, 7)) == [OpenEndpoint(D, 7)] * 2
    assert group.reduce(1, EndpointOpened(D, 7, end(1))) == []
    assert group.reduce(0, EndpointOpened(D, 6, end(0))) == [], "of an earlier greeting"
    assert group.reduce(0, EndpointOpened(D, 7, end(0))) == [EndpointOpened(D, 7, end(0) + end(1))]


def test_an_endpoint_that_fails_on_one_rank_fails_when_all_have_answered() -> None:
    group = RankGroup(3)
    group.fan_out(OpenEndpoint(D, 1))
    assert group.reduce(2, EndpointFailed(D, 1, "no memory")) == []
    assert group.reduce(0, EndpointOpened(D, 1, end(0))) == []
    assert group.reduce(1, EndpointOpened(D, 1, end(1))) == [EndpointFailed(D, 1, "rank 2: no memory")]
    assert group.num_pending == 0


def test_an_attach_that_fails_on_one_rank_fails_when_all_have_answered() -> None:
    group = RankGroup(2)
    group.fan_out(OpenEndpoint(D, 1, end(0)))
    told = [
        report
        for rank, of_rank in (
            (0, EndpointOpened(D, 1, end(0))),
            (0, EndpointFailed(D, 1, "x")),
            (1, EndpointOpened(D, 1, end(1))),
            (1, EndpointAttached(D, 1)),
        )
        for report in group.reduce(rank, of_rank)
    ]
    assert told == [EndpointOpened(D, 1, end(0) + end(1)), EndpointFailed(D, 1, "rank 0: x")]


def test_bytes_of_a_chunk_are_those_of_all_ranks() -> None:
    group = opened_gate()
    assert group.reduce(0, ChunkSent(TICKET, 0, 10, True)) == []
    assert group.reduce(1, ChunkSent(TICKET, 0, 32, True)) == [ChunkSent(TICKET, 0, 42, True)]
    assert group.num_pending == 0


def test_a_rank_that_has_sent_everything_does_not_make_a_closed_gate_wait() -> None:
    group = opened_gate()
    group.reduce(0, ChunkSent(TICKET, 0, 10, True))
    group.fan_out(CloseGate(D, TICKET))
    assert group.reduce(1, GateDraining(TICKET, 5)) == [GateDraining(TICKET, 5)]
    assert group.reduce(0, GateDrained(TICKET, Drain.CLEAN)) == []
    assert group.reduce(1, GateDrained(TICKET, Drain.CLEAN)) == [GateDrained(TICKET, Drain.CLEAN)]
    assert group.num_pending == 0


def test_one_dirty_rank_makes_the_drain_dirty() -> None:
    group = opened_gate(3)
    group.fan_out(CloseGate(D, TICKET))
    group.reduce(0, GateDrained(TICKET, Drain.CLEAN))
    group.reduce(1, GateDrained(TICKET, Drain.DIRTY))
    assert group.reduce(2, GateDrained(TICKET, Drain.CLEAN)) == [GateDrained(TICKET, Drain.DIRTY)]


def test_only_the_first_failed_write_of_a_ticket_is_told() -> None:
    group = opened_gate()
    assert group.reduce(1, WriteFailed(D, TICKET, "reset")) == [WriteFailed(D, TICKET, "reset")]
    assert group.reduce(0, WriteFailed(D, TICKET, "reset")) == []


def test_one_rank_that_cannot_fence_makes_the_fence_impossible() -> None:
    group = RankGroup(2)
    group.fan_out(FencePeer(D))
    group.fan_out(FencePeer(D))
    assert group.reduce(0, PeerFenced(D, FenceResult.IMPOSSIBLE)) == []
    assert group.reduce(0, PeerFenced(D, FenceResult.CLOSED)) == []
    assert group.reduce(1, PeerFenced(D, FenceResult.CLOSED)) == [PeerFenced(D, FenceResult.IMPOSSIBLE)]
    assert group.reduce(1, PeerFenced(D, FenceResult.CLOSED)) == [PeerFenced(D, FenceResult.CLOSED)]
    assert group.num_pending == 0


def test_reports_of_a_slow_rank_from_before_a_fence_are_dropped() -> None:
    group = opened_gate()
    group.reduce(0, ChunkSent(TICKET, 0, 10, True))
    group.fan_out(OpenEndpoint(D, 2))
    assert group.reduce(1, ChunkSent(TICKET, 0, 32, True)) == []
    assert group.reduce(1, GateDrained(TICKET, Drain.CLEAN)) == []
    assert group.num_pending == 1, "the endpoint that is being opened"


def test_an_endpoint_that_all_ranks_have_opened_waits_for_nobody() -> None:
    group = RankGroup(2)
    group.fan_out(OpenEndpoint(P, 1))
    for rank in range(2):
        assert group.num_pending == 1
        group.reduce(rank, EndpointOpened(P, 1, end(rank)))
    assert group.num_pending == 0


def test_a_fence_ends_what_ranks_were_verifying() -> None:
    group = RankGroup(2)
    checks = tuple(PageCheck(RankPair(0, reader), PoolId(0), 0, (PageId(1),), b"abcd") for reader in (0, 1))
    group.fan_out(VerifyPages(P, TICKET, checks, 20))
    group.reduce(0, PagesVerified(TICKET))
    group.fan_out(FencePeer(P))
    assert group.reduce(1, PagesVerified(TICKET)) == []
    for rank in range(2):
        group.reduce(rank, PeerFenced(P, FenceResult.CLOSED))
    assert group.num_pending == 0


def test_a_rank_verifies_its_own_pages_only() -> None:
    group = RankGroup(3)
    checks = tuple(PageCheck(RankPair(0, reader), PoolId(0), 0, (PageId(1),), b"abcd") for reader in (0, 2, 2))
    first, second, third = group.fan_out(VerifyPages(P, TICKET, checks, 20))
    assert first == VerifyPages(P, TICKET, checks[:1], 20)
    assert second is None
    assert third == VerifyPages(P, TICKET, checks[1:], 20)
    assert group.reduce(2, PagesVerified(TICKET, "differs")) == []
    assert group.reduce(0, PagesVerified(TICKET)) == [PagesVerified(TICKET, "differs")]


def test_what_the_plan_does_not_expect_is_refused() -> None:
    """Replicated heads come from one writer; another one's announcement of them is a breach."""
    scene = Scene(2, 1, kv_heads=1)
    pairs = plan_cache(scene.cache, 2, scene.cache, 1).pairs
    assert pairs == (RankPair(0, 0),)
    coverage = Coverage([range(1)], pairs)
    scene.writer_does(OpenGate(D, TICKET))
    scene.post(0, 0, [1], [1], b"t")
    landed = scene.until_heard(Landed)
    assert coverage.land(landed.done, RankPair(1, 0)) is Landing.REFUSED
