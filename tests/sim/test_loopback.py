"""The fake's own powers: every disorder of the data link as one value, told from outside, the same each time."""

import random

import pytest

from deltaserve.core.extents import Region
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import FenceResult, RemoteRank, RemoteRegion, TransportError, WriteId, WriteState
from deltaserve.sim.loopback import (
    Fabric,
    Fate,
    LoopbackTransport,
    Mover,
    Part,
    Policy,
    Posted,
    WriteArrival,
    prompt,
)
from tests.transports.sides import REGION, Side, copy, join

SIZE = 64


class Link:
    """A writer `p` full of x and an empty reader `d`, and what an observer saw."""

    def __init__(
        self, policy: Policy = prompt, fence_result: FenceResult = FenceResult.CLOSED, mover: Mover = Mover.WRITER
    ) -> None:
        self.landed: list[WriteArrival] = []
        self.fabric = Fabric(policy, self.landed.append, mover)
        self.p = self.side("p", b"x")
        self.d = self.side("d", b".", fence_result)
        join(self.p, self.d)

    def side(self, name: str, fill: bytes, fence_result: FenceResult = FenceResult.CLOSED) -> Side:
        memory = bytearray(fill * SIZE)
        transport = LoopbackTransport(PeerName(name), self.fabric, {REGION: memory}, fence_result)
        region = Region(REGION, 4096, SIZE, "cpu")
        transport.register(region)
        return Side(PeerName(name), memory, transport, region)

    def write(self, num_copies: int = 4) -> WriteId:
        """Copies of 4 bytes to the start of the reader's region, with the notification `n`."""
        return self.p.transport.write(self.d.name, [copy(4 * i, 4 * i, 4) for i in range(num_copies)], b"n")

    def poll(self, write: WriteId) -> WriteState:
        return self.p.transport.poll(write)

    def heard(self) -> list[bytes]:
        return [message for _, message, _ in self.d.transport.notifications()]

    def num_landed(self) -> int:
        return self.d.memory.count(b"x")


def always(fate: Fate) -> Policy:
    return lambda posted: fate


def test_delay() -> None:
    link = Link(always(Fate(lands=(Part(2.0),), notified_s=3.0, told_s=4.0)))
    write = link.write()
    seen = []
    for now in (1.0, 2.0, 3.0, 4.0):
        link.fabric.advance(now)
        seen.append((link.num_landed(), link.heard(), link.poll(write)))
    pending, done = WriteState.PENDING, WriteState.DONE
    assert seen == [(0, [], pending), (16, [], pending), (16, [b"n"], pending), (16, [], done)]
    assert link.fabric.now == 4.0


def test_nothing_happens_before_someone_looks() -> None:
    link = Link()
    link.write()
    assert link.num_landed() == 0
    assert link.fabric.next_due() == 0.0
    assert link.heard() == [b"n"]
    assert link.num_landed() == 16
    assert link.fabric.next_due() is None


def test_step_goes_event_by_event_and_moves_time() -> None:
    link = Link(always(Fate(lands=(Part(1.0, 1), Part(5.0)), notified_s=7.0, told_s=9.0)))
    link.write()
    times = []
    while link.fabric.next_due() is not None:
        link.fabric.step()
        times.append((link.fabric.now, link.num_landed()))
    assert times == [(1.0, 4), (5.0, 16), (7.0, 16), (9.0, 16)]
    with pytest.raises(IndexError):
        link.fabric.step()


def test_completion_lost() -> None:
    link = Link(always(Fate(told_s=None)))
    write = link.write()
    link.fabric.advance(1e9)
    assert link.num_landed() == 16
    assert link.heard() == [b"n"]
    assert link.poll(write) is WriteState.PENDING


def test_error_reported_but_lands_later() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=None, told_s=1.0, told=WriteState.ERROR)))
    write = link.write()
    link.fabric.advance(1.0)
    assert link.poll(write) is WriteState.ERROR
    assert link.num_landed() == 0
    link.fabric.advance(5.0)
    assert link.num_landed() == 16


def test_only_the_first_descriptors() -> None:
    link = Link(always(Fate(lands=(Part(0.0, 3),), notified_s=None, told=WriteState.ERROR)))
    write = link.write()
    assert link.poll(write) is WriteState.ERROR
    assert link.d.memory[:16] == b"x" * 12 + b"...."


def test_completion_before_data_carries_the_bytes_of_that_moment() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), told_s=1.0)))
    write = link.write()
    link.fabric.advance(1.0)
    assert link.poll(write) is WriteState.DONE
    assert link.num_landed() == 0
    link.p.memory[:] = b"y" * SIZE  # allowed: it read DONE
    link.fabric.advance(5.0)
    assert link.num_landed() == 16


def test_notification_before_data() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=1.0, told_s=5.0)))
    link.write()
    link.fabric.advance(1.0)
    assert link.heard() == [b"n"]
    assert link.num_landed() == 0


def test_a_source_changed_too_early_lands_changed() -> None:
    """Source pages must stay pinned until DONE or the writer's own fence: a breach is seen as wrong bytes."""
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=5.0, told_s=5.0)))
    link.write()
    link.p.memory[:] = b"y" * SIZE
    link.fabric.advance(5.0)
    assert link.d.memory[:16] == b"y" * 16


def test_the_writer_s_own_fence_stops_nothing_but_its_reading() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), told_s=1.0, told=WriteState.ERROR)))
    write = link.write()
    link.fabric.advance(1.0)
    assert link.poll(write) is WriteState.ERROR
    assert link.p.transport.fence(link.d.name) is FenceResult.CLOSED
    link.p.memory[:] = b"y" * SIZE
    link.fabric.advance(5.0)
    assert link.num_landed() == 16


def test_fenced_endpoint_drops_what_comes_later() -> None:
    link = Link(always(Fate(lands=(Part(1.0, 1), Part(5.0)), notified_s=5.0, told_s=5.0)))
    write = link.write()
    link.fabric.advance(1.0)
    assert link.d.transport.fence(link.p.name) is FenceResult.CLOSED
    link.fabric.advance(5.0)
    assert link.num_landed() == 4
    assert link.poll(write) is WriteState.ERROR
    assert [(event.dropped, len(event.copies)) for event in link.landed] == [(False, 1), (True, 3)]


def test_late_bytes_miss_a_reopened_endpoint() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=5.0, told_s=None)))
    link.write()
    for side, other in ((link.d, link.p), (link.p, link.d)):
        side.transport.fence(other.name)
    join(link.p, link.d)
    link.fabric.advance(5.0)
    assert link.num_landed() == 0
    assert link.heard() == []
    link.fabric.policy = prompt
    link.write(1)
    assert link.heard() == [b"n"]
    assert link.num_landed() == 4


def test_impossible_fence_is_said_and_true() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=5.0)), FenceResult.IMPOSSIBLE)
    link.write()
    assert [link.d.transport.fence(link.p.name) for _ in range(2)] == [FenceResult.IMPOSSIBLE] * 2
    assert link.d.transport.fence(PeerName("stranger")) is FenceResult.CLOSED
    link.fabric.advance(5.0)
    assert link.num_landed() == 16


def test_refused_post_starts_nothing() -> None:
    link = Link(lambda posted: None)
    with pytest.raises(TransportError, match="refused"):
        link.write()
    assert link.fabric.next_due() is None


def test_policy_sees_the_write() -> None:
    seen: list[Posted] = []

    def policy(posted: Posted) -> Fate:
        seen.append(posted)
        return Fate()

    link = Link(policy)
    link.fabric.advance(3.0)
    write = link.write(2)
    assert seen == [Posted(PeerName("p"), PeerName("d"), write, 2, 8, 3.0)]


def test_observer_sees_landings_inside_a_poll() -> None:
    link = Link()
    write = link.write(2)
    assert link.poll(write) is WriteState.DONE
    [landed] = link.landed
    assert (landed.src, landed.dst, landed.write) == (PeerName("p"), PeerName("d"), write)
    assert landed.copies == tuple(copy(4 * i, 4 * i, 4) for i in range(2))
    assert (landed.writer, landed.reader) == (link.p.transport, link.d.transport)
    assert landed.reads_source
    assert not landed.dropped


def test_time_never_goes_back() -> None:
    fabric = Fabric()
    fabric.advance(5.0)
    fabric.advance(3.0)
    assert fabric.now == 5.0


def test_restarted_reader_under_its_old_name_is_untouched_by_the_past() -> None:
    link = Link(always(Fate(lands=(Part(5.0),), notified_s=5.0)))
    link.write()
    link.d.transport.close()
    reborn = link.side("d", b".")
    of_reborn = reborn.transport.open(link.p.name)
    link.p.transport.fence(link.d.name)
    of_p = link.p.transport.open(reborn.name)
    link.p.transport.attach(reborn.name, [RemoteRank(of_reborn, (RemoteRegion(REGION, 4096, SIZE, "cpu"),))])
    reborn.transport.attach(link.p.name, [RemoteRank(of_p)])
    link.fabric.advance(5.0)
    assert link.d.memory == reborn.memory == b"." * SIZE
    assert reborn.transport.notifications() == []


def test_memory_must_cover_the_region() -> None:
    transport = LoopbackTransport(PeerName("p"), Fabric(), {REGION: bytearray(8)})
    with pytest.raises(TransportError, match="no memory"):
        transport.register(Region(REGION, 0, 9, "cpu"))
    with pytest.raises(TransportError, match="no memory"):
        transport.register(Region(RegionId(1), 0, 8, "cpu"))


def run_of(seed: int) -> list[tuple[float, bytes, WriteState]]:
    """A run of random fates, as a trace."""
    chance = random.Random(seed)

    def policy(posted: Posted) -> Fate:
        times = [round(chance.uniform(0, 3), 3) for _ in range(3)]
        return Fate(
            lands=(Part(times[0], chance.randint(0, 4)), Part(times[0] + 1)),
            notified_s=chance.choice([None, times[1]]),
            told_s=chance.choice([None, times[2]]),
            told=chance.choice([WriteState.DONE, WriteState.ERROR]),
        )

    link = Link(policy)
    writes = [link.write() for _ in range(20)]
    trace = []
    while (due := link.fabric.next_due()) is not None:
        link.fabric.advance(due)
        trace += [(due, bytes(link.d.memory), link.poll(write)) for write in writes]
    return trace


def test_same_seed_same_trace() -> None:
    assert run_of(3) == run_of(3)
    assert run_of(3) != run_of(4)


# ---------------------------------------------------------------- readers that copy


SLOW = Fate(lands=(Part(1.0, 1), Part(2.0)), notified_s=2.0, told_s=2.0)


def copying_pair() -> tuple[Fabric, Side, Side]:
    """A write of two copies is under way, of which the first is over."""
    link = Link(lambda posted: SLOW, mover=Mover.READER)
    link.p.transport.write(link.d.name, [copy(0, 0, 8), copy(8, 8, 8)], b"landed")
    link.fabric.advance(1.5)
    return link.fabric, link.p, link.d


def test_a_reader_that_copies_announces_what_stood_still() -> None:
    fabric, writer, reader = copying_pair()
    fabric.advance(2.5)
    writer.transport.fence(reader.name)
    writer.memory[:] = b"b" * SIZE
    assert receive_now(reader) == [b"landed"]
    assert reader.memory[:17] == b"x" * 16 + b"."


def test_a_reader_that_copies_announces_nothing_after_the_writer_s_fence() -> None:
    fabric, writer, reader = copying_pair()
    writer.transport.fence(reader.name)
    writer.memory[:] = b"b" * SIZE
    fabric.advance(2.5)
    assert receive_now(reader) == []
    assert reader.memory[:16] == b"x" * 8 + b"b" * 8, "it has copied all the same"


def test_a_reader_that_has_fenced_copies_no_more() -> None:
    fabric, writer, reader = copying_pair()
    reader.transport.fence(writer.name)
    fabric.advance(2.5)
    assert reader.memory[:16] == b"x" * 8 + b"." * 8


def test_the_memory_of_a_dead_writer_stands_still() -> None:
    fabric, writer, reader = copying_pair()
    assert isinstance(writer.transport, LoopbackTransport)
    fabric.sever(writer.transport, 1.0)
    fabric.advance(2.5)
    assert receive_now(reader) == [b"landed"]


def receive_now(side: Side) -> list[bytes]:
    return [data for _, data, _ in side.transport.notifications()]


def test_a_stopped_reader_that_copies_does_so_when_it_goes_on() -> None:
    fabric, _, reader = copying_pair()
    assert isinstance(reader.transport, LoopbackTransport)
    reader.transport.stopped_until = 5.0
    fabric.advance(4.0)
    assert reader.memory[:16] == b"x" * 8 + b"." * 8
    fabric.advance(5.0)
    assert receive_now(reader) == [b"landed"]
    assert reader.memory[:16] == b"x" * 16


def test_a_stopped_reader_that_copies_may_go_on_earlier_than_it_was_to() -> None:
    fabric, _, reader = copying_pair()
    assert isinstance(reader.transport, LoopbackTransport)
    reader.transport.stopped_until = 5.0
    fabric.advance(2.0)
    reader.transport.go_on(2.0)
    fabric.advance(2.0)
    assert receive_now(reader) == [b"landed"]
