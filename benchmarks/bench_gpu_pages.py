"""Bytes per second of pages that one worker reads from another one's memory, of one card or of the host.

    python -m benchmarks.bench_gpu_pages [--device cuda] [--mib 1024] [--rounds 8]

Two processes over the `local` transport, with memory as workers allocate it. For each run length every second run of
the writer's arena goes to every second run of the reader's, so that nothing can be merged, in four writes that are all
under way at a time. Median over rounds, from the first post until all are done. Then the reader tells a checksum of
what it has. `--mib`: how much is written at once.
"""

import argparse
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.bench_transport import REGION, RUNS, exchange, poll_until_told, rates, scattered
from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.core.errors import DeltaserveError
from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Transport, WriteState
from deltaserve.transports.local.kind import KIND
from deltaserve.transports.registry import TransportOptions

_NUM_WRITES = 4
_CHECKED_BYTES = 64 << 20
_POLL_S = 5e-5
PAGE_RUNS = [run for run in RUNS if run >= 64 << 10]
"""Lengths in bytes of what lies together on both sides: pages of small models, and of large ones."""


class PagesFailed(DeltaserveError):
    """The reader ended, or has other bytes than the writer."""


class PagesRate(NamedTuple):
    """One run length."""

    run_bytes: int
    gb_per_s: float


class _Side:
    """A worker's memory, and its way to the other one."""

    def __init__(self, name: str, device: str, num_bytes: int, folder: str) -> None:
        on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self.block = MemoryBlock(num_bytes, on, KIND.sharing)
        self.transport: Transport = KIND.make(PeerName(name), Boot(os.getpid()), TransportOptions(folder=folder))
        self.region: Region = self.block.region(REGION)
        self.transport.register(self.region)

    def checksum(self, run_bytes: int) -> int:
        """Checksum of the runs that are written, as far as it does not take long."""
        runs = self.block.data.view(-1, 2, run_bytes)[: max(1, _CHECKED_BYTES // run_bytes), 0]
        return zlib.crc32(runs.contiguous().cpu().numpy().data)


def measured(device: str, num_bytes: int, rounds: int) -> Iterator[PagesRate]:
    """For each of PAGE_RUNS that `num_bytes` hold. Raises PagesFailed, TransportError."""
    with TemporaryDirectory() as folder:
        writer = _Side("writer", device, 2 * num_bytes, folder)
        with closing(writer.transport), _reader(writer, device, 2 * num_bytes, folder) as reader:
            for run in (run for run in PAGE_RUNS if run <= num_bytes):
                writer.block.data.copy_(_noise(2 * num_bytes, run, writer.block.data.device))
                _synchronize(device)
                (rate,) = rates([partial(_send, writer.transport, scattered(run, num_bytes))], num_bytes, rounds)
                if _ask_checksum(reader, run) != writer.checksum(run):
                    raise PagesFailed(f"the reader has other bytes than the writer, runs of {run}")
                yield PagesRate(run, rate)


def _noise(num_bytes: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _send(transport: Transport, copies: list[Copy]) -> None:
    size = -(-len(copies) // _NUM_WRITES)
    parts = [copies[start : start + size] for start in range(0, len(copies), size)]
    for write in [transport.write(PeerName("peer"), part, b"done") for part in parts]:
        while (state := transport.poll(write)) is WriteState.PENDING:
            time.sleep(_POLL_S)
        if state is not WriteState.DONE:
            raise PagesFailed(f"a write ended as {state}")


@contextmanager
def _reader(writer: _Side, device: str, num_bytes: int, folder: str) -> "Iterator[subprocess.Popen[str]]":
    """The other process, attached."""
    command = [sys.executable, "-m", "benchmarks.bench_gpu_pages", "--device", device, "--reader", folder]
    command += ["--bytes", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            exchange(writer.transport, writer.region, partial(_tell, process), partial(_hear, process))
            _hear(process)  # it has read all that it was told: it waits for more where nothing lies in its buffer
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def _hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise PagesFailed(f"the reader ended with {process.wait()}")
    return line


def _ask_checksum(reader: "subprocess.Popen[str]", run_bytes: int) -> int:
    _tell(reader, str(run_bytes))
    return int(_hear(reader))


def read(device: str, num_bytes: int, folder: str) -> None:
    """The other process: copies, and answers each run length with a checksum, until standard input ends."""
    side = _Side("reader", device, num_bytes, folder)
    exchange(side.transport, side.region, partial(print, flush=True), sys.stdin.readline)
    print("attached", flush=True)
    while True:
        poll_until_told(side.transport)
        if not (line := sys.stdin.readline()):
            break
        print(side.checksum(int(line)), flush=True)
    side.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--reader", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        read(args.device, args.bytes, str(args.reader))
        return
    print("| run | GB/s |\n|---:|---:|")
    for rate in measured(args.device, args.mib << 20, args.rounds):
        print(f"| {rate.run_bytes >> 10} KiB | {rate.gb_per_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
