"""How Mooncake really behaves, row by row, with engines in processes of their own: why the adapter is as it is.

A row asserts what was measured, also where the library is surprising: a new version that behaves otherwise must be
noticed here. P writes, D is written to. Measured with mooncake-transfer-engine 0.3.13 over TCP on loopback:

| event | what happens |
|---|---|
| D's engine does not run | P's write stays pending without end, also of one byte; DONE after D goes on |
| the same, P with the framing of versions before 0.3.12 | DONE although nothing has landed |
| P's engine killed and reaped, then D goes on | megabytes land after P's death |
| D's engine killed and reaped | 0 bytes afterwards; P reads ERROR; D's other peers are not disturbed |
| D's engine killed, the peer joined again | as on the first day: nobody is remembered as bad |
| a write fails | the next one to the same engine lands |
| P's engine dies by itself | its writes read ERROR, the endpoint refuses writes until it was fenced and opened again |
| listeners | of the library: every interface, so a filter drops what is not for our address; ours: our address |
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from deltaserve.core.extents import Region
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import FenceResult, RemoteRank, RemoteRegion, TransportError, WriteId, WriteState
from deltaserve.transports.mooncake.frames import TOKEN_BYTES, EngineCard, FarEngine, decode_card, encode_card
from deltaserve.transports.mooncake.notices import NoticeSender
from deltaserve.transports.mooncake.options import MooncakeOptions, version_problem
from deltaserve.transports.mooncake.process import EngineProcess
from deltaserve.transports.mooncake.transport import MooncakeTransport
from tests.fixtures.mooncake_engines import need_mooncake
from tests.patience import PATIENCE_S
from tests.transports.sides import REGION, Side, copy, finish, join, receive, until
from tests.transports.worlds import MooncakeWorld

MIB = 1 << 20
WINDOW = 32 * MIB
_LISTEN = "0A"
_UNREGISTERED = RegionId(8)


@pytest.fixture
def world() -> Iterator[MooncakeWorld]:
    need_mooncake()
    made = MooncakeWorld()
    yield made
    made.close()


def pair(world: MooncakeWorld, num_bytes: int = WINDOW) -> tuple[Side, Side]:
    """P full of ones and an empty D, joined and warm."""
    writer, reader = world.side("p", num_bytes), world.side("d", num_bytes)
    join(writer, reader)
    write = writer.transport.write(reader.name, [copy(0, 0, num_bytes)], None)
    assert finish(world, writer, write) is WriteState.DONE
    writer.memory[:] = b"\x01" * num_bytes
    return writer, reader


def process(side: Side, peer: Side) -> EngineProcess:
    assert isinstance(side.transport, MooncakeTransport)
    return side.transport._engines[peer.name].process


def card(side: Side, peer: Side) -> EngineCard:
    assert isinstance(side.transport, MooncakeTransport)
    return side.transport._engines[peer.name].card


def stop(engine: EngineProcess) -> None:
    """SIGSTOP, and wait until the kernel has really stopped it."""
    os.kill(engine.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, engine.pid, os.WSTOPPED)


def resume(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGCONT)


def stays_pending(world: MooncakeWorld, side: Side, write: WriteId) -> bool:
    states = []
    for _ in range(300):
        states.append(side.transport.poll(write))
        world.pause()
    return set(states) == {WriteState.PENDING}


def num_landed(side: Side) -> int:
    return bytes(side.memory).count(b"\x01")


def num_waiting(engine: EngineProcess) -> int:
    """Bytes in the receive buffers of the process' connections."""
    ours = set()
    for name in os.listdir(f"/proc/{engine.pid}/fd"):
        try:
            ours.add(os.readlink(f"/proc/{engine.pid}/fd/{name}"))
        except OSError:
            continue
    waiting = 0
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if f"socket:[{fields[9]}]" in ours and fields[3] != _LISTEN:
                waiting += int(fields[4].split(":")[1], 16)
    return waiting


def settle(side: Side) -> int:
    """Ones that have landed, when their number stands still."""
    last, still = -1, 0
    while still < 10:
        time.sleep(0.02)
        landed = num_landed(side)
        still = still + 1 if landed == last else 0
        last = landed
    return last


@pytest.mark.parametrize("num_bytes", [1, MIB, WINDOW])
def test_done_waits_for_the_reader_s_engine(world: MooncakeWorld, num_bytes: int) -> None:
    p, d = pair(world)
    stop(process(d, p))
    write = p.transport.write(d.name, [copy(0, 0, num_bytes)], b"landed")
    assert stays_pending(world, p, write)
    assert d.transport.notifications() == []
    resume(process(d, p))
    assert finish(world, p, write) is WriteState.DONE
    assert num_landed(d) == num_bytes
    assert receive(world, d) == [(p.name, b"landed")]


def test_done_of_the_older_framing_proves_nothing(world: MooncakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = MooncakeOptions.environment
    monkeypatch.setattr(MooncakeOptions, "environment", lambda *args: {**intact(*args), "MC_TCP_PROTO": "1"})
    p, d = pair(world)
    stop(process(d, p))
    write = p.transport.write(d.name, [copy(0, 0, 4096)], None)
    assert finish(world, p, write) is WriteState.DONE
    assert num_landed(d) == 0
    resume(process(d, p))
    until(world, lambda: num_landed(d) == 4096, "the landing of what was DONE")


def test_bytes_land_after_the_death_of_their_writer(world: MooncakeWorld) -> None:
    p, d = pair(world)
    stop(process(d, p))
    p.transport.write(d.name, [copy(0, 0, WINDOW)], None)
    until(world, lambda: num_waiting(process(d, p)) > 0, "something on its way")
    assert p.transport.fence(d.name) is FenceResult.CLOSED
    assert num_landed(d) == 0
    resume(process(d, p))
    until(world, lambda: num_landed(d) > 0, "a landing after the death")
    assert settle(d) < WINDOW


def test_the_end_of_the_reader_s_engine_is_the_fence(world: MooncakeWorld) -> None:
    p, d = pair(world)
    other = world.side("other", WINDOW)
    join(other, d)
    other.memory[:] = b"\x02" * WINDOW
    stop(process(d, p))
    write = p.transport.write(d.name, [copy(0, 0, WINDOW)], None)
    until(world, lambda: num_waiting(process(d, p)) > 0, "something on its way")
    pid = process(d, p).pid
    assert d.transport.fence(p.name) is FenceResult.CLOSED
    assert not Path(f"/proc/{pid}").exists()
    assert finish(world, p, write) is WriteState.ERROR
    assert settle(d) == 0
    undisturbed = other.transport.write(d.name, [copy(0, 0, WINDOW)], b"two")
    assert finish(world, other, undisturbed) is WriteState.DONE
    assert receive(world, d) == [(other.name, b"two")]
    assert d.memory == other.memory


def test_a_peer_that_failed_is_joined_again(world: MooncakeWorld) -> None:
    p, d = pair(world)
    for _ in range(2):
        os.kill(process(d, p).pid, signal.SIGKILL)
        for _ in range(3):
            write = p.transport.write(d.name, [copy(0, 0, MIB)], b"lost")
            assert finish(world, p, write) is WriteState.ERROR
        for side, peer in ((p, d), (d, p)):
            assert side.transport.fence(peer.name) is FenceResult.CLOSED
        join(p, d)
        write = p.transport.write(d.name, [copy(0, 0, MIB)], b"again")
        assert finish(world, p, write) is WriteState.DONE
        assert receive(world, d) == [(p.name, b"again")]


def test_an_error_blacklists_nobody(world: MooncakeWorld) -> None:
    """The library refuses an address the peer has not registered; what is right goes through, before and after."""
    p, d = world.side("p", MIB), world.side("d", MIB)
    of_d = decode_card(d.transport.open(p.name))
    bases = {**of_d.bases, _UNREGISTERED: 4096}
    wrong = encode_card(msgspec.structs.replace(of_d, bases=bases))
    regions = (d.remote_region, RemoteRegion(_UNREGISTERED, 4096, MIB, "cpu"))
    d.transport.attach(p.name, [p.rank(p.transport.open(d.name))])
    p.transport.attach(d.name, [RemoteRank(wrong, regions)])
    for _ in range(3):
        bad = copy(0, 0, 64)
        bad = bad._replace(dst=bad.dst._replace(region=_UNREGISTERED))
        assert finish(world, p, p.transport.write(d.name, [bad], b"never")) is WriteState.ERROR
        assert finish(world, p, p.transport.write(d.name, [copy(0, 0, 64)], b"good")) is WriteState.DONE
        assert receive(world, d) == [(p.name, b"good")]


def test_a_library_that_does_not_acknowledge_is_refused(world: MooncakeWorld) -> None:
    assert version_problem("0.3.12.post1") is version_problem("0.4.0") is version_problem("1.0.0rc1") is None
    for version in ("0.3.11.post1", "0.3.9", "", "0.3", "x.y.z"):
        assert version_problem(version) is not None
    p, d = world.side("p", 64), world.side("d", 64)
    of_d = decode_card(d.transport.open(p.name))
    p.transport.open(d.name)
    old = encode_card(msgspec.structs.replace(of_d, version="0.3.11"))
    with pytest.raises(TransportError, match=r"attach to d: its mooncake 0\.3\.11"):
        p.transport.attach(d.name, [d.rank(old)])


@pytest.mark.parametrize(
    "change", [{"host": "example.com"}, {"host": ""}, {"port": 0}, {"notice_port": 1 << 16}, {"token": b"short"}]
)
def test_a_card_with_an_impossible_address_is_refused(change: dict[str, Any]) -> None:
    card = EngineCard("127.0.0.1", 1, 2, bytes(TOKEN_BYTES), "0.3.13", {})
    assert decode_card(encode_card(card)) == card
    with pytest.raises(TransportError, match="impossible"):
        decode_card(encode_card(msgspec.structs.replace(card, **change)))


def test_an_engine_that_dies_breaks_its_endpoint_alone(world: MooncakeWorld) -> None:
    p, d = pair(world)
    other = world.side("other", MIB)
    join(p, other)
    stop(process(d, p))
    write = p.transport.write(d.name, [copy(0, 0, WINDOW)], None)
    os.kill(process(p, d).pid, signal.SIGKILL)
    assert finish(world, p, write) is WriteState.ERROR
    with pytest.raises(TransportError, match="broken"):
        p.transport.write(d.name, [], b"x")
    with pytest.raises(TransportError, match="open d"):
        p.transport.open(d.name)
    well = p.transport.write(other.name, [copy(0, 0, MIB)], b"well")
    assert finish(world, p, well) is WriteState.DONE
    assert p.transport.fence(d.name) is FenceResult.CLOSED
    p.transport.open(d.name)


def test_it_listens_on_one_address_only(world: MooncakeWorld) -> None:
    p, d = world.side("p", 64), world.side("d", 64)
    join(p, d)
    own, ports = card(d, p), listening_ports(process(d, p))
    assert {own.port, own.notice_port} < ports
    assert len(ports) == 3, "the library's data port as well"
    for port in ports:
        socket.create_connection((own.host, port), PATIENCE_S).close()
        for host in ("127.0.0.2", "::1"):
            with pytest.raises(OSError):
                socket.create_connection((host, port), 0.2)


def test_who_does_not_know_both_secrets_is_not_heard(world: MooncakeWorld) -> None:
    p, d = world.side("p", 64), world.side("d", 64)
    join(p, d)
    of_p, of_d = card(p, d), card(d, p)
    stranger = bytes(TOKEN_BYTES)
    known = NoticeSender(of_p.token, FarEngine(of_d.host, of_d.port, of_d.notice_port, of_d.token))
    known.tell(b"known")
    for own, shown in ((stranger, of_d.token), (of_p.token, stranger), (of_d.token, of_d.token)):
        with pytest.raises(OSError):
            NoticeSender(own, FarEngine(of_d.host, of_d.port, of_d.notice_port, shown)).tell(b"forged")
    assert receive(world, d) == [(p.name, b"known")]
    known.close()


def test_strangers_cannot_keep_the_peer_out(world: MooncakeWorld) -> None:
    """More connections that say nothing than are kept: the peer is heard all the same."""
    p, d = world.side("p", 64), world.side("d", 64)
    join(p, d)
    listener = (card(d, p).host, card(d, p).notice_port)
    silent = [socket.create_connection(listener, PATIENCE_S) for _ in range(100)]
    write = p.transport.write(d.name, [], b"heard")
    assert finish(world, p, write) is WriteState.DONE
    assert receive(world, d) == [(p.name, b"heard")]
    for connection in silent:
        connection.close()


def test_engines_end_with_the_transport_and_with_its_process() -> None:
    need_mooncake()
    script = (
        "import os; from deltaserve.transports.mooncake.transport import MooncakeTransport;"
        "from deltaserve.transports.mooncake.options import MooncakeOptions;"
        "t = MooncakeTransport(MooncakeOptions()); t.open('d');"
        "print(t._engines['d'].process.pid, t._spare.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=PATIENCE_S)
    give_up = time.monotonic() + PATIENCE_S
    for pid in map(int, done.stdout.split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < give_up, f"engine {pid} outlives its parent"
            time.sleep(0.01)


def listening_ports(engine: EngineProcess) -> set[int]:
    return {entry.laddr.port for entry in psutil.Process(engine.pid).net_connections("tcp") if entry.status == "LISTEN"}


def test_whose_memory_it_is_may_close_its_descriptor() -> None:
    """Engines are started later, and inherit one."""
    need_mooncake()
    file = os.memfd_create("pages")
    os.ftruncate(file, MIB)
    transport = MooncakeTransport(MooncakeOptions())
    transport.register(Region(REGION, 1 << 20, MIB, "cpu", file))
    os.close(file)
    assert REGION in decode_card(transport.open(PeerName("d"))).bases
    before = len(os.listdir("/proc/self/fd"))
    transport.close()
    assert len(os.listdir("/proc/self/fd")) < before
