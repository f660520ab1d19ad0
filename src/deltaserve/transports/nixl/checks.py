"""`deltaserve doctor`: two processes, one moves a block of bytes into the other's memory.

python -m deltaserve.transports.nixl.checks NAME PEER TLS DEVICES      a child: talks JSON lines on stdin and stdout
"""

import json
import mmap
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from ctypes import addressof, c_char
from threading import Event, Timer
from typing import Any

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.findings import Level, Line
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import RemoteRank, RemoteRegion, TransportError
from deltaserve.transports.gpu_trial import cuda_major, gpu_problem, has_gpu
from deltaserve.transports.nixl.library import fitting_packages, how_to_install
from deltaserve.transports.nixl.ucx_environment import silent_ucx_environment
from deltaserve.transports.probing import NUM_BYTES, REGION, poll
from deltaserve.transports.registry import TransportOptions, cannot_open, installed_version, transport_kind

_LOOPBACK = TransportOptions(tls="tcp,self", devices="lo")
_CUDA_LOOPBACK = TransportOptions(tls="tcp,cuda_copy,self", devices="lo")
_LIMIT_S = 90.0
"""Both load the library, and wait for each other for as long as a poll does."""
_WRITER, _READER = "doctor-p", "doctor-d"


def check(asked: TransportOptions | None) -> Iterator[Line]:
    """Whether the library is there, what it moves between two children, and where there is a GPU whether it takes that
    one's memory. No child outlives the call."""
    found = installed_version(fitting_packages(cuda_major()))
    if found is None:
        yield _missing(Level.WARN if asked is None else Level.FAIL)
        return
    yield Line(Level.OK, "library", " ".join(found))
    options = asked or _LOOPBACK
    children = [_start(_WRITER, _READER, options), _start(_READER, _WRITER, options)]
    try:
        yield _tried(children, options)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    if has_gpu():
        yield _on_gpu(asked)


def _tried(children: list["subprocess.Popen[str]"], options: TransportOptions) -> Line:
    """What comes of it within the limit, at which both are ended."""
    writer, reader = children
    is_over = Event()

    def end_both() -> None:
        is_over.set()  # first: who reads of them is woken by their end
        writer.kill()
        reader.kill()

    limit = Timer(_LIMIT_S, end_both)
    limit.start()
    try:
        return _probe(writer, reader, options)
    except (OSError, ValueError, KeyError) as error:
        is_late = is_over.is_set()
        reason = _cannot(f"nothing came of it within {_LIMIT_S:g} s") if is_late else _reason(children)
        return Line(Level.FAIL, "transfer", reason or _cannot(type(error).__name__))
    finally:
        limit.cancel()
        limit.join()


def _on_gpu(asked: TransportOptions | None) -> Line:
    """Workers of one serve need it not: it is an obstacle where nixl was asked for."""
    options = asked or _CUDA_LOOPBACK
    environment = silent_ucx_environment(options.tls, options.devices)
    problem = gpu_problem("deltaserve.transports.nixl.gpu_check", environment, options.tls, options.devices)
    if problem is None:
        return Line(Level.OK, "transfer", f"nixl over {options.tls}: a page of cuda:0 is registered")
    level = Level.WARN if asked is None else Level.FAIL
    return Line(level, "transfer", cannot_open("nixl", ["cuda:0"], TransportError(problem)))


def _missing(level: Level) -> Line:
    """Workers of one serve need it not."""
    package, install = fitting_packages(cuda_major())[0], how_to_install(cuda_major())
    why = "workers between which pages move by nixl need it, on several machines all"
    return Line(level, "library", f"{package} is not installed; {why}: {install}")


def _cannot(problem: object) -> str:
    """What is moved between the two is memory of the CPU."""
    error = problem if isinstance(problem, TransportError) else TransportError(problem)
    return cannot_open("nixl", ["cpu"], error)


def _start(name: str, peer: str, options: TransportOptions) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "deltaserve.transports.nixl.checks", name, peer, options.tls, options.devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **silent_ucx_environment(options.tls, options.devices)},
    )


def _probe(writer: "subprocess.Popen[str]", reader: "subprocess.Popen[str]", options: TransportOptions) -> Line:
    """Exchange who they are, then wait for what the reader found."""
    about_writer, about_reader = _hear(writer), _hear(reader)
    _tell(reader, about_writer)
    _tell(writer, about_reader)
    sent, found = _hear(writer), _hear(reader)
    if found["crc"] != sent["crc"]:
        return Line(Level.FAIL, "transfer", "nixl: other bytes arrived than were sent")
    took = f"{NUM_BYTES >> 20} MiB between two processes in {found['seconds'] * 1000:.0f} ms, checksum equal"
    return Line(Level.OK, "transfer", f"nixl over {options.tls} on {options.devices}: {took}")


def _hear(child: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next answer, a line of JSON; others are the library's. Raises ValueError where the child has ended."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise ValueError("no answer")


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


def be_one_side(name: str, peer: str, options: TransportOptions) -> None:
    """Writer or reader, by name. Raises TransportError, TimeoutError."""
    memory = mmap.mmap(-1, NUM_BYTES)
    base = addressof(c_char.from_buffer(memory))
    transport = transport_kind("nixl").make(PeerName(name), Boot(1), options)
    transport.register(Region(REGION, base, NUM_BYTES, "cpu"))
    metadata = transport.open(PeerName(peer))
    print(json.dumps({"metadata": metadata.hex(), "base": base}), flush=True)
    other = json.loads(sys.stdin.readline())
    remote = RemoteRegion(REGION, other["base"], NUM_BYTES, "cpu")
    transport.attach(PeerName(peer), [RemoteRank(bytes.fromhex(other["metadata"]), (remote,))])
    if name == _WRITER:
        memory[:] = os.urandom(NUM_BYTES)
        print(json.dumps({"crc": zlib.crc32(memory)}), flush=True)
        span = Span(REGION, 0, NUM_BYTES)
        write = transport.write(PeerName(peer), [Copy(span, span)], b"here")
        poll(lambda: transport.poll(write).value != "pending")
        sys.stdin.readline()  # the library is driven until the reader has all
    else:
        began = time.monotonic()
        poll(lambda: bool(transport.notifications()))
        print(json.dumps({"crc": zlib.crc32(memory), "seconds": time.monotonic() - began}), flush=True)
    transport.close()


if __name__ == "__main__":
    try:
        be_one_side(sys.argv[1], sys.argv[2], TransportOptions(tls=sys.argv[3], devices=sys.argv[4]))
    except (TransportError, TimeoutError, OSError) as problem:
        print(_cannot(problem), file=sys.stderr, flush=True)
        sys.exit(1)
