"""What every adapter must do. Each function is one check over a fresh world; `test_conformance.py` runs all on each.

A new adapter adds one entry to `worlds.WORLDS`, and nothing here changes.
"""

from collections.abc import Callable

import pytest

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import (
    MAX_METADATA_BYTES,
    MAX_NOTIFICATION_BYTES,
    FenceResult,
    Notification,
    RemoteRank,
    RemoteRegion,
    TransportError,
    WriteId,
    WriteState,
)
from tests.transports.sides import REGION, Side, World, copy, finish, hear, join, join_ranks, pattern, receive

MIB = 1 << 20


def pair(world: World, num_bytes: int = MIB) -> tuple[Side, Side]:
    writer, reader = world.side("p", num_bytes), world.side("d", num_bytes)
    join(writer, reader)
    return writer, reader


def bytes_arrive_exactly(world: World) -> None:
    writer, reader = pair(world)
    writer.memory[:] = pattern(MIB)
    spans = [(0, 5000, 1), (100, 0, 4096), (70_001, 300_003, 12_345), (MIB - 1, MIB - 1, 1), (8192, 500_000, 65_536)]
    expected = bytearray(MIB)
    for src, dst, num_bytes in spans:
        expected[dst : dst + num_bytes] = writer.memory[src : src + num_bytes]
    write = writer.transport.write(reader.name, [copy(*span) for span in spans], b"note")
    assert finish(world, writer, write) is WriteState.DONE
    assert reader.memory == expected, "bytes are visible when the writer reads DONE"
    assert receive(world, reader) == [(writer.name, b"note")]


def notification_comes_after_its_data(world: World) -> None:
    writer, reader = pair(world, 4 * MIB)
    for turn in range(20):
        writer.memory[:] = bytes([turn + 1]) * len(writer.memory)
        write = writer.transport.write(reader.name, [copy(0, 0, 4 * MIB)], b"turn %d" % turn)
        arrived: list[Notification] = []
        while not arrived:
            writer.transport.poll(write)
            arrived = reader.transport.notifications()
            world.pause()
        assert arrived == [Notification(writer.name, b"turn %d" % turn)]
        assert reader.memory == writer.memory


def notification_alone_travels(world: World) -> None:
    writer, reader = pair(world)
    write = writer.transport.write(reader.name, [], b"only this")
    assert finish(world, writer, write) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"only this")]
    assert reader.memory == bytes(MIB)


def notification_is_any_bytes_up_to_its_limit(world: World) -> None:
    writer, reader = pair(world)
    for message in (b"\x00\xff\xfe|\n", b"\x00", bytes(range(256)) * (MAX_NOTIFICATION_BYTES // 256)):
        for copies in ([], [copy(0, 0, 64)]):
            write = writer.transport.write(reader.name, copies, message)
            assert finish(world, writer, write) is WriteState.DONE
            assert receive(world, reader) == [(writer.name, message)]
    for wrong in (b"", bytes(MAX_NOTIFICATION_BYTES + 1)):
        with pytest.raises(TransportError, match="notification of"):
            writer.transport.write(reader.name, [copy(0, 0, 64)], wrong)


def silent_writes_announce_nothing(world: World) -> None:
    writer, reader = pair(world)
    writer.memory[:] = pattern(MIB)
    silent = writer.transport.write(reader.name, [copy(0, 0, MIB)], None)
    assert finish(world, writer, silent) is WriteState.DONE
    assert reader.memory == writer.memory
    after = writer.transport.write(reader.name, [], b"after")
    assert finish(world, writer, after) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"after")]
    with pytest.raises(TransportError, match="neither"):
        writer.transport.write(reader.name, [], None)


def many_small_descriptors(world: World) -> None:
    count, size = 4000, 512
    writer, reader = pair(world, count * size)
    writer.memory[:] = pattern(count * size)
    copies = [copy(i * size, (count - 1 - i) * size, size) for i in range(count)]
    write = writer.transport.write(reader.name, copies, b"all")
    assert finish(world, writer, write) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"all")]
    for i in range(count):
        assert reader.memory[(count - 1 - i) * size :][:size] == writer.memory[i * size :][:size]


def two_windows_in_flight(world: World) -> None:
    window = 64 * MIB
    writer, reader = pair(world, 2 * window)
    writer.memory[:] = pattern(MIB) * 128
    writes = [writer.transport.write(reader.name, [copy(i * window, i * window, window)], b"%d" % i) for i in range(2)]
    assert len(set(writes)) == 2
    assert [finish(world, writer, write) for write in writes] == [WriteState.DONE] * 2
    assert sorted(receive(world, reader, 2)) == [(writer.name, b"0"), (writer.name, b"1")]
    assert reader.memory == writer.memory


def both_directions(world: World) -> None:
    a, b = pair(world)
    a.memory[: MIB // 2], b.memory[MIB // 2 :] = b"a" * (MIB // 2), b"b" * (MIB // 2)
    there = a.transport.write(b.name, [copy(0, 0, MIB // 2)], b"there")
    back = b.transport.write(a.name, [copy(MIB // 2, MIB // 2, MIB // 2)], b"back")
    assert finish(world, a, there) is WriteState.DONE
    assert finish(world, b, back) is WriteState.DONE
    assert receive(world, b) == [(a.name, b"there")]
    assert receive(world, a) == [(b.name, b"back")]
    assert a.memory == b.memory == b"a" * (MIB // 2) + b"b" * (MIB // 2)


def two_peers_share_the_regions(world: World) -> None:
    reader, one, two = (world.side(name, MIB) for name in ("d", "p0", "p1"))
    half = MIB // 2
    for at, writer in enumerate((one, two)):
        join(writer, reader)
        writer.memory[:] = bytes([at + 1]) * MIB
    writes = [
        writer.transport.write(reader.name, [copy(0, at * half, half)], b"x") for at, writer in enumerate((one, two))
    ]
    for writer, write in zip((one, two), writes, strict=True):
        assert finish(world, writer, write) is WriteState.DONE
    assert {peer for peer, _ in receive(world, reader, 2)} == {one.name, two.name}
    assert reader.memory == b"\x01" * half + b"\x02" * half


def names_are_told_whole_whatever_is_in_them(world: World) -> None:
    """Nobody takes a name apart: two writers of which one's name begins with the other's are told apart."""
    reader = world.side("decode_0-10.0.0.1:8998", 64)
    writers = [world.side(name, 64) for name in ("prefill_1", "prefill_1_2", "prefill_1_2/a b")]
    for writer in writers:
        join(writer, reader)
        write = writer.transport.write(reader.name, [copy(0, 0, 64)], b"_1_2_")
        assert finish(world, writer, write) is WriteState.DONE
        assert receive(world, reader) == [(writer.name, b"_1_2_")]


def ranks_of_a_peer_are_told_apart(world: World) -> None:
    """Two workers of two ranks each: a write goes to one rank, and the rank that wrote is told."""
    writers, readers = ([world.side(name, MIB) for _ in range(2)] for name in ("p", "d"))
    join_ranks(writers, readers)
    half = MIB // 2
    for source, writer in enumerate(writers):
        for target, reader in enumerate(readers):
            writer.memory[:] = bytes([10 * source + target + 1]) * MIB
            write = writer.transport.write(reader.name, [copy(0, source * half, half)], b"to %d" % target, target)
            assert finish(world, writer, write) is WriteState.DONE
            assert hear(world, reader) == [Notification(writer.name, b"to %d" % target, source)]
    for target, reader in enumerate(readers):
        assert reader.memory == bytes([target + 1]) * half + bytes([target + 11]) * half
    with pytest.raises(TransportError, match="rank 2"):
        writers[0].transport.write(readers[0].name, [], b"x", 2)


def fence_ends_all_ranks_of_the_peer(world: World) -> None:
    """And no endpoint of our other ranks."""
    writers, readers = ([world.side(name, MIB) for _ in range(2)] for name in ("p", "d"))
    join_ranks(writers, readers)
    for writer in writers:
        for target, reader in enumerate(readers):
            write = writer.transport.write(reader.name, [copy(0, 0, 1)], b"first", target)
            assert finish(world, writer, write) is WriteState.DONE
    assert readers[0].transport.fence(writers[0].name) is FenceResult.CLOSED
    for writer in writers:
        writer.memory[:] = b"x" * MIB
        try:
            late = writer.transport.write(readers[0].name, [copy(0, 0, MIB)], b"late", 0)
        except TransportError:
            pass  # refusing at once is as good
        else:
            assert finish(world, writer, late) is WriteState.ERROR
        write = writer.transport.write(readers[1].name, [copy(0, 0, MIB)], b"other", 1)
        assert finish(world, writer, write) is WriteState.DONE
    assert readers[0].memory == bytes(MIB)
    assert readers[1].memory == b"x" * MIB


def ranks_need_endpoints_of_their_own(world: World) -> None:
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    of_reader = reader.rank(reader.transport.open(writer.name))
    writer.transport.open(reader.name)
    for ranks in ([], [of_reader, of_reader], [of_reader, RemoteRank(b"x")]):
        with pytest.raises(TransportError, match="attach to d"):
            writer.transport.attach(reader.name, ranks)
    writer.transport.attach(reader.name, [of_reader])


def fence_leaves_other_peers_alone(world: World) -> None:
    reader, one, two = (world.side(name, MIB) for name in ("d", "p0", "p1"))
    for writer in (one, two):
        join(writer, reader)
        writer.memory[:] = b"x" * MIB
    write = two.transport.write(reader.name, [copy(0, 0, MIB)], b"two")
    assert reader.transport.fence(one.name) is FenceResult.CLOSED
    assert finish(world, two, write) is WriteState.DONE
    assert receive(world, reader) == [(two.name, b"two")]
    again = two.transport.write(reader.name, [copy(0, 0, 1)], b"still")
    assert finish(world, two, again) is WriteState.DONE
    assert receive(world, reader) == [(two.name, b"still")]


def nothing_lands_after_the_fence(world: World) -> None:
    writer, reader = pair(world)
    first = writer.transport.write(reader.name, [copy(0, 0, 1)], b"first")
    assert finish(world, writer, first) is WriteState.DONE
    assert reader.transport.fence(writer.name) is FenceResult.CLOSED
    writer.memory[:] = b"x" * MIB
    try:
        late = writer.transport.write(reader.name, [copy(0, 0, MIB)], b"late")
    except TransportError:
        pass  # refusing at once is as good
    else:
        assert finish(world, writer, late) is WriteState.ERROR
    assert reader.memory == bytes(MIB)
    assert reader.transport.notifications() == []


def fence_is_idempotent_and_knows_strangers(world: World) -> None:
    writer, reader = pair(world)
    assert [reader.transport.fence(writer.name) for _ in range(3)] == [FenceResult.CLOSED] * 3
    assert reader.transport.fence(PeerName("stranger")) is FenceResult.CLOSED
    with pytest.raises(TransportError, match="p"):
        reader.transport.write(writer.name, [copy(0, 0, 1)], None)


def pending_writes_read_error_after_our_fence(world: World) -> None:
    writer, reader = pair(world, 32 * MIB)
    write = writer.transport.write(reader.name, [copy(0, 0, 32 * MIB)], None)
    assert writer.transport.fence(reader.name) is FenceResult.CLOSED
    assert writer.transport.poll(write) is WriteState.ERROR


def same_name_opens_again(world: World) -> None:
    writer, reader = pair(world)
    for turn in range(1, 4):
        writer.transport.fence(reader.name)
        reader.transport.fence(writer.name)
        join(writer, reader)
        writer.memory[:] = bytes([turn]) * MIB
        write = writer.transport.write(reader.name, [copy(0, 0, MIB)], b"again")
        assert finish(world, writer, write) is WriteState.DONE
        assert receive(world, reader) == [(writer.name, b"again")]
        assert reader.memory == writer.memory


def unread_notifications_die_with_the_endpoint(world: World) -> None:
    writer, reader = pair(world)
    write = writer.transport.write(reader.name, [], b"unread")
    assert finish(world, writer, write) is WriteState.DONE
    for side, other in ((writer, reader), (reader, writer)):
        side.transport.fence(other.name)
    join(writer, reader)
    again = writer.transport.write(reader.name, [], b"fresh")
    assert finish(world, writer, again) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"fresh")]


def a_write_may_precede_the_reader_s_attach(world: World) -> None:
    """The reader hears of it once it has attached."""
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    of_reader = reader.transport.open(writer.name)
    of_writer = writer.transport.open(reader.name)
    writer.transport.attach(reader.name, [reader.rank(of_reader)])
    write = writer.transport.write(reader.name, [copy(0, 0, 8)], b"hello")
    for _ in range(5):
        assert reader.transport.notifications() == []
        world.pause()
    reader.transport.attach(writer.name, [RemoteRank(of_writer)])
    assert finish(world, writer, write) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"hello")]


def final_states_are_told_once(world: World) -> None:
    writer, reader = pair(world)
    write = writer.transport.write(reader.name, [copy(0, 0, 8)], None)
    assert finish(world, writer, write) is WriteState.DONE
    assert writer.transport.poll(write) is WriteState.ERROR
    assert writer.transport.poll(WriteId(999)) is WriteState.ERROR


def bad_spans_are_refused_before_anything_moves(world: World) -> None:
    writer, reader = pair(world)
    writer.memory[:] = b"x" * MIB
    good = copy(0, 0, 4096)
    stranger = RegionId(99)
    bad = [
        (Copy(Span(REGION, 0, 10), Span(REGION, 0, 11)), "moves 10 bytes to 11"),
        (copy(MIB - 4, 0, 8), "outside our regions"),
        (copy(-1, 0, 8), "outside our regions"),
        (copy(0, 0, 0), "outside our regions"),
        (copy(0, 0, -8), "outside our regions"),
        (copy(0, MIB, 1), "outside the peer's regions"),
        (copy(0, -8, 16), "outside the peer's regions"),
        (Copy(Span(stranger, 0, 8), Span(REGION, 0, 8)), "outside our regions"),
        (Copy(Span(REGION, 0, 8), Span(stranger, 0, 8)), "outside the peer's regions"),
    ]
    for wrong, words in bad:
        with pytest.raises(TransportError, match=words):
            writer.transport.write(reader.name, [good, wrong], b"never")
    last = writer.transport.write(reader.name, [copy(0, MIB - 1, 1)], b"last")
    assert finish(world, writer, last) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"last")]
    assert reader.memory == bytes(MIB - 1) + b"x"


def bad_metadata_is_refused(world: World) -> None:
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    with pytest.raises(TransportError, match="not open"):
        writer.transport.attach(reader.name, [RemoteRank(b"whatever")])
    of_writer, of_reader = writer.transport.open(reader.name), reader.transport.open(writer.name)
    assert 0 < len(of_writer) <= MAX_METADATA_BYTES
    flipped = of_reader[:-3] + bytes([of_reader[-3] ^ 0x40]) + of_reader[-2:]
    wrong = [
        b"",
        b"x",
        bytes(100),
        of_reader + b"\x00",
        of_reader[:1],
        flipped,
        bytes(MAX_METADATA_BYTES + 1),
        of_writer,
    ]
    for metadata in wrong:
        with pytest.raises(TransportError, match="attach to d"):
            writer.transport.attach(reader.name, [reader.rank(metadata)])
    with pytest.raises(TransportError, match="not attached"):
        writer.transport.write(reader.name, [], b"x")
    writer.transport.attach(reader.name, [reader.rank(of_reader)])
    with pytest.raises(TransportError, match="attached already"):
        writer.transport.attach(reader.name, [reader.rank(of_reader)])


def bad_remote_regions_are_refused(world: World) -> None:
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    of_reader = reader.transport.open(writer.name)
    writer.transport.open(reader.name)
    good = reader.remote_region
    twice, empty = [good, good], [RemoteRegion(1, 4096, 0, "cpu")]
    negative, huge = [RemoteRegion(1, -1, 8, "cpu")], [RemoteRegion(1, (1 << 64) - 4, 8, "cpu")]
    for regions in (twice, empty, negative, huge):
        with pytest.raises(TransportError, match="attach to d"):
            writer.transport.attach(reader.name, [RemoteRank(of_reader, tuple(regions))])


def metadata_of_a_dead_endpoint_never_works(world: World) -> None:
    """Refused at attach, or every write reads ERROR: what a restarted peer's old Hello leads to."""
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    stale = reader.transport.open(writer.name)
    reader.transport.fence(writer.name)
    writer.transport.open(reader.name)
    try:
        writer.transport.attach(reader.name, [reader.rank(stale)])
        write = writer.transport.write(reader.name, [copy(0, 0, MIB)], None)
    except TransportError:
        return
    assert finish(world, writer, write) is WriteState.ERROR


def registration_has_its_time_and_limits(world: World) -> None:
    side = world.side("p", MIB)
    for region in (side.region, Region(RegionId(8), side.region.base, 0, side.region.device)):
        with pytest.raises(TransportError, match="register region"):
            side.transport.register(region)
    side.transport.open(PeerName("d"))
    with pytest.raises(TransportError, match="open d"):
        side.transport.open(PeerName("d"))
    with pytest.raises(TransportError, match="endpoint is open"):
        side.transport.register(Region(RegionId(8), side.region.base, MIB, side.region.device))


def closed_means_closed(world: World) -> None:
    writer, reader = pair(world)
    write = writer.transport.write(reader.name, [copy(0, 0, MIB)], None)
    for _ in range(2):
        writer.transport.close()
    assert writer.transport.poll(write) is WriteState.ERROR
    assert writer.transport.notifications() == []
    with pytest.raises(TransportError, match="closed"):
        writer.transport.open(reader.name)
    with pytest.raises(TransportError, match="write to d"):
        writer.transport.write(reader.name, [], b"x")


CHECKS: tuple[Callable[[World], None], ...] = (
    bytes_arrive_exactly,
    notification_comes_after_its_data,
    notification_alone_travels,
    notification_is_any_bytes_up_to_its_limit,
    silent_writes_announce_nothing,
    many_small_descriptors,
    two_windows_in_flight,
    both_directions,
    two_peers_share_the_regions,
    names_are_told_whole_whatever_is_in_them,
    ranks_of_a_peer_are_told_apart,
    fence_ends_all_ranks_of_the_peer,
    ranks_need_endpoints_of_their_own,
    fence_leaves_other_peers_alone,
    nothing_lands_after_the_fence,
    fence_is_idempotent_and_knows_strangers,
    pending_writes_read_error_after_our_fence,
    same_name_opens_again,
    unread_notifications_die_with_the_endpoint,
    a_write_may_precede_the_reader_s_attach,
    final_states_are_told_once,
    bad_spans_are_refused_before_anything_moves,
    bad_metadata_is_refused,
    bad_remote_regions_are_refused,
    metadata_of_a_dead_endpoint_never_works,
    registration_has_its_time_and_limits,
    closed_means_closed,
)
