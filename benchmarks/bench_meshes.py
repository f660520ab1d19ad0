"""Sums of two ranks: over TCP, as between machines, against memory that both have mapped, as on one.

    python -m benchmarks.bench_meshes [--rounds 200]

Both ranks are processes of this machine, TCP is its loopback: what the protocol costs, without a network. Medians over
rounds, of a decode step's sum ([2, 2048] float32) and of a chunk's ([512, 2048]); the two take turns, three times each.
"""

import argparse
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory

import torch

from deltaserve.compute.collective.collective import ProcessCollective
from deltaserve.compute.collective.net_meeting import NetMeeting, listen_for_ranks
from deltaserve.core.layout.shard import Shard

SHAPES = ((2, 2048), (512, 2048))
HOST = "127.0.0.1"
_LIMIT_S = 60.0
_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    found: dict[str, list[list[float]]] = {"memory": [], "tcp": []}
    for _ in range(_TURNS):
        for kind, medians in found.items():
            medians.append(measure(kind, rounds))
    for at, shape in enumerate(SHAPES):
        memory, tcp = (statistics.median(turn[at] for turn in found[kind]) for kind in ("memory", "tcp"))
        print(f"{list(shape)}: memory {memory:,.0f} us, tcp {tcp:,.0f} us, {tcp / memory:.2f} times that")


def measure(kind: str, rounds: int) -> list[float]:
    """Median microseconds of a sum, of each shape."""
    context = get_context("fork")
    with TemporaryDirectory() as folder, listen_for_ranks(HOST) as listener:
        ends = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=add_up, args=(rank, kind, Path(folder), listener, rounds, ends[1]))
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        medians: list[float] = ends[0].recv()
        for rank in ranks:
            rank.join()
    return medians


def add_up(rank: int, kind: str, folder: Path, listener: socket, rounds: int, found: Connection) -> None:
    """Be a rank; the first one says how long it took."""
    torch.set_num_threads(1)
    shard = Shard(rank, 2)
    if kind == "memory":
        collective = ProcessCollective.join(shard, folder / "ranks", _LIMIT_S)
    else:
        meeting = NetMeeting(HOST, listener.getsockname()[1], HOST, b"k" * 32)
        collective = ProcessCollective.join_over(shard, meeting, _LIMIT_S, listener if rank == 0 else None)
    medians = []
    for shape in SHAPES:
        part, times = torch.ones(shape), []
        for _ in range(rounds):
            began = time.perf_counter()
            collective.all_reduce(part)
            times.append(time.perf_counter() - began)
        medians.append(1e6 * statistics.median(times))
    if rank == 0:
        found.send(medians)


if __name__ == "__main__":
    main()
