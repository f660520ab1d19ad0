"""`deltaserve doctor`: one endpoint copies a block of bytes out of another one's memory, as workers of one serve do."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from ctypes import addressof, c_char
from pathlib import Path

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.findings import Level, Line
from deltaserve.core.ids import PeerName
from deltaserve.core.transport import RemoteRank, RemoteRegion, TransportError
from deltaserve.transports.gpu_trial import gpu_problem, has_gpu
from deltaserve.transports.local.memory_access import sealed_file
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.probing import NUM_BYTES, REGION, poll
from deltaserve.transports.registry import TransportOptions, cannot_open

_WRITER, _READER = PeerName("doctor-p"), PeerName("doctor-d")


def check(options: TransportOptions | None) -> Iterator[Line]:
    """One line, and one about a GPU's memory where there is a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield _probe(Path(folder))
        except (OSError, TransportError, TimeoutError) as error:
            problem = error if isinstance(error, TransportError) else TransportError(error)
            yield Line(Level.WARN, "transfer", cannot_open("local", ["cpu"], problem))
    if has_gpu():
        yield _on_gpu()


def _on_gpu() -> Line:
    problem = gpu_problem("deltaserve.transports.local.gpu_check", {})
    if problem is not None:
        return Line(Level.WARN, "transfer", cannot_open("local", ["cuda:0"], TransportError(problem)))
    return Line(Level.OK, "transfer", "local on cuda:0: a page is exported, mapped and copied")


def _probe(folder: Path) -> Line:
    """Raises OSError, TransportError, TimeoutError."""
    files = [sealed_file(NUM_BYTES, "deltaserve-doctor") for _ in range(2)]
    here, there = memories = [mmap.mmap(file, NUM_BYTES) for file in files]
    writer, reader = transports = [LocalTransport(folder) for _ in files]
    try:
        bases = [addressof(c_char.from_buffer(memory)) for memory in memories]
        for transport, base, file in zip(transports, bases, files, strict=True):
            transport.register(Region(REGION, base, NUM_BYTES, "cpu", file))
        of_writer, of_reader = writer.open(_READER), reader.open(_WRITER)
        writer.attach(_READER, [RemoteRank(of_reader, (RemoteRegion(REGION, bases[1], NUM_BYTES, "cpu"),))])
        reader.attach(_WRITER, [RemoteRank(of_writer)])
        here[:] = os.urandom(NUM_BYTES)
        began, span = time.monotonic(), Span(REGION, 0, NUM_BYTES)
        writer.write(_READER, [Copy(span, span)], b"here")
        poll(lambda: bool(reader.notifications()))
        took = f"{NUM_BYTES >> 20} MiB between two endpoints in {(time.monotonic() - began) * 1000:.0f} ms"
        if here[:] != there[:]:
            return Line(Level.FAIL, "transfer", "local: other bytes arrived than were sent")
        return Line(Level.OK, "transfer", f"local, between workers of one serve: {took}, bytes equal")
    finally:
        for transport in transports:
            transport.close()
        for file in files:
            os.close(file)
