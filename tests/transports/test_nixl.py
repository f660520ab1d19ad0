"""What only the NIXL adapter has: its environment, batches by kind of memory, and an agent that is really gone."""

from collections.abc import Iterator
from ctypes import addressof, c_char
from typing import Any

import pytest

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import FenceResult, RemoteRegion, TransportError, WriteState
from deltaserve.transports.nixl import transport as adapter
from deltaserve.transports.nixl.endpoint import Batch, NixlEndpoint, agent_config, batches, memory_of
from deltaserve.transports.nixl.options import FENCED_BY_CLOSE, NixlOptions, environment
from deltaserve.transports.nixl.transport import NixlTransport
from deltaserve.transports.nixl.ucx_environment import ucx_environment
from tests.transports.puppets import NIXL_OPTIONS
from tests.transports.sides import Side, copy, finish, join, pattern, receive
from tests.transports.worlds import NixlWorld

MIB = 1 << 20


@pytest.fixture
def world() -> Iterator[NixlWorld]:
    made = NixlWorld()
    yield made
    made.close()


def pair(world: NixlWorld) -> tuple[Side, Side]:
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    join(writer, reader)
    return writer, reader


def endpoint_of(side: Side, peer: Side) -> NixlEndpoint:
    assert isinstance(side.transport, NixlTransport)
    return side.transport._endpoints[peer.name]


# ---------------------------------------------------------------- environment


@pytest.mark.parametrize("key", ["UCX_TLS", "UCX_NET_DEVICES", "UCX_TCP_CONN_NB", "UCX_MODULES"])
@pytest.mark.parametrize("value", [None, "all"])
def test_other_environment_is_refused(key: str, value: str | None) -> None:
    environ = environment(NIXL_OPTIONS)
    del environ[key]
    if value is not None:
        environ[key] = value
    with pytest.raises(TransportError, match=key):
        NixlTransport(PeerName("p"), Boot(1), NIXL_OPTIONS, environ)


@pytest.mark.parametrize(
    ("tls", "modules"), [("tcp,self", "^ib"), ("tcp,cuda_copy,self", "^ib"), ("rc,tcp,self", None), ("all", None)]
)
def test_rdma_libraries_are_loaded_where_they_are_used(tls: str, modules: str | None) -> None:
    """Those of the wheel and of the system do not go together in a process that ends."""
    assert ucx_environment(tls, "lo").get("UCX_MODULES") == modules


def test_progress_thread_is_an_option() -> None:
    assert NIXL_OPTIONS.progress_delay_us
    for delay_us, has_thread in ((NIXL_OPTIONS.progress_delay_us, True), (0, False)):
        assert bool(agent_config(delay_us).useProgThread) is has_thread


def test_agent_names_differ_for_each_pair_boot_and_opening() -> None:
    names = set()
    for boot in (1, 2):
        transport = NixlTransport(PeerName("p"), Boot(boot), NIXL_OPTIONS)
        for peer in (PeerName("d0"), PeerName("d1"), PeerName("d0")):
            transport.fence(peer)
            transport.open(peer)
            names.add(transport._endpoints[peer].name)
        transport.close()
    assert len(names) == 6


# ---------------------------------------------------------------- memory kinds


def test_devices() -> None:
    assert memory_of("cpu") == ("DRAM", 0)
    assert memory_of("cuda:3") == ("VRAM", 3)
    for wrong in ("", "cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:" + "1" * 5000, "mps", "cpu:0"):
        with pytest.raises(TransportError, match="expected cpu or cuda:N"):
            memory_of(wrong)


def test_copies_are_batched_by_kind_of_memory_on_both_sides() -> None:
    local = {RegionId(0): Region(RegionId(0), 1000, 100, "cuda:1"), RegionId(1): Region(RegionId(1), 5000, 100, "cpu")}
    remote = {RegionId(8): RemoteRegion(8, 70_000, 100, "cuda:0"), RegionId(9): RemoteRegion(9, 90_000, 100, "cpu")}

    def one(src: int, src_at: int, dst: int, dst_at: int) -> Copy:
        return Copy(Span(RegionId(src), src_at, 10), Span(RegionId(dst), dst_at, 10))

    copies = [one(0, 0, 8, 10), one(1, 20, 9, 30), one(0, 40, 8, 50), one(1, 60, 8, 70)]
    assert batches(copies, local, remote) == [
        ("VRAM", [(1000, 10, 1), (1040, 10, 1)], "VRAM", [(70_010, 10, 0), (70_050, 10, 0)]),
        ("DRAM", [(5020, 10, 0)], "DRAM", [(90_030, 10, 0)]),
        ("DRAM", [(5060, 10, 0)], "VRAM", [(70_070, 10, 0)]),
    ]


def split(copies: Any, local: Any, remote: Any) -> list[Batch]:
    """Each copy a batch of its own, as if each were of another kind of memory: this machine has one kind only."""
    return [batch for one in copies for batch in batches([one], local, remote)]


def test_batches_go_one_after_the_other_and_the_notification_with_the_last(
    world: NixlWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "batches", split)
    writer, reader = pair(world)
    writer.memory[:] = pattern(MIB)
    write = writer.transport.write(reader.name, [copy(i * 1024, i * 1024, 1024) for i in range(5)], b"all five")
    num_landed = []
    while (state := writer.transport.poll(write)) is WriteState.PENDING:
        num_landed.append(sum(any(reader.memory[i * 1024 :][:1024]) for i in range(5)))
        world.pause()
    assert state is WriteState.DONE
    assert num_landed[0] < 5
    assert receive(world, reader) == [(writer.name, b"all five")]
    assert reader.memory[: 5 * 1024] == writer.memory[: 5 * 1024]
    assert not any(reader.memory[5 * 1024 :])


def test_failure_of_a_later_batch_is_an_error_not_nothing(world: NixlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "batches", split)
    writer, reader = pair(world)
    write = writer.transport.write(reader.name, [copy(0, 0, 1024), copy(1024, 1024, 1024)], b"never")
    reader.transport.fence(writer.name)
    assert finish(world, writer, write) is WriteState.ERROR
    with pytest.raises(TransportError):
        reader.transport.write(writer.name, [], b"x")


def test_registration_of_memory_the_library_cannot_take_leaves_no_endpoint() -> None:
    """Here: VRAM without CUDA."""
    memory = bytearray(MIB)
    transport = NixlTransport(PeerName("p"), Boot(1), NIXL_OPTIONS)
    transport.register(Region(RegionId(0), addressof((c_char * MIB).from_buffer(memory)), MIB, "cuda:0"))
    for _ in range(2):
        with pytest.raises(TransportError, match="open d"):
            transport.open(PeerName("d"))
    transport.close()


# ---------------------------------------------------------------- the fence


@pytest.mark.parametrize(
    ("tls", "result"),
    [
        ("tcp,self", FenceResult.CLOSED),
        ("self", FenceResult.CLOSED),
        ("tcp,self,cuda_copy", FenceResult.CLOSED),
        ("tcp,self,cma", FenceResult.IMPOSSIBLE),
        ("posix,tcp,self", FenceResult.IMPOSSIBLE),
        ("sysv,self", FenceResult.IMPOSSIBLE),
        ("shm,tcp", FenceResult.IMPOSSIBLE),
        ("tcp,cuda_ipc,cuda_copy", FenceResult.IMPOSSIBLE),
        ("rc,tcp,self", FenceResult.IMPOSSIBLE),
        ("all", FenceResult.IMPOSSIBLE),
        ("^cma", FenceResult.IMPOSSIBLE),
    ],
)
def test_fence_depends_on_the_transports(tls: str, result: FenceResult) -> None:
    options = NixlOptions(tls, "lo")
    # The process' own UCX_TLS makes the agents; what is tested is which promise the adapter gives for a setting.
    transport = NixlTransport(PeerName("d"), Boot(1), options, environment(options))
    transport.open(PeerName("p"))
    assert [transport.fence(PeerName("p")) for _ in range(2)] == [result] * 2
    assert transport.fence(PeerName("stranger")) is FenceResult.CLOSED
    transport.close()


def test_a_site_may_state_that_its_transport_is_fenced() -> None:
    options = NixlOptions("rc,tcp,self", "lo", fenced_by_close=FENCED_BY_CLOSE | {"rc"})
    transport = NixlTransport(PeerName("d"), Boot(1), options, environment(options))
    transport.open(PeerName("p"))
    assert transport.fence(PeerName("p")) is FenceResult.CLOSED
    transport.close()


def test_an_agent_that_someone_holds_is_no_fence(world: NixlWorld) -> None:
    writer, reader = pair(world)
    held = endpoint_of(reader, writer)._live()
    assert reader.transport.fence(writer.name) is FenceResult.IMPOSSIBLE
    del held
    assert reader.transport.fence(writer.name) is FenceResult.IMPOSSIBLE, "bytes may have landed meanwhile"


def test_errors_do_not_keep_the_agent(world: NixlWorld) -> None:
    """A kept exception keeps its frames, and they must not keep the agent."""
    writer, reader = pair(world)
    kept: list[TransportError] = []
    for bad in (copy(0, MIB, 1), copy(MIB, 0, 1)):
        with pytest.raises(TransportError) as caught:
            writer.transport.write(reader.name, [bad], None)
        kept.append(caught.value)
    reader.transport.fence(writer.name)
    write = writer.transport.write(reader.name, [copy(0, 0, MIB)], b"x")
    assert finish(world, writer, write) is WriteState.ERROR
    assert writer.transport.fence(reader.name) is FenceResult.CLOSED
    assert len(kept) == 2


def test_broken_endpoint_hides_no_one_and_takes_no_writes(
    world: NixlWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, one, two = (world.side(name, MIB) for name in ("d", "p0", "p1"))
    for writer in (one, two):
        join(writer, reader)
    intact = NixlEndpoint.notifications

    def notifications(endpoint: NixlEndpoint) -> list[tuple[int, bytes]]:
        if endpoint.peer == one.name:
            raise RuntimeError("the worker is gone")
        return intact(endpoint)

    monkeypatch.setattr(NixlEndpoint, "notifications", notifications)
    write = two.transport.write(reader.name, [], b"heard")
    assert finish(world, two, write) is WriteState.DONE
    assert receive(world, reader) == [(two.name, b"heard")]
    assert caplog.text.count("the worker is gone") == 1
    with pytest.raises(TransportError, match="broken"):
        reader.transport.write(one.name, [], b"x")
    monkeypatch.undo()
    for side, other in ((reader, one), (one, reader)):
        assert side.transport.fence(other.name) is FenceResult.CLOSED
    join(one, reader)
    again = one.transport.write(reader.name, [], b"mended")
    assert finish(world, one, again) is WriteState.DONE
    assert receive(world, reader) == [(one.name, b"mended")]
