"""Bytes per second of the transports of one host between two processes, against what memcpy does here.

    python -m benchmarks.bench_transport [--tls tcp,self] [--window-mib 64] [--rounds 8]

For each run length (4 KiB .. 16 MiB) one window is written as scattered runs: every second run of the source goes to
every second run of the target, so that nothing can be merged. Median over rounds, of post to DONE; NIXL, local and
memcpy, which copies the same runs inside this process with numpy, take turns. The reader is this script with
`--reader`; it polls as the transfer thread of a decode worker does.
"""

import argparse
import json
import mmap
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltaserve.control.transfer.plane_turns import PollPace
from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import RemoteRank, RemoteRegion, Transport, WriteState
from deltaserve.transports.local.memory_access import sealed_file
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.nixl.options import NixlOptions, environment
from deltaserve.transports.nixl.transport import NixlTransport

RUNS = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
REGION = RegionId(0)
Arena = npt.NDArray[np.uint8]
Kind = Literal["nixl", "local"]
KINDS: tuple[Kind, ...] = ("nixl", "local")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tls", default="tcp,self")
    parser.add_argument("--window-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--reader", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = NixlOptions(args.tls, "lo")
    if any(os.environ.get(key) != value for key, value in environment(options).items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment(options)})
    window = args.window_mib << 20
    if args.reader:
        read(args.reader, options, Path(args.folder), 2 * window)
        return
    with (
        TemporaryDirectory() as folder,
        connected("nixl", options, folder, window) as nixl,
        connected("local", options, folder, window) as local,
    ):
        measure(nixl, local, window, args.rounds, options.tls)


def start(kind: Kind, name: str, options: NixlOptions, folder: Path, num_bytes: int) -> tuple[Transport, Arena]:
    file = sealed_file(num_bytes, name) if kind == "local" else None
    arena = np.frombuffer(mmap.mmap(-1 if file is None else file, num_bytes), np.uint8)  # [num_bytes]
    arena[:] = 1  # pages touched
    made: Transport = LocalTransport(folder)
    if kind == "nixl":
        made = NixlTransport(PeerName(name), Boot(os.getpid()), options)
    made.register(region_of(arena, file))
    return made, arena


def region_of(arena: Arena, file: int | None = None) -> Region:
    return Region(REGION, arena.ctypes.data, arena.nbytes, "cpu", file)


def exchange(transport: Transport, region: Region, send: Callable[[str], None], receive: Callable[[], str]) -> None:
    """Tell the other side of `region`, and attach to its own."""
    metadata = transport.open(PeerName("peer"))
    send(json.dumps([metadata.hex(), region.base, region.num_bytes, region.device]))
    theirs, *there = json.loads(receive())
    theirs_there = RemoteRegion(REGION, *there)
    transport.attach(PeerName("peer"), [RemoteRank(bytes.fromhex(theirs), (theirs_there,))])


def read(kind: Kind, options: NixlOptions, folder: Path, num_bytes: int) -> None:
    """Until standard input ends."""
    transport, arena = start(kind, "reader", options, folder, num_bytes)
    exchange(transport, region_of(arena), lambda line: print(line, flush=True), sys.stdin.readline)
    poll_until_told(transport)
    transport.close()


def poll_until_told(transport: Transport) -> None:
    """Copies what it is asked for, at the pace of a transfer thread, until standard input has something or ends."""
    pace = PollPace()
    while not select.select([sys.stdin], [], [], pace.wait_s)[0]:
        if transport.notifications():
            pace.heard()
        else:
            pace.heard_nothing()


@contextmanager
def connected(kind: Kind, options: NixlOptions, folder: str, window: int) -> Iterator[tuple[Transport, Arena]]:
    """A writer, and its reader in a process of its own."""
    transport, arena = start(kind, "writer", options, Path(folder), 2 * window)
    command = [sys.executable, __file__, "--reader", kind, "--tls", options.tls]
    command += ["--window-mib", str(window >> 20), "--folder", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        stdin, stdout = reader.stdin, reader.stdout
        exchange(transport, region_of(arena), lambda line: print(line, file=stdin, flush=True), stdout.readline)
        yield transport, arena
        stdin.close()
    transport.close()


def measure(nixl: tuple[Transport, Arena], local: tuple[Transport, Arena], window: int, rounds: int, tls: str) -> None:
    arena = nixl[1]
    target = np.ones_like(arena)
    print(f"{tls}, window {window >> 20} MiB, median of {rounds}\n")
    print("| run | copies | NIXL GB/s | local GB/s | memcpy GB/s |\n|---:|---:|---:|---:|---:|")
    for run in (run for run in RUNS if run <= window):
        copies = scattered(run, window)
        acts = [partial(send, transport, copies) for transport, _ in (nixl, local)]
        found = rates([*acts, partial(copy_runs, arena, target, run)], window, rounds)
        print(f"| {run >> 10} KiB | {len(copies)} | " + " | ".join(f"{rate:.2f}" for rate in found) + " |", flush=True)


def scattered(run: int, window: int) -> list[Copy]:
    """Every second run of an arena of two windows, on both sides."""
    spans = [Span(REGION, offset, run) for offset in range(0, 2 * window, 2 * run)]
    return [Copy(span, span) for span in spans]


def send(transport: Transport, copies: list[Copy]) -> None:
    write = transport.write(PeerName("peer"), copies, b"done")
    while (state := transport.poll(write)) is WriteState.PENDING:
        time.sleep(0.0002)
    assert state is WriteState.DONE


def copy_runs(source: Arena, target: Arena, run: int) -> None:
    np.copyto(target.reshape(-1, 2, run)[:, 0], source.reshape(-1, 2, run)[:, 0])


def rates(acts: list[Callable[[], None]], num_bytes: int, rounds: int) -> list[float]:
    """GB/s of each, median; one round unmeasured."""
    seconds: list[list[float]] = [[] for _ in acts]
    for turn in range(rounds + 1):
        for act, taken in zip(acts, seconds, strict=True):
            begin = time.perf_counter()
            act()
            if turn:
                taken.append(time.perf_counter() - begin)
    return [num_bytes / statistics.median(taken) / 1e9 for taken in seconds]


if __name__ == "__main__":
    main()
