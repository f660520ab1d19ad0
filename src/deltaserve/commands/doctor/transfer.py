"""The transport for real: two processes, one moves a block of bytes into the other's memory.

python -m deltaserve.commands.doctor.transfer NAME PEER TLS DEVICES      a child: talks JSON lines on stdin and stdout
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

from deltaserve.commands.doctor.report import Level, Line
from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import RemoteRank, RemoteRegion, TransportError
from deltaserve.process.worker.transports import make_nixl
from deltaserve.transports.local.memory import sealed_file
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.mooncake.process import engine_problem
from deltaserve.transports.nixl.options import NixlOptions, environment
from deltaserve.transports.obstacles import cannot_open

NUM_BYTES = 1 << 20
_LOOPBACK = NixlOptions(tls="tcp,self", net_devices="lo")
_MOONCAKE_HERE = MooncakeOptions()
_REGION = RegionId(0)
_LIMIT_S = 30.0
_POLL_S = 0.001
_WRITER, _READER = "doctor-p", "doctor-d"


def check_transfer(options: NixlOptions = _LOOPBACK) -> Iterator[Line]:
    """One line. Two children; none outlives the call."""
    writer, reader = children = [_start(_WRITER, _READER, options), _start(_READER, _WRITER, options)]
    try:
        yield _probe(writer, reader, options)
    except (OSError, ValueError, KeyError) as error:
        yield Line(Level.FAIL, "transfer", _reason(children) or _cannot("nixl", TransportError(type(error).__name__)))
    finally:
        for child in children:
            child.kill()
            child.communicate()


def check_local() -> Iterator[Line]:
    """One line: whether pages can be read from the memory of another endpoint, as workers of one `serve` do."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield _probe_local(Path(folder))
        except (OSError, TransportError, TimeoutError) as error:
            problem = error if isinstance(error, TransportError) else TransportError(error)
            yield Line(Level.WARN, "transfer", _cannot("local", problem))


def _probe_local(folder: Path) -> Line:
    """Move a block by the local transport. Raises OSError, TransportError, TimeoutError."""
    files = [sealed_file(NUM_BYTES, "deltaserve-doctor") for _ in range(2)]
    here, there = memories = [mmap.mmap(file, NUM_BYTES) for file in files]
    writer, reader = transports = [LocalTransport(folder) for _ in files]
    try:
        bases = [addressof(c_char.from_buffer(memory)) for memory in memories]
        for transport, base, file in zip(transports, bases, files, strict=True):
            transport.register(Region(_REGION, base, NUM_BYTES, "cpu", file))
        of_writer, of_reader = writer.open(PeerName(_READER)), reader.open(PeerName(_WRITER))
        writer.attach(PeerName(_READER), [RemoteRank(of_reader, (RemoteRegion(_REGION, bases[1], NUM_BYTES, "cpu"),))])
        reader.attach(PeerName(_WRITER), [RemoteRank(of_writer)])
        here[:] = os.urandom(NUM_BYTES)
        began, span = time.monotonic(), Span(_REGION, 0, NUM_BYTES)
        writer.write(PeerName(_READER), [Copy(span, span)], b"here")
        _poll(lambda: bool(reader.notifications()))
        took = f"{NUM_BYTES >> 20} MiB between two endpoints in {(time.monotonic() - began) * 1000:.0f} ms"
        if here[:] != there[:]:
            return Line(Level.FAIL, "transfer", "local: other bytes arrived than were sent")
        return Line(Level.OK, "transfer", f"local, between workers of one serve: {took}, bytes equal")
    finally:
        for transport in transports:
            transport.close()
        for file in files:
            os.close(file)


def check_mooncake(options: MooncakeOptions = _MOONCAKE_HERE, if_not: Level = Level.OK) -> Iterator[Line]:
    """One line: whether an engine starts; `if_not`: what it means if not. Who does not ask for mooncake needs none."""
    problem = engine_problem(options)
    if problem is None:
        yield Line(Level.OK, "transfer", f"mooncake over {options.protocol} on {options.host}: an engine starts")
    else:
        yield Line(if_not, "transfer", _cannot("mooncake", problem))


def _cannot(transport: str, problem: TransportError) -> str:
    """What is moved here is memory of the CPU: a GPU's needs a worker."""
    return cannot_open(transport, "host", problem)


def _start(name: str, peer: str, options: NixlOptions) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "deltaserve.commands.doctor.transfer", name, peer, options.tls, options.net_devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(options)},
    )


def _probe(writer: "subprocess.Popen[str]", reader: "subprocess.Popen[str]", options: NixlOptions) -> Line:
    """Exchange who they are, then wait for what the reader found."""
    about_writer, about_reader = _hear(writer), _hear(reader)
    _tell(reader, about_writer)
    _tell(writer, about_reader)
    sent, found = _hear(writer), _hear(reader)
    if found["crc"] != sent["crc"]:
        return Line(Level.FAIL, "transfer", "nixl: other bytes arrived than were sent")
    took = f"{NUM_BYTES >> 20} MiB between two processes in {found['seconds'] * 1000:.0f} ms, checksum equal"
    return Line(Level.OK, "transfer", f"nixl over {options.tls} on {options.net_devices}: {took}")


def _hear(child: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next answer. A child that does not answer ends itself; then this raises ValueError."""
    assert child.stdout is not None
    found: dict[str, Any] = json.loads(child.stdout.readline())
    return found


def _tell(child: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(message) + "\n")
    child.stdin.flush()


def _reason(children: list["subprocess.Popen[str]"]) -> str:
    """The last line a child wrote before it ended."""
    for child in children:
        child.kill()
    lines = [line for child in children for line in child.communicate()[1].splitlines() if line.strip()]
    return lines[-1][:1000] if lines else ""


# ---------------------------------------------------------------- a child


def be_one_side(name: str, peer: str, options: NixlOptions) -> None:
    """Writer or reader, by name. Raises TransportError, TimeoutError."""
    memory = mmap.mmap(-1, NUM_BYTES)
    base = addressof(c_char.from_buffer(memory))
    transport = make_nixl(PeerName(name), Boot(1), options)
    transport.register(Region(_REGION, base, NUM_BYTES, "cpu"))
    metadata = transport.open(PeerName(peer))
    print(json.dumps({"metadata": metadata.hex(), "base": base}), flush=True)
    other = json.loads(sys.stdin.readline())
    remote = RemoteRegion(_REGION, other["base"], NUM_BYTES, "cpu")
    transport.attach(PeerName(peer), [RemoteRank(bytes.fromhex(other["metadata"]), (remote,))])
    if name == _WRITER:
        memory[:] = os.urandom(NUM_BYTES)
        print(json.dumps({"crc": zlib.crc32(memory)}), flush=True)
        span = Span(_REGION, 0, NUM_BYTES)
        write = transport.write(PeerName(peer), [Copy(span, span)], b"here")
        _poll(lambda: transport.poll(write).value != "pending")
        sys.stdin.readline()  # the library is driven until the reader has all
    else:
        began = time.monotonic()
        _poll(lambda: bool(transport.notifications()))
        print(json.dumps({"crc": zlib.crc32(memory), "seconds": time.monotonic() - began}), flush=True)
    transport.close()


def _poll(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing arrived within {_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    try:
        be_one_side(sys.argv[1], sys.argv[2], NixlOptions(tls=sys.argv[3], net_devices=sys.argv[4]))
    except (TransportError, TimeoutError, OSError) as problem:
        said = problem if isinstance(problem, TransportError) else TransportError(problem)
        print(_cannot("nixl", said), file=sys.stderr, flush=True)
        sys.exit(1)
