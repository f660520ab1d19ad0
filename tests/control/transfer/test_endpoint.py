"""The data plane over loopback: windows, order of notifications, gates, failures, fences, evidence at the reader."""

import pytest

from deltaserve.control.transfer.commands import (
    ChunkSent,
    CloseGate,
    EndpointFailed,
    EndpointOpened,
    FencePeer,
    GateDrained,
    GateDraining,
    OpenEndpoint,
    OpenGate,
    PagesVerified,
    PeerFenced,
    TicketId,
    WriteFailed,
)
from deltaserve.core.transport import Evidence, FenceResult, WriteState
from deltaserve.core.wire.messages import Done, Drain, RankEnd
from deltaserve.sim.loopback import Fate, Part, Posted
from tests.control.transfer.endpoints import PAGE_BYTES, Pair
from tests.control.transfer.toys import DECODE, PAYLOAD, PREFILL

FOREVER = 1e9


def slow(posted: Posted) -> Fate:
    """Every write takes a second."""
    return Fate(lands=(Part(1.0),), notified_s=1.0, told_s=1.0)


@pytest.mark.parametrize("num_pools", [1, 2])
def test_a_transfer_of_two_chunks(num_pools: int) -> None:
    pair = Pair(num_pools)
    ticket = pair.open()
    src, dst = [3, 4, 9, 2, 7], [10, 11, 12, 20, 21]
    for pool in range(num_pools):
        pair.writer.fill(pool, src)
    reports = pair.post(pair.chunk(ticket, 0, 0, src[:3], dst[:3]))
    reports += pair.post(pair.chunk(ticket, 1, 3, src[3:], dst[3:], payload=PAYLOAD))
    reports += pair.until(1.0) + pair.until(2.0) + pair.until(3.0)
    assert reports == [
        ChunkSent(ticket, 0, 3 * PAGE_BYTES * num_pools, False),
        ChunkSent(ticket, 1, 2 * PAGE_BYTES * num_pools + len(PAYLOAD), True),
    ]
    assert pair.writer.endpoint.counters["bytes_sent"] == 5 * PAGE_BYTES * num_pools + len(PAYLOAD)
    dones = pair.dones()
    assert [(d.chunk, d.is_last) for d in dones] == [(0, False), (1, True)]
    spans = [[(piece.pool, piece.first, piece.end) for piece in d.pieces] for d in dones]
    assert spans == [[(p, *span) for p in range(num_pools)] for span in ((0, 3), (3, 5))]
    for pool in range(num_pools):
        assert pair.reader.pages(pool, dst) == pair.writer.pages(pool, src)
    assert [d.payload for d in dones] == [None, PAYLOAD]
    assert pair.verify(ticket, dones, dst) == PagesVerified(ticket)
    assert pair.writer.endpoint.is_idle()


def test_a_transfer_of_one_window_is_one_post() -> None:
    pair = Pair()
    pair.writer.fill(0, [1, 2])
    pair.post(pair.chunk(pair.open(), 0, 0, [1, 2], [5, 6], payload=PAYLOAD))
    (post,) = pair.writer.transport.posts
    assert post.num_bytes == 2 * PAGE_BYTES
    assert [d.payload for d in pair.dones()] == [PAYLOAD]


def test_a_payload_of_tens_of_kilobytes_travels() -> None:
    pair = Pair()
    payload = bytes(range(256)) * 256
    pair.post(pair.chunk(pair.open(), 0, 0, [1], [5], payload=payload))
    assert [d.payload for d in pair.dones()] == [payload]


def test_zero_pages_send_the_payload_alone() -> None:
    pair = Pair()
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [], [], payload=PAYLOAD))
    (sent,) = pair.until(1.0)
    assert isinstance(sent, ChunkSent)
    assert sent.is_last
    assert [len(w.copies) for w in pair.writer.transport.posts] == [0]
    (done,) = pair.dones()
    assert (done.pieces, done.payload) == ((), PAYLOAD)
    assert pair.verify(ticket, [done], []) == PagesVerified(ticket)


def test_windows_are_bounded_and_two_are_in_flight() -> None:
    window = 100  # not a multiple of anything: copies are cut
    pair = Pair(window_bytes=window)
    pair.fabric.policy = slow
    ticket = pair.open()
    src, dst = list(range(0, 12, 2)), list(range(1, 13, 2))  # six runs of one page, 384 bytes
    pair.writer.fill(0, src)
    pair.post(pair.chunk(ticket, 0, 0, src, dst, payload=PAYLOAD))
    posts = pair.writer.transport.posts
    numbers = [len(posts)]
    for second in range(1, 4):
        pair.until(float(second))
        numbers.append(len(posts))
    assert numbers == [2, 3, 4, 4]
    assert all(write.num_bytes <= window for write in posts)
    assert [write.num_bytes for write in posts[:4]] == [100, 100, 100, 84]
    assert [write.notification is not None for write in posts] == [False] * 3 + [True]
    assert pair.reader.pages(0, dst) == pair.writer.pages(0, src)


def test_the_bound_on_windows_holds_over_all_tickets_of_a_peer() -> None:
    pair = Pair()
    pair.fabric.policy = slow
    for seq in (1, 2, 3):
        pair.post(pair.chunk(pair.open(seq), 0, 0, [seq], [seq]))
    assert len(pair.writer.transport.posts) == 2
    pair.until(1.0)
    assert len(pair.writer.transport.posts) == 3


def test_tickets_take_turns_window_by_window() -> None:
    """One page of another ticket does not wait for the hundreds that were posted before it."""
    pair = Pair(window_bytes=PAGE_BYTES)
    pair.fabric.policy = slow
    long, short = pair.open(1), pair.open(2)
    pages = list(range(0, 30, 2))
    pair.post(pair.chunk(long, 0, 0, pages, pages, payload=PAYLOAD))
    pair.post(pair.chunk(short, 0, 0, [31], [31], payload=PAYLOAD))
    assert pair.until(1.0) == []
    assert pair.until(2.0) == [ChunkSent(short, 0, PAGE_BYTES + len(PAYLOAD), True)]
    assert [d.ticket for d in pair.dones()] == [short.seq]
    assert len(pair.writer.transport.posts) == 6
    assert [type(r) for second in range(3, 20) for r in pair.until(float(second))] == [ChunkSent]


def test_a_notification_follows_every_window_of_its_chunk() -> None:
    pair = Pair(window_bytes=PAGE_BYTES)
    pair.fabric.policy = slow
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [0, 2, 4], [0, 2, 4]))
    posts = pair.writer.transport.posts
    assert [p.notification for p in posts] == [None, None]
    pair.until(0.9)
    assert len(posts) == 2
    pair.until(1.0)
    assert posts[2].notification is not None
    assert pair.dones() == []
    pair.until(2.0)
    assert [d.chunk for d in pair.dones()] == [0]


def test_the_write_with_the_payload_follows_all_data_of_its_ticket() -> None:
    pair = Pair()
    ticket = pair.open()
    fates = [3.0, 0.1]

    def policy(posted: Posted) -> Fate:
        delay = fates.pop(0)
        return Fate(lands=(Part(delay),), notified_s=delay, told_s=delay)

    pair.fabric.policy = policy
    pair.post(pair.chunk(ticket, 0, 0, [1], [1]))
    pair.post(pair.chunk(ticket, 1, 1, [2], [2], payload=PAYLOAD))
    posts = pair.writer.transport.posts
    pair.until(2.9)
    assert len(posts) == 1  # chunk 0 is not DONE
    assert [type(r) for r in pair.until(3.0)] == [ChunkSent]
    assert [p.notification is not None for p in posts] == [True, True]


def test_closing_the_gate_midway_drains_cleanly_within_a_window() -> None:
    pair = Pair(window_bytes=PAGE_BYTES)
    pair.fabric.policy = slow
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [0, 2, 4, 6], [0, 2, 4, 6], payload=PAYLOAD))
    two_windows = GateDraining(ticket, 2 * PAGE_BYTES)
    assert pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now) == [two_windows]
    assert pair.until(0.4) == []
    assert pair.until(0.5) == [two_windows]
    assert pair.until(1.0) == [GateDrained(ticket, Drain.CLEAN)]
    assert pair.until(FOREVER) == []
    assert len(pair.writer.transport.posts) == 2
    assert pair.dones() == []
    assert pair.writer.endpoint.is_idle()


def test_closing_an_idle_gate_answers_at_once_and_drops_later_chunks() -> None:
    pair = Pair()
    ticket = pair.open()
    assert pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now) == [
        GateDrained(ticket, Drain.CLEAN)
    ]
    assert pair.post(pair.chunk(ticket, 0, 0, [1], [1], payload=PAYLOAD)) == []
    assert pair.writer.transport.posts == []


def test_a_chunk_announced_before_the_close_is_still_reported_sent() -> None:
    pair = Pair()
    pair.fabric.policy = slow
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [1], [1]))
    pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now)
    assert pair.until(1.0) == [ChunkSent(ticket, 0, PAGE_BYTES, False), GateDrained(ticket, Drain.CLEAN)]


def test_a_write_that_never_completes_counts_as_failed_after_a_while() -> None:
    pair = Pair()
    pair.fabric.policy = lambda posted: Fate(told_s=None)
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [1], [1]))
    assert pair.until(4.9) == []
    (failed,) = pair.until(5.1)
    assert isinstance(failed, WriteFailed)
    assert "never completed" in failed.message


def test_a_failed_write_is_told_once_and_drains_dirty() -> None:
    pair = Pair(window_bytes=PAGE_BYTES)
    pair.fabric.policy = lambda posted: Fate(lands=(Part(5.0),), notified_s=None, told_s=1.0, told=WriteState.ERROR)
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [0, 2, 4, 6], [0, 2, 4, 6]))
    (failed,) = pair.until(1.0)  # both windows failed
    assert isinstance(failed, WriteFailed)
    assert (failed.peer, failed.ticket) == (DECODE, ticket)
    assert len(pair.writer.transport.posts) == 2
    assert pair.post(pair.chunk(ticket, 1, 4, [8], [8])) == []
    assert pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now) == [
        GateDrained(ticket, Drain.DIRTY)
    ]
    assert pair.until(FOREVER) == []
    assert pair.writer.endpoint.is_idle()


def test_one_failed_window_waits_for_the_other_before_it_drains() -> None:
    pair = Pair(window_bytes=PAGE_BYTES)
    fates = [Fate(lands=(), told_s=1.0, told=WriteState.ERROR), Fate(lands=(Part(3.0),), told_s=3.0)]
    pair.fabric.policy = lambda posted: fates.pop(0)
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [0, 2, 4], [0, 2, 4]))
    assert [type(r) for r in pair.until(1.0)] == [WriteFailed]
    one_window = GateDraining(ticket, PAGE_BYTES)
    assert pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now) == [one_window]
    assert not pair.writer.endpoint.is_idle()
    assert pair.until(2.0) == [one_window]
    assert pair.until(3.0) == [GateDrained(ticket, Drain.DIRTY)]
    assert pair.writer.endpoint.is_idle()


def test_a_refused_post_dirties_its_ticket_only() -> None:
    pair = Pair()
    first, second = pair.open(1), pair.open(2)
    pair.fabric.policy = lambda posted: None
    (failed,) = pair.post(pair.chunk(first, 0, 0, [1], [1], payload=PAYLOAD))
    assert isinstance(failed, WriteFailed)
    pair.fabric.policy = lambda posted: Fate()
    pair.writer.fill(0, [2])
    pair.post(pair.chunk(second, 0, 0, [2], [2], payload=PAYLOAD))
    assert [type(r) for r in pair.until(1.0)] == [ChunkSent]
    assert pair.writer.endpoint.perform(CloseGate(DECODE, first), pair.fabric.now) == [GateDrained(first, Drain.DIRTY)]


def test_pages_outside_the_readers_arena_fail_the_ticket() -> None:
    pair = Pair()
    ticket = pair.open()
    (failed,) = pair.post(pair.chunk(ticket, 0, 0, [1], [32]))
    assert isinstance(failed, WriteFailed)


def test_a_fence_drops_everything_of_the_peer() -> None:
    pair = Pair()
    pair.fabric.policy = slow
    tickets = [pair.open(seq) for seq in (1, 2, 3)]
    for seq, ticket in enumerate(tickets):
        pair.post(pair.chunk(ticket, 0, 0, [seq], [seq]))
    assert pair.writer.endpoint.perform(FencePeer(DECODE), pair.fabric.now) == [PeerFenced(DECODE, FenceResult.CLOSED)]
    assert pair.writer.endpoint.is_idle()
    assert pair.writer.endpoint.perform(CloseGate(DECODE, tickets[0]), pair.fabric.now) == []
    assert pair.post(pair.chunk(tickets[0], 1, 1, [5], [5])) == []
    assert pair.until(FOREVER) == []
    assert len(pair.writer.transport.posts) == 2


def test_the_readers_fence_keeps_late_bytes_out() -> None:
    pair = Pair()
    pair.fabric.policy = slow
    pair.writer.fill(0, [1])
    before = pair.reader.pages(0, [1])
    pair.post(pair.chunk(pair.open(), 0, 0, [1], [1]))
    assert pair.reader.endpoint.perform(FencePeer(PREFILL), pair.fabric.now) == [
        PeerFenced(PREFILL, FenceResult.CLOSED)
    ]
    (failed,) = pair.until(FOREVER)
    assert isinstance(failed, WriteFailed)
    assert pair.reader.pages(0, [1]) == before


def test_a_new_endpoint_serves_new_tickets() -> None:
    pair = Pair()
    pair.writer.endpoint.perform(FencePeer(DECODE), pair.fabric.now)
    pair.reader.endpoint.perform(FencePeer(PREFILL), pair.fabric.now)
    pair.connect()
    ticket = pair.open(5)
    pair.post(pair.chunk(ticket, 0, 0, [1], [1], payload=PAYLOAD))
    assert [type(r) for r in pair.until(1.0)] == [ChunkSent]


def test_a_gate_is_not_opened_for_a_peer_without_an_endpoint() -> None:
    pair = Pair()
    pair.writer.endpoint.perform(FencePeer(DECODE), pair.fabric.now)
    ticket = pair.open(2)
    assert pair.post(pair.chunk(ticket, 0, 0, [1], [1], payload=PAYLOAD)) == []
    assert pair.until(1.0) == []


def test_regions_that_lack_a_component_fail_the_endpoint() -> None:
    pair = Pair(num_pools=2)
    (opened,) = pair.reader.endpoint.perform(OpenEndpoint(PREFILL, 1), 0.0)
    assert isinstance(opened, EndpointOpened)
    (end,) = opened.ends
    partial = RankEnd(metadata=end.metadata, regions=tuple(r for r in end.regions if r.component != "stamps-window"))
    reports = pair.writer.endpoint.perform(OpenEndpoint(DECODE, 1, (partial,)), 0.0)
    assert isinstance(reports[-1], EndpointFailed)
    assert "window" in reports[-1].message


def test_damaged_pages_are_found() -> None:
    pair = Pair()
    ticket = pair.open()
    pair.writer.fill(0, [1, 2])
    pair.post(pair.chunk(ticket, 0, 0, [1, 2], [1, 2], payload=PAYLOAD))
    pair.until(1.0)
    dones = pair.dones()
    pair.reader.fill(0, [2])
    assert pair.verify(ticket, dones, [1, 2]) == PagesVerified(ticket)  # equal bytes
    pair.reader.memory.memory[pair.reader.memory.regions[0][1].id][2 * PAGE_BYTES] ^= 1
    report = pair.verify(ticket, dones, [1, 2])
    assert report == PagesVerified(ticket, "checksum of pages in pool 0 differs from the writer's")


def test_a_notification_that_overtook_its_data_does_not_pass_the_checksums() -> None:
    pair = Pair()
    pair.fabric.policy = lambda posted: Fate(lands=(Part(5.0),), notified_s=0.0, told_s=0.0)
    ticket = pair.open()
    pair.writer.fill(0, [1])
    pair.post(pair.chunk(ticket, 0, 0, [1], [1]))
    dones = pair.dones()
    report = pair.verify(ticket, dones, [1])
    assert isinstance(report, PagesVerified)
    assert report.problem is not None


def overtaken(lands_s: float) -> tuple[Pair, TicketId, list[Done]]:
    """Over a transport whose completions prove nothing: announced at once, landing later."""
    pair = Pair(evidence=Evidence.CONTENTS)
    pair.fabric.policy = lambda posted: Fate(lands=(Part(lands_s),), notified_s=0.0, told_s=0.0)
    ticket = pair.open()
    pair.writer.fill(0, [1, 2])
    pair.post(pair.chunk(ticket, 0, 0, [1, 2], [1, 2], payload=PAYLOAD))
    return pair, ticket, pair.dones()


def test_pages_that_have_not_landed_yet_are_looked_at_again() -> None:
    pair, ticket, dones = overtaken(lands_s=1.0)
    reader = pair.reader.endpoint
    assert pair.look(ticket, dones, [1, 2]) == []
    assert not reader.is_idle()
    for now in (0.001, 0.01, 0.1, 0.9):
        pair.fabric.advance(now)
        assert reader.poll(now) == []
    pair.fabric.advance(1.1)
    assert reader.poll(1.1) == [PagesVerified(ticket)]
    assert reader.poll(1.2) == []
    assert reader.is_idle()


def test_pages_that_never_land_are_wrong_in_the_end() -> None:
    pair, ticket, dones = overtaken(lands_s=FOREVER)
    assert pair.look(ticket, dones, [1, 2]) == []
    assert pair.reader.endpoint.poll(1.9) == []
    wrong = PagesVerified(ticket, "checksum of pages in pool 0 differs from the writer's")
    assert pair.reader.endpoint.poll(2.0) == [wrong]
    assert pair.reader.endpoint.is_idle()


def test_a_fence_ends_the_wait_for_pages() -> None:
    pair, ticket, dones = overtaken(lands_s=1.0)
    assert pair.look(ticket, dones, [1, 2]) == []
    assert pair.reader.endpoint.perform(FencePeer(PREFILL), 0.5) == [PeerFenced(PREFILL, FenceResult.CLOSED)]
    pair.fabric.advance(1.5)
    assert pair.reader.endpoint.poll(1.5) == []
    assert pair.reader.endpoint.is_idle()


def test_malformed_notifications_are_counted() -> None:
    pair = Pair()
    pair.writer.transport.write(DECODE, [], b"garbage")
    pair.writer.transport.write(DECODE, [], b"dS\xc1")
    assert pair.dones() == []
    assert pair.reader.endpoint.counters["malformed_notifications"] == 2


def test_a_gate_is_forgotten_with_its_last_chunk() -> None:
    pair = Pair()
    ticket = pair.open()
    pair.post(pair.chunk(ticket, 0, 0, [1], [1], payload=PAYLOAD))
    assert [type(r) for r in pair.until(1.0)] == [ChunkSent]
    closed = pair.writer.endpoint.perform(CloseGate(DECODE, ticket), pair.fabric.now)
    assert closed == [GateDrained(ticket, Drain.CLEAN)], "other ranks may still send: every rank answers"
    assert pair.writer.endpoint.perform(OpenGate(DECODE, ticket), pair.fabric.now) == []
