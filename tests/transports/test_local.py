"""What only the local transport has: a fence amid a copy, and peers that say what they must not."""

import errno
import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import (
    MAX_NOTIFICATION_BYTES,
    FenceResult,
    RemoteRank,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.transports.local.frames import (
    MAX_COPIES,
    PACKET_BYTES,
    LocalCard,
    LocalHello,
    WriteAssembly,
    decode_card,
    encode_card,
    encode_hello,
    encode_write,
)
from deltaserve.transports.local.memory import EpochWord, FarMemory
from deltaserve.transports.local.memory_access import Addresses, sealed_file
from deltaserve.transports.local.transport import LocalTransport
from tests.descriptors import num_open_files
from tests.transports.host_card import HostCard
from tests.transports.local_world import LocalWorld
from tests.transports.sides import REGION, Side, copy, finish, join, pattern, receive

MIB = 1 << 20
LARGE = 40 * MIB
"""More than one turn of the reader copies."""


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    made = LocalWorld()
    yield made
    made.close()


def pair(world: LocalWorld, num_bytes: int = LARGE) -> tuple[Side, Side]:
    writer, reader = world.side("p", num_bytes), world.side("d", num_bytes)
    join(writer, reader)
    return writer, reader


def amid_a_copy(world: LocalWorld) -> tuple[Side, Side, WriteId]:
    """The reader has copied a part of a write."""
    writer, reader = pair(world)
    writer.memory[:] = b"\x01" * LARGE
    write = writer.transport.write(reader.name, [copy(0, 0, LARGE)], b"landed")
    assert reader.transport.notifications() == []
    assert reader.memory[:1] == b"\x01" and reader.memory[LARGE - 1 :] == b"\x00"
    return writer, reader, write


# ---------------------------------------------------------------- fences


def test_a_fence_amid_the_copy_delivers_nothing(world: LocalWorld) -> None:
    writer, reader, write = amid_a_copy(world)
    assert writer.transport.fence(reader.name) is FenceResult.CLOSED
    writer.memory[:] = b"\x09" * LARGE
    for _ in range(10):
        assert reader.transport.notifications() == []
    assert writer.transport.poll(write) is WriteState.ERROR


def test_a_fence_between_the_last_byte_and_the_look_at_the_word_delivers_nothing(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pair(world)
    stands = FarMemory.stands

    def fenced_just_before(memory: FarMemory) -> bool:
        writer.transport.fence(reader.name)
        return stands(memory)

    monkeypatch.setattr(FarMemory, "stands", fenced_just_before)
    writer.transport.write(reader.name, [copy(0, 0, 8)], b"landed")
    for _ in range(3):
        assert reader.transport.notifications() == []


def test_a_new_endpoint_of_the_writer_does_not_revive_the_old_one_s_writes(world: LocalWorld) -> None:
    writer, reader, _ = amid_a_copy(world)
    writer.transport.fence(reader.name)
    writer.transport.open(reader.name)
    for _ in range(10):
        assert reader.transport.notifications() == []
    reader.transport.fence(writer.name)
    writer.transport.fence(reader.name)
    join(writer, reader)
    write = writer.transport.write(reader.name, [copy(0, 0, 8)], b"new")
    assert finish(world, writer, write) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"new")]


def test_the_reader_s_fence_is_to_stop_copying(world: LocalWorld) -> None:
    writer, reader, write = amid_a_copy(world)
    assert reader.transport.fence(writer.name) is FenceResult.CLOSED
    before = bytes(reader.memory)
    assert finish(world, writer, write) is WriteState.ERROR
    assert reader.memory == before


def test_what_was_heard_is_told_although_the_writer_has_fenced_since(world: LocalWorld) -> None:
    writer, reader = pair(world, MIB)
    write = writer.transport.write(reader.name, [copy(0, 0, MIB)], b"landed")
    assert finish(world, writer, write) is WriteState.DONE
    writer.transport.fence(reader.name)
    writer.memory[:] = b"\x09" * MIB
    assert reader.transport.notifications() == [(writer.name, b"landed", 0)]
    assert reader.memory == bytes(MIB)


def test_fences_leave_no_files_and_no_sockets(world: LocalWorld) -> None:
    writer, reader = pair(world, MIB)
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd"))
        for side, other in ((writer, reader), (reader, writer)):
            side.transport.fence(other.name)
        join(writer, reader)
        assert finish(world, writer, writer.transport.write(reader.name, [copy(0, 0, 1)], None)) is WriteState.DONE
        world.pause()
    assert len(os.listdir("/proc/self/fd")) == before
    for side in (writer, reader):
        side.transport.close()
    assert os.listdir(world.folder) == []


class LostCard(HostCard):
    """A card that copies a part, and is lost then."""

    def copy(self, targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
        super().copy(targets[:1], sources[:1], lengths[:1])
        raise TransportError("CUDA error: unspecified launch failure")


def test_a_device_that_is_lost_amid_a_copy_delivers_nothing() -> None:
    lost = LocalWorld(LostCard)
    writer, reader = pair(lost, MIB)
    writer.memory[:] = b"\x01" * MIB
    write = writer.transport.write(reader.name, [copy(0, 0, 8), copy(64, 64, 8)], b"landed")
    assert finish(lost, writer, write) is WriteState.ERROR
    assert reader.transport.notifications() == []
    assert reader.transport.fence(writer.name) is FenceResult.CLOSED
    lost.close()


# ---------------------------------------------------------------- regions of several devices


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")])
def test_regions_of_a_rank_are_on_one_device(tmp_path: Path, first: str, second: str) -> None:
    transport = LocalTransport(tmp_path, lambda _: HostCard())
    file = sealed_file(MIB, "region")
    transport.register(Region(RegionId(0), 4096, MIB, first, file))
    with pytest.raises(TransportError, match=f"register region 1: it is on {second}, those before it are not"):
        transport.register(Region(RegionId(1), 4096, MIB, second, file))
    transport.close()
    os.close(file)


# ---------------------------------------------------------------- progress


def test_writers_take_turns(world: LocalWorld) -> None:
    """A small write is copied in the same turn as a slice of a large one."""
    reader, one, two = (world.side(name, LARGE) for name in ("d", "p0", "p1"))
    for writer in (one, two):
        join(writer, reader)
    one.transport.write(reader.name, [copy(0, 0, LARGE)], b"large")
    two.transport.write(reader.name, [copy(0, 0, 1)], b"small")
    assert receive(world, reader) == [(two.name, b"small")]
    assert receive(world, reader) == [(one.name, b"large")]


def test_a_reader_that_does_not_poll_keeps_no_writer_waiting(world: LocalWorld) -> None:
    writer, reader = pair(world, MIB)
    writer.memory[:] = pattern(MIB)
    many = [copy(at, MIB - 64 - at, 64) for at in range(0, MIB, 64)]
    writes = [writer.transport.write(reader.name, many, b"%d" % i) for i in range(20)]
    assert [writer.transport.poll(write) for write in writes] == [WriteState.PENDING] * 20
    assert [finish(world, writer, write) for write in writes] == [WriteState.DONE] * 20
    assert [data for _, data in receive(world, reader, 20)] == [b"%d" % i for i in range(20)]
    assert reader.memory[MIB - 64 :] == writer.memory[:64]


def test_a_region_s_file_may_be_closed_once_it_is_registered(tmp_path: Path) -> None:
    """Its number may be another file's when a peer connects."""
    transports = [LocalTransport(tmp_path) for _ in range(2)]
    for transport in transports:
        file = sealed_file(MIB, "gone")
        mapping = mmap.mmap(file, MIB)
        transport.register(Region(REGION, addressof(c_char.from_buffer(mapping)), MIB, "cpu", file))
        os.close(file)
    p, d = transports
    of_p, of_d = p.open(PeerName("d")), d.open(PeerName("p"))
    p.attach(PeerName("d"), [RemoteRank(of_d)])
    d.attach(PeerName("p"), [RemoteRank(of_p)])
    p.write(PeerName("d"), [], b"heard")
    assert [data for _, data, _ in d.notifications()] == [b"heard"]
    for transport in transports:
        transport.close()


def test_folders_of_any_length(tmp_path: Path) -> None:
    """A socket's path has 107 bytes at most."""
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    transport = LocalTransport(folder)
    transport.open(PeerName("d"))
    transport.close()


# ---------------------------------------------------------------- what is refused


def test_memory_that_can_shrink_is_refused() -> None:
    open_file = os.memfd_create("unsealed")
    os.ftruncate(open_file, MIB)
    small = sealed_file(4096, "small")
    for file in (open_file, small):
        with mmap.mmap(file, 4096) as mapping:
            view = c_char.from_buffer(mapping)
            with LocalTransportIn("/tmp") as transport, pytest.raises(TransportError, match="region 7"):
                transport.register(Region(REGION, addressof(view), MIB, "cpu", file))
            del view
        os.close(file)


class LocalTransportIn:
    """A transport that is closed in the end."""

    def __init__(self, folder: str) -> None:
        self._transport = LocalTransport(Path(folder))

    def __enter__(self) -> LocalTransport:
        return self._transport

    def __exit__(self, *_: object) -> None:
        self._transport.close()


@pytest.mark.parametrize(("device", "file"), [("cuda:0", 3), ("cpu", None)])
def test_memory_that_nobody_else_can_map_is_refused(device: str, file: int | None) -> None:
    with LocalTransportIn("/tmp") as transport, pytest.raises(TransportError, match="register region 7"):
        transport.register(Region(REGION, 4096, MIB, device, file))


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(TransportError, match="aarch64"):
        LocalTransport(Path("/tmp"))


def test_no_folder_no_transport(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="nowhere"):
        LocalTransport(tmp_path / "nowhere")


class Liar:
    """A peer that has what it takes to connect to `victim`, and says what it likes."""

    def __init__(self, world: LocalWorld) -> None:
        self.victim = world.side("d", MIB)
        self.card = LocalCard(7, "0" * 32)
        self.far = decode_card(self.victim.transport.open(PeerName("liar")))
        self._folder = world.folder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(world.folder / self.card.name))
        self._listener.listen()
        self.victim.transport.attach(PeerName("liar"), [self.victim.rank(encode_card(self.card))])
        self.word = EpochWord()
        self.file = sealed_file(MIB, "liar")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(str(world.folder / self.far.name))

    def greet(self, hello: bytes | None = None, files: Sequence[int] | None = None) -> None:
        good = encode_hello(LocalHello(self.far.token, self.card.token, ((REGION, MIB),)))
        socket.send_fds(self.socket, [good if hello is None else hello], files or [self.word.file, self.file])
        self.let_progress()

    def let_progress(self) -> None:
        assert self.victim.transport.notifications() == []

    def is_heard(self) -> bool:
        """Whether a decent write goes through."""
        with suppress(OSError):
            self.socket.send(encode_write(1, [copy(0, 0, 8)], b"x"))
        return self.victim.transport.notifications() != []

    def close(self) -> None:
        self.socket.close()
        self._listener.close()
        self.word.end()
        os.close(self.file)


@pytest.fixture
def liar(world: LocalWorld) -> Iterator[Liar]:
    made = Liar(world)
    yield made
    made.close()


def test_a_stranger_who_behaves_is_heard(liar: Liar) -> None:
    liar.greet()
    assert liar.is_heard()


@pytest.mark.parametrize(
    "hello",
    [
        lambda far, own: LocalHello(far + 1, own, ((REGION, MIB),)),
        lambda far, own: LocalHello(far, own + 1, ((REGION, MIB),)),
        lambda far, own: LocalHello(far, own, ((REGION, MIB + 1),)),
        lambda far, own: LocalHello(far, own, ((REGION, MIB), (REGION, MIB))),
        lambda far, own: LocalHello(far, own, ((REGION, 0),)),
        lambda far, own: LocalHello(far, own, ()),
    ],
)
def test_a_false_hello_is_refused(liar: Liar, hello: Callable[[int, int], LocalHello]) -> None:
    liar.greet(encode_hello(hello(liar.far.token, liar.card.token)))
    assert not liar.is_heard()


@pytest.mark.parametrize("data", [b"x", b"DSLH" + bytes(20), bytes(1000)])
def test_a_hello_that_is_none_is_refused(liar: Liar, data: bytes) -> None:
    liar.greet(data)
    assert not liar.is_heard()


def test_files_that_can_shrink_are_refused(liar: Liar) -> None:
    file = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, MIB)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    liar.greet(files=[liar.word.file, file])
    assert not liar.is_heard()
    os.close(file)


def test_another_connection_of_the_same_endpoint_is_refused(liar: Liar, world: LocalWorld) -> None:
    liar.greet()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.connect(str(world.folder / liar.far.name))
        hello = encode_hello(LocalHello(liar.far.token, liar.card.token, ((REGION, MIB),)))
        socket.send_fds(second, [hello], [liar.word.file, liar.file])
        liar.let_progress()
        assert second.recv(1) == b""
    assert liar.is_heard()


@pytest.mark.parametrize(
    "span",
    [
        Copy(Span(REGION, MIB - 4, 8), Span(REGION, 0, 8)),
        Copy(Span(REGION, 0, 8), Span(REGION, MIB - 4, 8)),
        Copy(Span(REGION, 0, 8), Span(REGION, (1 << 64) - 4, 8)),
        Copy(Span(REGION, (1 << 64) - 8, 8), Span(REGION, 0, 8)),
        Copy(Span(REGION, 0, 0), Span(REGION, 0, 0)),
        Copy(Span(REGION, 0, (1 << 64) - 1), Span(REGION, 0, 8)),
        Copy(Span(RegionId(8), 0, 8), Span(REGION, 0, 8)),
        Copy(Span(REGION, 0, 8), Span(RegionId(6), 0, 8)),
    ],
)
def test_a_write_outside_the_regions_moves_nothing(liar: Liar, span: Copy) -> None:
    os.pwrite(liar.file, b"x" * MIB, 0)
    liar.greet()
    liar.socket.send(encode_write(1, [copy(0, 0, 8), span], b"x"))
    liar.let_progress()
    assert not liar.is_heard()
    assert liar.victim.memory == bytes(MIB)


@pytest.mark.parametrize(
    "packets",
    [
        [b"x"],
        [encode_write(1, [copy(0, 0, 8)], b"x") + b"x"],
        [encode_write(1, [], b"x" * (MAX_NOTIFICATION_BYTES + 1))[:PACKET_BYTES]],
        [(1).to_bytes(8, "little") + (MAX_COPIES + 1).to_bytes(4, "little") + bytes(4)],
        [bytes(16)],
        [encode_write(1, [], b"x" * 100)[:-1], b"xx"],
        [bytes(PACKET_BYTES + 1)],
    ],
)
def test_a_malformed_write_ends_the_connection(liar: Liar, packets: list[bytes]) -> None:
    liar.greet()
    for packet in packets:
        liar.socket.send(packet)
    liar.let_progress()
    assert not liar.is_heard()


def test_writes_come_in_packets_of_any_cut() -> None:
    frame = encode_write(5, [copy(1, 2, 3), copy(4, 5, 6)], b"note")
    for size in (16, 17, len(frame)):
        assembly = WriteAssembly()
        for _ in range(2):
            found = [assembly.feed(frame[at : at + size]) for at in range(0, len(frame), size)]
            assert found[:-1] == [None] * (len(found) - 1)
            last = found[-1]
            assert last is not None and (last.id, last.notification) == (5, b"note")
            assert last.spans.T.tolist() == [[REGION, 1, REGION, 2, 3], [REGION, 4, REGION, 5, 6]]


def test_an_acknowledgement_of_what_was_not_written_ends_the_connection(world: LocalWorld) -> None:
    writer, reader = pair(world, MIB)
    world.pause()
    assert isinstance(reader.transport, LocalTransport)
    link = reader.transport._endpoints[writer.name].readers[0]
    link._packets.send((99).to_bytes(8, "little"))
    world.pause()
    with pytest.raises(TransportError, match="broken"):
        writer.transport.write(reader.name, [], b"x")


def test_other_users_are_refused(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    of_reader = reader.transport.open(writer.name)
    writer.transport.open(reader.name)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(TransportError, match="another user"):
        writer.transport.attach(reader.name, [reader.rank(of_reader)])


def test_what_cannot_be_opened_keeps_no_descriptor(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker short of descriptors tries again and again."""
    transport = world.side("p", MIB).transport
    gc.collect()  # of tests before: it may close descriptors at any moment
    num_open = num_open_files()

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for module, name in ((socket, "socket"), (mmap, "mmap"), (fcntl, "fcntl")):
        with monkeypatch.context() as without:
            without.setattr(module, name, fail)
            with pytest.raises(TransportError, match="Too many open files"):
                transport.open(PeerName("d"))
        assert num_open_files() == num_open, name
