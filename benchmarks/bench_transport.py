"""Bytes per second of the NIXL transport between two processes of this host, against what memcpy does here.

    python benchmarks/bench_transport.py [--tls tcp,self] [--window-mib 64] [--rounds 8]

For each run length (4 KiB .. 16 MiB) one window is written as scattered runs: every second run of the source goes to
every second run of the target, so that nothing can be merged. Median over rounds, of post to DONE; `memcpy` copies the
same runs inside this process with numpy, in the same minute. The reader is this script with `--reader`.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from deltaserve.base.extents import Copy, Region, Span
from deltaserve.base.ids import Boot, PeerName, RegionId
from deltaserve.transport.base import RemoteRank, RemoteRegion, WriteState
from deltaserve.transport.nixl import NixlOptions, NixlTransport, environment

RUNS = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
REGION = RegionId(0)
Arena = npt.NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tls", default="tcp,self")
    parser.add_argument("--window-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = NixlOptions(args.tls, "lo")
    if any(os.environ.get(key) != value for key, value in environment(options).items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment(options)})
    window = args.window_mib << 20
    if args.reader:
        read(options, 2 * window)
    else:
        measure(options, window, args.rounds)


def start(name: str, options: NixlOptions, num_bytes: int) -> tuple[NixlTransport, Arena]:
    arena = np.ones(num_bytes, dtype=np.uint8)  # [num_bytes], pages touched
    transport = NixlTransport(PeerName(name), Boot(os.getpid()), options)
    transport.register(Region(REGION, arena.ctypes.data, num_bytes, "cpu"))
    return transport, arena


def exchange(transport: NixlTransport, arena: Arena, send: Callable[[str], None], receive: Callable[[], str]) -> None:
    metadata = transport.open(PeerName("peer"))
    send(json.dumps([metadata.hex(), arena.ctypes.data, arena.nbytes]))
    theirs, base, num_bytes = json.loads(receive())
    theirs_there = RemoteRegion(REGION, base, num_bytes, "cpu")
    transport.attach(PeerName("peer"), [RemoteRank(bytes.fromhex(theirs), (theirs_there,))])


def read(options: NixlOptions, num_bytes: int) -> None:
    """Poll every 2 ms, as a decode worker's transfer thread does, until standard input ends."""
    transport, arena = start("reader", options, num_bytes)
    exchange(transport, arena, lambda line: print(line, flush=True), sys.stdin.readline)
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        transport.notifications()
    transport.close()


def measure(options: NixlOptions, window: int, rounds: int) -> None:
    transport, arena = start("writer", options, 2 * window)
    command = [sys.executable, __file__, "--reader", "--tls", options.tls, "--window-mib", str(window >> 20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        stdin, stdout = reader.stdin, reader.stdout
        exchange(transport, arena, lambda line: print(line, file=stdin, flush=True), stdout.readline)
        target = np.ones_like(arena)
        print(f"{options.tls}, window {window >> 20} MiB, median of {rounds}\n")
        print("| run | copies | NIXL GB/s | memcpy GB/s |\n|---:|---:|---:|---:|")
        for run in RUNS:
            copies = scattered(run, window)
            write = rate(partial(send, transport, copies), window, rounds)
            roof = rate(partial(copy_runs, arena, target, run), window, rounds)
            print(f"| {run >> 10} KiB | {len(copies)} | {write:.2f} | {roof:.2f} |")
        stdin.close()
    transport.close()


def scattered(run: int, window: int) -> list[Copy]:
    """Every second run of an arena of two windows, on both sides."""
    spans = [Span(REGION, offset, run) for offset in range(0, 2 * window, 2 * run)]
    return [Copy(span, span) for span in spans]


def send(transport: NixlTransport, copies: list[Copy]) -> None:
    write = transport.write(PeerName("peer"), copies, b"done")
    while (state := transport.poll(write)) is WriteState.PENDING:
        time.sleep(0.0002)
    assert state is WriteState.DONE


def copy_runs(source: Arena, target: Arena, run: int) -> None:
    np.copyto(target.reshape(-1, 2, run)[:, 0], source.reshape(-1, 2, run)[:, 0])


def rate(act: Callable[[], None], num_bytes: int, rounds: int) -> float:
    """GB/s, median; one round unmeasured."""
    act()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return num_bytes / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    main()
