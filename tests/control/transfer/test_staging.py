"""The staged path below the ticket protocol: all heads arrive, nothing is scattered late, every wait ends."""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.control.transfer.commands import (
    ChunkSent,
    CloseGate,
    ExpectPages,
    FencePeer,
    ForgetPages,
    GateDrained,
    Landed,
    OpenGate,
    PageCheck,
    PagesVerified,
    PeerFenced,
    StagingUsed,
    VerifyPages,
)
from deltaserve.control.transfer.coverage import Coverage, Landing
from deltaserve.control.transfer.ring import ALIGNMENT, RingLease, StagingTooSmall
from deltaserve.control.transfer.staged_grants import PlanVerdict, StagedGrants
from deltaserve.control.transfer.staging import ASKING_BYTES, SHORT_RUN_BYTES, StagingMode, choose
from deltaserve.control.transfer.tables import StagedLeaseEvent, StagedLeaseState
from deltaserve.core.ids import PageId, PeerName, PoolId, TicketSeq
from deltaserve.core.layout.copy_plan import PageFormat, Route, plan_cache, plan_routes
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import HeadBlock
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.transport import Evidence, FenceResult
from deltaserve.core.wire.messages import Drain
from deltaserve.core.wire.staged_frames import StageAsk, StagedData, StagedPages, StageFrame, StageReserve, encode_stage
from deltaserve.sim.loopback import Fate, Part, Posted
from tests.control.transfer.ranked import RankedWorker
from tests.control.transfer.staged import DST, StagedScene, StagedWorker
from tests.control.transfer.test_ranks import SIZES, TICKET, D, P, Scene

SRC = [3, 4, 9, 1, 7, 12, 13, 14]


def fill(scene: Scene, pages: Sequence[int] = SRC) -> None:
    for index, page in enumerate(pages):
        for memory in scene.writer.memories:
            memory.fill(page, index)


def problems(scene: Scene, pages: Sequence[int] = DST) -> list[str]:
    return [
        problem
        for index, page in enumerate(pages)
        for memory in scene.reader.memories
        for problem in memory.problems(page, index)
    ]


def transfer(scene: Scene) -> None:
    """Three chunks, the last with the first token; everything arrives, is verified and counted once."""
    fill(scene)
    pairs = plan_cache(scene.cache, len(scene.writer.memories), scene.cache, len(scene.reader.memories)).pairs
    coverage = Coverage([range(len(SRC))] * scene.cache.num_pools, pairs)
    scene.writer_does(OpenGate(D, TICKET))
    scene.post(0, 0, SRC[:4], DST[:4])
    scene.post(1, 4, SRC[4:6], DST[4:6])
    scene.post(2, 6, SRC[6:], DST[6:], b"first token")
    for _ in range(3 * len(pairs)):
        landed = scene.until_heard(Landed)
        assert coverage.land(landed.done, landed.pair) is Landing.ACCEPTED
    assert coverage.is_complete
    assert problems(scene) == []
    checks = tuple(
        PageCheck(
            pair, PoolId(piece.pool), piece.first, tuple(map(PageId, DST[piece.first : piece.end])), piece.checksums
        )
        for pair, done in coverage.dones()
        for piece in done.pieces
    )
    scene.reader_does(VerifyPages(P, TICKET, checks, 4 * len(DST)))
    assert scene.until_heard(PagesVerified).problem is None
    assert sorted(scene.until_said(ChunkSent).chunk for _ in range(3)) == [0, 1, 2]
    for _ in range(30):
        scene.turn()


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("num_writers", "num_readers"), SIZES)
def test_every_head_arrives_and_is_verified(num_writers: int, num_readers: int, kv_heads: int) -> None:
    scene = StagedScene(num_writers, num_readers, kv_heads, seed=num_writers * 100 + num_readers)
    transfer(scene)
    plan = plan_cache(scene.cache, num_writers, scene.cache, num_readers)
    between = [[plan.route(group, *pair) for group in plan.routes] for pair in plan.pairs]
    is_staged = any(choose(StagingMode.ON, of_pair, 1, 1) for of_pair in between)
    assert (scene.writer.count("staged_writes") > 0) is is_staged
    assert scene.writer.count("staging_fallbacks") == scene.reader.count("staging_malformed") == 0
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1), (4, 2)])
def test_a_ring_of_one_window_is_enough(num_writers: int, num_readers: int, seed: int) -> None:
    """Leases are waited for, and nobody holds one while waiting for another."""
    scene = StagedScene(num_writers, num_readers, seed=seed, num_bytes=2 * 1536)
    transfer(scene)
    assert scene.writer.count("staged_writes") > 0
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


class HalfStagedScene(Scene):
    """The reader has no staging memory, the writer has."""

    writer: StagedWorker

    def worker(self, name: PeerName, num_ranks: int) -> RankedWorker:
        if name == D:
            return super().worker(name, num_ranks)
        return StagedWorker(name, self.fabric, self.cache, num_ranks, 1 << 14)


def test_a_reader_without_staging_memory_is_written_to_directly() -> None:
    scene = HalfStagedScene(1, 2)
    transfer(scene)
    assert scene.writer.count("staged_writes") == 0


def test_a_page_larger_than_the_ring_goes_directly_and_the_reason_names_the_setting() -> None:
    scene = StagedScene(1, 2, num_bytes=512, reader_bytes=1 << 14)
    transfer(scene)
    assert 0 < scene.writer.count("staging_fallbacks") < scene.writer.count("staged_writes")  # one of a window fits
    (staged,) = scene.writer.staged()
    assert "raise --staging-memory-mib" in staged.writer.last_reason
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


class WideWorker(StagedWorker):
    window_bytes = 1 << 20


class WideScene(StagedScene):
    """A scene with windows larger than any ring here."""

    def worker(self, name: PeerName, num_ranks: int) -> RankedWorker:
        return WideWorker(name, self.fabric, self.cache, num_ranks, self._bytes[name])


@pytest.mark.parametrize(("writer_bytes", "reader_bytes"), [(1 << 14, 1 << 12), (1 << 12, 1 << 14)])
def test_writes_are_cut_to_fit_the_rings_of_both_sides(writer_bytes: int, reader_bytes: int) -> None:
    """A chunk has four pages of 768 bytes; half of the smaller region is a ring of 2,048."""
    scene = WideScene(1, 2, kv_heads=2, num_bytes=writer_bytes, reader_bytes=reader_bytes)
    transfer(scene)
    assert scene.writer.count("staged_writes") > 0
    assert scene.writer.count("staging_fallbacks") == 0
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


def test_a_reader_that_has_no_memory_for_long_is_written_to_directly() -> None:
    scene = StagedScene(1, 2)
    for staged in scene.reader.staged():
        assert staged.reader.ring.ask("somebody", staged.reader.ring.num_bytes, 0.0) is not None  # type: ignore[arg-type]
    transfer(scene)
    assert scene.writer.count("staging_fallbacks") > 0
    (staged,) = scene.writer.staged()
    assert "waited 20" in staged.writer.last_reason
    assert scene.writer.is_unstaged
    for staged in scene.reader.staged():
        assert [*staged.reader.ring] == ["somebody"]


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_nothing_is_scattered_after_a_clean_drain(seed: int) -> None:
    scene = StagedScene(2, 4, kv_heads=8, seed=seed)
    chance = Random(seed)
    fill(scene)
    scene.writer_does(OpenGate(D, TICKET))
    for chunk in range(chance.randint(1, 4)):
        where = slice(2 * chunk, 2 * chunk + 2)
        scene.post(chunk, 2 * chunk, SRC[where], DST[where], b"t" if chunk == 3 else None)
        for _ in range(chance.randint(0, 30)):
            scene.turn()
    scene.writer_does(CloseGate(D, TICKET))
    before: list[bytes] | None = None
    for _ in range(200):
        scene.turn()
        drained = [report for report in scene.said if isinstance(report, GateDrained)]
        if drained and before is None:
            assert drained == [GateDrained(TICKET, Drain.CLEAN)]
            before = contents(scene)
    is_through = any(isinstance(report, ChunkSent) and report.is_last for report in scene.said)
    assert before is not None or is_through
    assert before is None or contents(scene) == before
    assert scene.writer.is_quiet
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_nothing_is_scattered_after_a_fence_and_its_leases_are_free(seed: int) -> None:
    scene = StagedScene(4, 2, kv_heads=8, seed=seed)
    chance = Random(seed)
    fill(scene)
    scene.writer_does(OpenGate(D, TICKET))
    for chunk in range(3):
        where = slice(2 * chunk, 2 * chunk + 2)
        scene.post(chunk, 2 * chunk, SRC[where], DST[where])
        for _ in range(chance.randint(0, 12)):
            scene.turn()
    scene.reader_does(FencePeer(P))
    assert scene.until_heard(PeerFenced).result is FenceResult.CLOSED
    before = contents(scene)
    for _ in range(100):
        scene.turn()
    assert contents(scene) == before
    assert scene.reader.is_unstaged
    scene.writer_does(FencePeer(D))
    for _ in range(20):
        scene.turn()
    assert scene.writer.is_unstaged


class UnprovenWorker(StagedWorker):
    evidence = Evidence.CONTENTS


class UnprovenScene(StagedScene):
    """Completions and notifications prove nothing."""

    def worker(self, name: PeerName, num_ranks: int) -> RankedWorker:
        return UnprovenWorker(name, self.fabric, self.cache, num_ranks, self._bytes[name], self._mode, self.chance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1), (4, 2)])
def test_bytes_that_come_after_what_announces_them_are_waited_for(
    num_writers: int, num_readers: int, seed: int
) -> None:
    """In parts, and after their writer was told that they are there."""
    scene, chance = UnprovenScene(num_writers, num_readers, seed=seed), Random(seed)

    def fate(posted: Posted) -> Fate:
        late_s = chance.uniform(0.0, 3.0)
        return Fate(lands=(Part(late_s, posted.num_copies // 2), Part(2 * late_s)))

    scene.fabric.policy = fate
    transfer(scene)
    assert scene.writer.count("staged_writes") > 0
    assert scene.writer.count("staging_fallbacks") == scene.reader.count("staging_refused") == 0
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


def test_bytes_that_never_come_are_not_scattered_and_nobody_gets_their_lease_before_the_fence() -> None:
    scene = UnprovenScene(1, 2)
    fill(scene)
    before = contents(scene)
    scene.writer_does(OpenGate(D, TICKET))
    scene.fabric.policy = lambda posted: Fate(lands=() if posted.num_copies else (Part(0.0),))
    scene.post(0, 0, SRC[:2], DST[:2])
    while not scene.reader.count("staging_refused"):
        scene.turn()
    for _ in range(5):
        scene.turn()
    assert contents(scene) == before
    assert not any(isinstance(report, Landed | ChunkSent) for report in (*scene.heard, *scene.said))
    assert not scene.reader.is_unstaged
    scene.reader_does(FencePeer(P))
    assert scene.reader.is_unstaged


def test_one_whose_bytes_are_late_holds_up_no_other() -> None:
    scene, bulk = UnprovenScene(1, 2), count()
    fill(scene)
    scene.writer_does(OpenGate(D, TICKET))

    def fate(posted: Posted) -> Fate:
        return Fate(lands=() if posted.num_copies and not next(bulk) else (Part(0.0),))

    scene.fabric.policy = fate
    scene.post(0, 0, SRC[:2], DST[:2])
    scene.post(1, 2, SRC[2:4], DST[2:4])
    assert [scene.until_heard(Landed).done.chunk for _ in range(2)] == [0, 1]  # of the other rank
    assert scene.reader.count("staging_refused") == 0


def test_who_waits_for_memory_when_its_peer_is_fenced_gets_none_later() -> None:
    scene = StagedScene(1, 2)
    reader = next(scene.reader.staged())
    scene.fabric.policy = lambda posted: Fate(notified_s=None if posted.src == D else 0.0)  # no answer arrives
    say(scene, StageAsk(write=76, num_bytes=reader.reader.ring.num_bytes))
    say(scene, ASK)
    assert reader.reader.ring.num_waiting == 1
    scene.reader_does(FencePeer(P))
    for _ in range(3):
        scene.turn()
    assert reader.is_quiet


def test_who_waits_for_memory_to_send_is_forgotten_where_no_fence_is_possible() -> None:
    scene = StagedScene(1, 2)
    (writer,) = scene.writer.staged()
    assert writer.writer.ring.ask("somebody", writer.writer.ring.num_bytes, 0.0) is not None  # type: ignore[arg-type]
    fill(scene)
    scene.writer_does(OpenGate(D, TICKET))
    scene.post(0, 0, SRC[:2], DST[:2])
    assert writer.writer.ring.num_waiting > 0
    scene.writer.transports[0].fence_result = FenceResult.IMPOSSIBLE
    scene.writer_does(FencePeer(D))
    assert writer.writer.ring.num_waiting == 0
    for _ in range(250):
        scene.turn()


def test_memory_that_a_peer_may_write_for_ever_lets_nobody_wait() -> None:
    """Seed 70005834: chunk after chunk waited out its patience for what was lost with a peer of old."""
    scene = StagedScene(1, 2)
    reader = next(scene.reader.staged())
    scene.fabric.policy = lambda posted: Fate(notified_s=None if posted.src == D else 0.0)  # no answer arrives
    say(scene, StageAsk(write=76, num_bytes=reader.reader.ring.num_bytes))
    assert reader.reader.ring.num_leased_bytes == reader.reader.ring.num_bytes
    for transport in scene.reader.transports:
        transport.fence_result = FenceResult.IMPOSSIBLE
    scene.reader_does(FencePeer(P))
    with pytest.raises(StagingTooSmall, match="cannot be fenced"):
        reader.reader.ring.ask("another", ALIGNMENT, 0.0)  # type: ignore[arg-type]


def test_a_buffer_that_cannot_be_fenced_lets_no_other_write_wait() -> None:
    scene = StagedScene(1, 2)
    (writer,) = scene.writer.staged()
    fill(scene)
    scene.fabric.policy = lambda posted: Fate(notified_s=None)
    scene.writer_does(OpenGate(D, TICKET))
    scene.post(0, 0, SRC[:2], DST[:2])
    assert writer.writer.ring.num_leased_bytes > 0
    scene.writer.transports[0].fence_result = FenceResult.IMPOSSIBLE
    scene.writer_does(FencePeer(D))
    with pytest.raises(StagingTooSmall, match="cannot be fenced"):
        writer.writer.ring.ask("another", writer.writer.ring.num_bytes, 0.0)  # type: ignore[arg-type]


def test_a_lease_that_nobody_needs_is_told_again_until_it_comes_back() -> None:
    """The ask came after the news that it is void, or that news was lost."""
    scene = StagedScene(1, 2)
    say(scene, ASK)
    for _ in range(20):
        scene.turn()
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


def test_an_ask_that_is_lost_is_repeated() -> None:
    scene = StagedScene(1, 2)
    fill(scene)
    scene.writer_does(OpenGate(D, TICKET))
    scene.fabric.policy = lambda posted: Fate(notified_s=None)
    scene.post(0, 0, SRC[:2], DST[:2])
    assert scene.writer.count("staged_writes") > 0
    scene.fabric.policy = scene.fate
    scene.until_said(ChunkSent)
    assert scene.writer.count("staging_fallbacks") == 0
    assert problems(scene, DST[:2]) == []


def contents(scene: Scene) -> list[bytes]:
    return [bytes(arena) for memory in scene.reader.memories for arena in memory.arenas.values()]


# ---------------------------------------------------------------- what a writer may not say


def pages(group: str = "kv", first: int = 0, ids: Sequence[int] = (0,)) -> StagedPages:
    return StagedPages(group=group, first=first, num_tokens=4 * len(ids), pages=pack_u32(ids))


def plan_for(lease: RingLease, *parts: StagedPages, write: int = 77, seq: int = 1) -> StagedData:
    return StagedData(
        write=write,
        round=lease.round,
        offset=lease.offset,
        ticket=seq,
        reader_boot=TICKET.reader_boot,
        writer_boot=TICKET.writer_boot,
        parts=parts,
        note=b"n",
    )


def lease_of(scene: StagedScene) -> RingLease:
    """What the first reading rank has just lent."""
    reader = next(scene.reader.staged())
    lease = reader.reader.ring.lease_of(next(iter(reader.reader.ring)))
    assert lease is not None
    return lease


@pytest.mark.parametrize(
    "parts",
    [
        (pages(group="other"),),
        (pages(ids=[255]),),
        (StagedPages(group="kv", first=0, num_tokens=4, pages=b"\x01\0\0"),),
        (pages(first=-1),),
        (pages(first=1),),
        (pages(first=8, ids=[3]),),
        (pages(ids=[1]),),
        (pages(ids=[0, 5, 6]),),
        (pages(), pages()),
        (pages(), pages(group="window", ids=[1])),
        (pages(ids=[]),),
        (StagedPages(group="kv", first=0, num_tokens=5, pages=b"\0\0\0\0"),),
        (StagedPages(group="kv", first=0, num_tokens=0, pages=b"\0\0\0\0"),),
        (StagedPages(group="kv", first=0, num_tokens=-4, pages=b""),),
        (StagedPages(group="kv", first=0, num_tokens=3, pages=b"\0\0\0\0"),),
    ],
    ids=[
        "group",
        "page",
        "packed",
        "before",
        "another index",
        "behind",
        "not granted",
        "larger than its lease",
        "twice",
        "half of it",
        "nothing",
        "too many tokens",
        "no tokens",
        "fewer than none",
        "a part of a granule",
    ],
)
def test_a_plan_beyond_the_grant_is_refused_and_its_lease_is_over(parts: tuple[StagedPages, ...]) -> None:
    scene = StagedScene(1, 2)
    say(scene, ASK)
    before = contents(scene)
    say(scene, plan_for(lease_of(scene), *parts))
    assert scene.reader.count("staging_refused") == 1
    assert contents(scene) == before
    assert not any(isinstance(report, Landed) for report in scene.heard)
    assert scene.reader.is_unstaged


def test_pages_come_once_from_each_rank() -> None:
    scene = StagedScene(1, 2)
    say(scene, ASK)
    say(scene, plan_for(lease_of(scene), pages()))
    scene.turn()
    assert scene.reader.count("staging_refused") == 0
    say(scene, StageAsk(write=78, num_bytes=1100))
    say(scene, plan_for(lease_of(scene), pages(), write=78))
    assert scene.reader.count("staging_refused") == 1


def test_a_plan_waits_for_its_ticket_and_not_for_ever() -> None:
    scene = StagedScene(1, 2)
    num_pools = scene.cache.num_pools
    say(scene, ASK)
    say(scene, plan_for(lease_of(scene), pages(ids=[1]), seq=2))
    assert not scene.reader.is_unstaged
    ticket = TICKET._replace(seq=TicketSeq(2))
    scene.reader_does(ExpectPages(P, ticket, (0,) * num_pools, ((PageId(1),),) * num_pools))
    scene.turn()
    assert scene.reader.count("scattered_bytes") > 0
    scene.reader_does(ForgetPages(P, ticket))
    say(scene, StageAsk(write=78, num_bytes=1100))
    say(scene, plan_for(lease_of(scene), pages(ids=[1]), write=78, seq=2))
    for _ in range(250):
        scene.turn()
    assert scene.reader.count("staging_refused") == 1
    assert scene.reader.is_unstaged


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_plan_makes_a_reader_scatter_outside_its_grant(data: st.DataObject) -> None:
    """Each page of a ticket is written once by each rank and group at most, whatever plans come in which order."""
    groups = {"kv": PoolId(0), "window": PoolId(1)}
    grants = StagedGrants(groups)
    ids = st.lists(st.integers(0, 9), max_size=4)
    covered = [tuple(map(PageId, data.draw(st.lists(st.integers(0, 9), unique=True, max_size=6)))) for _ in groups]
    firsts = (data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)))
    grants.expect(ExpectPages(P, TICKET, firsts, tuple(covered)))
    part = st.builds(pages, st.sampled_from(["kv", "window", "other"]), st.integers(-1, 9), ids)
    taken: set[tuple[int, str, int]] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        writer, plan = data.draw(st.integers(0, 1)), data.draw(st.lists(part, max_size=3))
        verdict = grants.take(P, writer, TICKET, plan)
        if verdict is not PlanVerdict.GRANTED:
            continue
        for of in plan:
            pool = groups[of.group]
            for index, page in enumerate(unpack_u32(of.pages), of.first):
                assert covered[pool][index - firsts[pool]] == page
                assert index >= firsts[pool]
                assert (writer, of.group, index) not in taken
                taken.add((writer, of.group, index))
    grants.forget(TICKET)
    assert grants.take(P, 0, TICKET, [pages()]) is PlanVerdict.UNKNOWN


def test_a_ticket_of_another_peer_is_unknown() -> None:
    grants = StagedGrants({"kv": PoolId(0)})
    grants.expect(ExpectPages(P, TICKET, (0,), ((PageId(0),),)))
    assert grants.take(D, 0, TICKET, [pages()]) is PlanVerdict.UNKNOWN
    grants.drop_peer(P)
    assert grants.take(P, 0, TICKET, [pages()]) is PlanVerdict.UNKNOWN
    assert not grants._tickets


def test_data_for_another_lease_or_none_is_not_scattered() -> None:
    scene = StagedScene(1, 2)
    say(scene, plan_for(RingLease(0, 0, 256), pages(), write=5))
    say(scene, ASK)
    say(scene, plan_for(RingLease(1, 0, 256), pages()))
    assert scene.reader.count("staging_malformed") == 1
    assert not any(any(content) for content in contents(scene))


def test_frames_that_are_none_are_counted() -> None:
    scene = StagedScene(1, 2)
    scene.writer.transports[0].write(D, (), b"dGxx", 0)
    scene.turn()
    assert scene.reader.count("staging_malformed") == 1


ASK = StageAsk(write=77, num_bytes=1100)


def say(scene: StagedScene, frame: StageFrame) -> None:
    """The writing rank tells the first reading rank."""
    scene.writer.transports[0].write(D, (), encode_stage(frame), 0)
    scene.turn()


# ---------------------------------------------------------------- ahead of the forward


def gate(pages: int = len(DST)) -> OpenGate:
    return OpenGate(D, TICKET, (pages, pages))


def test_memory_is_there_before_the_pages_are_computed() -> None:
    scene = StagedScene(1, 2)
    fill(scene)
    scene.writer_does(gate())
    for _ in range(5):
        scene.turn()
    assert all(staged.reader.ring.num_leased_bytes for staged in scene.reader.staged())
    scene.post(0, 0, SRC[:2], DST[:2])
    scene.until_said(ChunkSent)
    for _ in range(5):
        scene.turn()
    scene.post(1, 2, SRC[2:4], DST[2:4])
    scene.until_said(ChunkSent)
    assert scene.writer.count("staged_ahead") == 4  # of each chunk the first write to each of two ranks
    assert problems(scene, DST[:4]) == []


def test_what_is_asked_for_ahead_is_asked_once_and_given_back_at_the_end() -> None:
    scene = StagedScene(1, 2)
    (writer,) = scene.writer.staged()
    scene.writer_does(gate())
    for reader in range(2):
        writer.writer.reserve(D, reader, TICKET, 700)
    for _ in range(5):
        scene.turn()
    assert [len([*staged.reader.ring]) for staged in scene.reader.staged()] == [1, 1]
    scene.writer_does(CloseGate(D, TICKET))
    for _ in range(5):
        scene.turn()
    assert scene.writer.is_unstaged
    assert scene.reader.is_unstaged


def test_what_is_reserved_is_given_back_to_those_who_wait() -> None:
    """A slow forward pins no memory."""
    scene = StagedScene(1, 2)
    fill(scene)
    reader = next(scene.reader.staged())
    scene.writer_does(gate())
    for _ in range(5):
        scene.turn()
    say(scene, StageAsk(write=500, num_bytes=reader.reader.ring.num_bytes))
    assert reader.reader.ring.num_waiting == 1
    for _ in range(10):
        scene.turn()
    assert reader.reader.moves[StagedLeaseState.WAITING, StagedLeaseEvent.ADMIT] == 1  # it had its turn, of no use
    assert reader.is_quiet
    scene.post(0, 0, SRC[:2], DST[:2])
    scene.until_said(ChunkSent)
    assert scene.writer.count("staged_ahead") == 1  # of the other rank
    assert problems(scene, DST[:2]) == []


def test_at_most_half_of_a_ring_is_reserved() -> None:
    scene = StagedScene(1, 2)
    reader = next(scene.reader.staged())
    for write in range(1, 10):
        say(scene, StageReserve(write=write, num_bytes=1100))
    assert 0 < reader.reader.ring.num_leased_bytes <= reader.reader.ring.num_bytes // 2
    assert reader.reader.ring.num_waiting == 0


def test_what_was_done_is_told_once() -> None:
    scene = StagedScene(1, 2)
    transfer(scene)
    told: Counter[str] = Counter()
    for report in (*scene.said, *scene.heard):
        if isinstance(report, StagingUsed):
            told.update(dict(report.counts))
    assert told["staged_writes"] == scene.writer.count("staged_writes") > 0
    assert told["scattered_bytes"] == scene.reader.count("scattered_bytes") > 0
    spent = sum(memory.scatter_microseconds() for memory in scene.reader.arenas)
    assert told["scatter_microseconds"] == scene.reader.count("scatter_microseconds") == spent > 0


# ---------------------------------------------------------------- which path


def routes(
    num_writers: int, num_readers: int, heads: int = 8, dst: DType = DType.BFLOAT16, dst_size: int = 16
) -> list[Route]:
    block = (HeadBlock(heads, 4, 64),)
    src = PageFormat(block, 16, DType.BFLOAT16, num_writers)
    plan = plan_routes(src, PageFormat(block, dst_size, dst, num_readers))
    return [route for row in plan for route in row]


@pytest.mark.parametrize(
    ("of", "mode", "num_bytes", "is_staged"),
    [
        (routes(2, 2), StagingMode.AUTO, 0, False),  # equal sizes
        (routes(2, 2), StagingMode.ON, 0, False),
        (routes(1, 4, heads=1), StagingMode.ON, 0, False),  # a latent
        (routes(1, 2), StagingMode.AUTO, 1000 * SHORT_RUN_BYTES - ASKING_BYTES - 1, True),
        (routes(1, 2), StagingMode.AUTO, 1000 * SHORT_RUN_BYTES - ASKING_BYTES, False),
        (routes(1, 2), StagingMode.ON, 1 << 30, True),
        (routes(1, 1, dst=DType.FP8_E4M3), StagingMode.AUTO, 1 << 30, True),
        (routes(1, 1, dst_size=64), StagingMode.AUTO, 1 << 30, True),
        (routes(1, 1, heads=1, dst_size=8), StagingMode.AUTO, 1 << 30, True),
    ],
)
def test_one_rule_chooses_the_path(of: list[Route], mode: StagingMode, num_bytes: int, is_staged: bool) -> None:
    assert choose(mode, of, 1000, num_bytes) is is_staged


def test_a_short_prompt_asks_for_no_memory() -> None:
    """However short its runs are."""
    assert not choose(StagingMode.AUTO, routes(1, 2), 100, 100)
