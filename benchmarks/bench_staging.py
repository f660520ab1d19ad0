"""KV between unequal numbers of ranks over NIXL: direct, staged, and one descriptor for each token and head.

    python benchmarks/bench_staging.py [--mib 256] [--rounds 5] [--shape short] [--chunk-mib 8]

One process holds all ranks of the writer, another (this script with `--reader`) all of the reader; each pair of ranks
that has something to send has agents of its own on either side. Pages lie in an arena of four times what is sent, as a
fresh pool hands them out (ascending) or as an aged one does (the life of bench_runs.py on either side, other seeds).

    equal    the reader's number of ranks on both sides, direct: one descriptor for each run of pages
    direct   one descriptor for each page and range of heads
    staged   gather -> one bulk write for each pair and chunk -> scatter; a fixed number of chunks of staging memory
    scatter  one descriptor for each token, head, layer, K and V: what other engines do without staging (of an eighth of
             the pages: it takes long)

Time runs from the first post to the reader's word that everything was announced and, if staged, scattered. All rows
take turns within a round; medians over rounds. The reader compares every byte of the others after
the first round.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_runs import Worker
from deltaserve.base.extents import Copy, Span, runs
from deltaserve.base.ids import Boot, PeerName, RegionId
from deltaserve.device.memory_block import MemoryBlock
from deltaserve.device.staged_copies import StagedCopies
from deltaserve.layout.copy_plan import PageFormat, PlacedPages, Route, plan_routes
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import HeadBlock
from deltaserve.layout.staged_route import StagedRoute
from deltaserve.transfer.gate import cut_windows
from deltaserve.transport.base import RemoteRank, RemoteRegion, WriteId, WriteState
from deltaserve.transport.nixl import NixlOptions, NixlTransport, environment

OPTIONS = NixlOptions("tcp,self", "lo")
CPU = torch.device("cpu")
ARENA, STAGING = RegionId(0), RegionId(1)
SHAPES = {
    "long": HeadBlock(8, 2 * 32, 128),  # 256 KiB a head and page: Llama 3.1 8B
    "short": HeadBlock(8, 2 * 2, 64),  # 8 KiB
}
PAGE_SIZE = 16
UNEQUAL = ((1, 2), (2, 1), (4, 2))
EQUAL = ((1, 1), (2, 2))
WINDOW_BYTES, MAX_WINDOWS = 8 << 20, 2  # as transfer/endpoint.py by default
SCATTER_PART = 8
SCATTERED_BYTES = 64 << 20
NUM_SLOTS = 4
"""Chunks of staging memory of a pair of ranks."""


class Case(NamedTuple):
    """Numbers of ranks, and how the pages lie."""

    writers: int
    readers: int
    is_aged: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent, the same in both processes."""

    block: HeadBlock
    num_bytes: int
    chunk_bytes: int

    def formats(self, case: Case) -> tuple[PageFormat, PageFormat]:
        writers, readers = (PageFormat((self.block,), PAGE_SIZE, DType.BFLOAT16, n) for n in case[:2])
        return writers, readers

    @property
    def num_pages(self) -> int:
        return self.num_bytes // PageFormat((self.block,), PAGE_SIZE, DType.BFLOAT16).page_bytes

    @property
    def pool_pages(self) -> int:
        return max(2048, 4 * self.num_pages)

    def pages(self, is_aged: bool, side: int) -> list[int]:
        return aged_pages(self.pool_pages, self.num_pages, side) if is_aged else list(range(self.num_pages))

    def chunks(self, route: Route) -> list[range]:
        """Page indexes of each bulk write."""
        share = sum(run.num_heads * route.src.head_bytes(run.block) for run in route.heads)
        pages = max(1, self.chunk_bytes // share)
        return [range(first, min(first + pages, self.num_pages)) for first in range(0, self.num_pages, pages)]

    def content(self, rank: int, layout: PageFormat) -> Tensor:
        """[pages, bytes of a rank's page] uint8, in order of the prompt."""
        torch.manual_seed(0)
        shape = (self.num_pages, self.block.num_heads, layout.head_bytes(self.block))
        whole = torch.randint(0, 256, shape, dtype=torch.uint8)
        heads = self.block.num_heads // layout.num_ranks
        return whole[:, rank * heads : (rank + 1) * heads].reshape(self.num_pages, -1)


def aged_pages(pool_pages: int, num_pages: int, seed: int) -> list[int]:
    """Of grants of at most 40 pages out of a pool that the tree has filled."""
    worker = Worker(pool_pages, random.Random(seed))
    while worker.num_ended < 300:
        while len(worker.running) < max(2, pool_pages // 512):
            if worker.admit() is None:
                break
        worker.step()
    for request in list(worker.running):
        worker.end(request)
    pages: list[int] = []
    while len(pages) < num_pages:
        count = min(40, num_pages - len(pages))
        worker.budget.make_room((count,))
        pages += worker.pool.grant(count) or ()
    return pages


@dataclass(slots=True)
class Pair:
    """One side of a pair of ranks that has something to send."""

    route: Route
    staged: StagedRoute
    arena: Tensor
    """[pool pages * page bytes] of this side's rank."""
    slots: Tensor
    """[NUM_SLOTS, bytes of a chunk]"""
    transport: NixlTransport
    pages: list[int]
    chunks: list[range]
    theirs: list[int] = field(default_factory=list)
    """The reader's pages, at the writer."""

    def placed(self, pages: Sequence[int], chunk: range) -> PlacedPages:
        return PlacedPages(ARENA, chunk.start, pages[chunk.start : chunk.stop])

    def tokens(self, chunk: range) -> range:
        return range(chunk.start * PAGE_SIZE, chunk.stop * PAGE_SIZE)

    def buffer(self, index: int) -> Tensor:
        """Of the index-th chunk."""
        num_bytes = self.staged.num_bytes(len(self.tokens(self.chunks[index])))
        return self.slots[index % NUM_SLOTS, :num_bytes]


PEER = PeerName("peer")


class Side:
    """All ranks of one side, of all cases."""

    def __init__(self, name: str, work: Work, cases: Sequence[Case]) -> None:
        is_reader = name == "reader"
        self.work = work
        self.pairs: dict[Case, list[Pair]] = {}
        self.arenas: dict[Case, list[Tensor]] = {}
        page_lists = {is_aged: work.pages(is_aged, 1 + is_reader) for is_aged in (False, True)}
        for number, case in enumerate(cases):
            layout = work.formats(case)[is_reader]
            arenas = [MemoryBlock(work.pool_pages * layout.page_bytes, CPU) for _ in range(layout.num_ranks)]
            self.arenas[case] = [arena.data for arena in arenas]
            self.pairs[case] = [
                self._pair(f"{name}.{number}", route, arenas[route.reader if is_reader else route.writer])
                for route in itertools.chain(*plan_routes(*work.formats(case)))
                if not route.has_nothing
            ]
            for pair in self.pairs[case]:
                pair.pages = page_lists[case.is_aged]

    def _pair(self, name: str, route: Route, arena: MemoryBlock) -> Pair:
        staged, chunks = StagedRoute.of(route), self.work.chunks(route)
        slot_bytes = staged.num_bytes(len(chunks[0]) * PAGE_SIZE)
        slots = MemoryBlock(NUM_SLOTS * slot_bytes, CPU)
        transport = NixlTransport(PeerName(f"{name}.{route.writer}.{route.reader}"), Boot(os.getpid()), OPTIONS)
        transport.register(arena.region(ARENA))
        transport.register(slots.region(STAGING))
        return Pair(route, staged, arena.data, slots.data.view(NUM_SLOTS, slot_bytes), transport, [], chunks)

    def offer(self) -> str:
        return json.dumps(
            [
                [
                    pair.transport.open(PEER).hex(),
                    pair.arena.data_ptr(),
                    pair.arena.numel(),
                    pair.slots.data_ptr(),
                    pair.slots.numel(),
                    pair.pages,
                ]
                for pair in itertools.chain(*self.pairs.values())
            ]
        )

    def attach(self, offer: str) -> None:
        for pair, theirs in zip(itertools.chain(*self.pairs.values()), json.loads(offer), strict=True):
            metadata, arena, arena_bytes, slots, slots_bytes, pages = theirs
            regions = [RemoteRegion(ARENA, arena, arena_bytes, "cpu"), RemoteRegion(STAGING, slots, slots_bytes, "cpu")]
            pair.transport.attach(PEER, [RemoteRank(bytes.fromhex(metadata), tuple(regions))])
            pair.theirs = pages

    def fill(self) -> None:
        for case, arenas in self.arenas.items():
            layout = self.work.formats(case)[0]
            for rank, arena in enumerate(arenas):
                pages = torch.tensor(self.pairs[case][0].pages)
                arena.view(-1, layout.page_bytes)[pages] = self.work.content(rank, layout)

    def close(self) -> None:
        for pair in itertools.chain(*self.pairs.values()):
            pair.transport.close()


# ---------------------------------------------------------------- the writer


class Writer(Side):
    """Sends, and takes the time."""

    def run(self, case: Case, method: str, reader: "Reader") -> tuple[float, int]:
        """(seconds, descriptors)"""
        pairs = self.pairs[case]
        posts = [self._staged(pair) if method == "staged" else self._windows(pair, method) for pair in pairs]
        reader.tell(case, method)
        gc.collect()
        start = time.perf_counter()
        num_copies = self._drive(pairs, posts)
        reader.wait()
        return time.perf_counter() - start, num_copies

    def _drive(self, pairs: Sequence[Pair], posts: Sequence[Iterator[list[Copy] | None]]) -> int:
        """Two posts in flight for each pair; the last one is announced, or each if staged."""
        num_copies = 0
        flying: list[deque[WriteId]] = [deque() for _ in pairs]
        waiting = dict(enumerate(posts))
        while waiting or any(flying):
            is_idle = True
            for index, pair in enumerate(pairs):
                while flying[index] and pair.transport.poll(flying[index][0]) is not WriteState.PENDING:
                    flying[index].popleft()
                if index not in waiting or len(flying[index]) >= MAX_WINDOWS:
                    continue
                post = next(waiting[index], [])
                if post is None:
                    continue
                is_idle = False
                if not post:
                    del waiting[index]
                    continue
                num_copies += len(post)
                note = b"chunk" if post[0].src.region == STAGING else None
                flying[index].append(pair.transport.write(PEER, post, note))
            if is_idle:
                time.sleep(0.0001)
        for pair in pairs:
            write = pair.transport.write(PEER, [], b"done")
            while pair.transport.poll(write) is WriteState.PENDING:
                time.sleep(0.0001)
        return num_copies

    def _windows(self, pair: Pair, method: str) -> Iterator[list[Copy]]:
        here, there = PlacedPages(ARENA, 0, pair.pages), PlacedPages(ARENA, 0, pair.theirs)
        copies = pair.route.copies(here, there)
        if method == "scatter":
            row = self.work.block.row_width * DType.BFLOAT16.itemsize
            copies = [
                Copy(Span(ARENA, src.offset + at, row), Span(ARENA, dst.offset + at, row))
                for src, dst in copies[: len(copies) // SCATTER_PART]
                for at in range(0, src.num_bytes, row)
            ]
        return iter([list(window) for window in cut_windows(copies, WINDOW_BYTES)])

    def _staged(self, pair: Pair) -> Iterator[list[Copy] | None]:
        """A bulk write for each chunk; None: not now, a slice was gathered or no slot is free."""
        copier = StagedCopies(CPU)
        num_free = NUM_SLOTS
        for index, chunk in enumerate(pair.chunks):
            while not num_free:
                num_free += len(pair.transport.notifications())
                if not num_free:
                    yield None
            num_free -= 1
            buffer = pair.buffer(index)
            placed = pair.placed(pair.pages, chunk)
            for _ in copier.gather(pair.staged, pair.arena, placed, pair.tokens(chunk), buffer):
                yield None
            span = Span(STAGING, index % NUM_SLOTS * pair.slots.shape[1], buffer.numel())
            yield [Copy(span, span)]
        while num_free < NUM_SLOTS:
            num_free += len(pair.transport.notifications())
            yield None


class Reader:
    """The other process, seen from the writer."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def tell(self, case: Case, method: str) -> None:
        print(json.dumps([*case, method]), file=self._stdin, flush=True)
        self.wait()

    def wait(self) -> None:
        line = self._stdout.readline().strip()
        if line != "ok":
            raise SystemExit(f"the reader: {line or 'ended'}")


# ---------------------------------------------------------------- the reader


class Target(Side):
    """Scatters, and says when it is through."""

    def serve(self) -> None:
        for line in sys.stdin:
            *numbers, method = json.loads(line)
            case = Case(*numbers)
            print("ok", flush=True)
            if method == "check":
                self._check(case)
            else:
                self._receive(self.pairs[case])
            print("ok", flush=True)

    def _receive(self, pairs: Sequence[Pair]) -> None:
        """Until every pair said that it is done; polls after every slice."""
        copier = StagedCopies(CPU)
        landed: deque[tuple[Pair, int]] = deque()
        counts = [0 for _ in pairs]
        scatter: Iterator[int] = iter(())
        current: Pair | None = None
        left = len(pairs)
        while left or landed or current is not None:
            heard = 0
            for index, pair in enumerate(pairs):
                for notification in pair.transport.notifications():
                    heard += 1
                    if notification.data == b"chunk":
                        landed.append((pair, counts[index]))
                        counts[index] += 1
                    else:
                        left -= 1
            if current is None and landed:
                current, number = landed.popleft()
                chunk = current.chunks[number]
                placed = current.placed(current.pages, chunk)
                buffer = current.buffer(number)
                scatter = copier.scatter(current.staged, buffer, current.arena, placed, current.tokens(chunk))
            if current is None:
                if not heard:
                    time.sleep(0.0001)
            elif next(scatter, None) is None:
                current.transport.poll(current.transport.write(PEER, [], b"free"))
                current = None

    def _check(self, case: Case) -> None:
        """Every byte is there; then they are wiped."""
        layout = self.work.formats(case)[1]
        for rank, arena in enumerate(self.arenas[case]):
            wanted = self.work.content(rank, layout)
            pages = torch.tensor(self.pairs[case][0].pages)
            view = arena.view(-1, layout.page_bytes)
            if not torch.equal(view[pages], wanted):
                raise SystemExit(f"{case}: wrong bytes on rank {rank}")
            view[pages] = 0


# ---------------------------------------------------------------- the table


PATHS = ("direct", "staged", "scatter")


def rows(paths: Sequence[str] = PATHS) -> list[tuple[Case, str]]:
    unequal = [
        (Case(writers, readers, is_aged), method)
        for writers, readers in UNEQUAL
        for is_aged in (False, True)
        for method in paths
    ]
    return [(Case(*pair, is_aged), "equal") for pair in EQUAL for is_aged in (False, True)] + unequal


def measure(work: Work, rounds: int, paths: Sequence[str]) -> None:
    cases = list(dict.fromkeys(case for case, _ in rows()))
    writer = Writer("writer", work, cases)
    command = [sys.executable, __file__, "--reader", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        print(writer.offer(), file=process.stdin, flush=True)
        writer.attach(process.stdout.readline())
        reader = Reader(process.stdin, process.stdout)
        writer.fill()
        taken: dict[tuple[Case, str], list[float]] = {row: [] for row in rows(paths)}
        copies: dict[tuple[Case, str], int] = {}
        for number in range(rounds + 1):
            for case, method in rows(paths):
                seconds, copies[case, method] = writer.run(case, method, reader)
                if method == "scatter":
                    seconds, copies[case, method] = seconds * SCATTER_PART, copies[case, method] * SCATTER_PART
                if number:
                    taken[case, method].append(seconds)
                elif method != "scatter":
                    reader.tell(case, "check")
                    reader.wait()
        process.stdin.close()
    writer.close()
    show(work, taken, copies)


def show(work: Work, taken: dict[tuple[Case, str], list[float]], copies: dict[tuple[Case, str], int]) -> None:
    for side, name in ((1, "writer"), (2, "reader")):
        pages = work.pages(True, side)
        print(f"aged pool of the {name}: {len(pages)} pages in {len(runs(pages))} runs")
    print("\n| P -> D | pool | path | descriptors | GB/s | of equal | of scatter |\n|---|---|---|---:|---:|---:|---:|")
    for (case, method), seconds in taken.items():
        equal = taken[Case(case.readers, case.readers, case.is_aged), "equal"]
        scatter = taken.get((case, "scatter"), equal)
        of_equal, of_scatter = (statistics.median(np.divide(other, seconds)) for other in (equal, scatter))
        print(
            f"| {case.writers} -> {case.readers} | {'aged' if case.is_aged else 'fresh'} | {method} "
            f"| {copies[case, method]} | {work.num_bytes / statistics.median(seconds) / 1e9:.2f} "
            f"| {of_equal:.2f} | {of_scatter:.1f} |"
        )


def show_slices(work: Work) -> None:
    """How long the transport is not polled while a chunk is scattered: the longest of a chunk's slices, by median."""
    case = Case(1, 2, is_aged=True)
    writers, readers = work.formats(case)
    route = plan_routes(writers, readers)[0][0]
    staged, pages = StagedRoute.of(route), work.pages(case.is_aged, 2)
    num_pages = min(len(pages), SCATTERED_BYTES // staged.num_bytes(PAGE_SIZE))
    placed, tokens = PlacedPages(ARENA, 0, pages[:num_pages]), range(num_pages * PAGE_SIZE)
    arena = MemoryBlock(work.pool_pages * readers.page_bytes, CPU).data
    buffer = MemoryBlock(staged.num_bytes(len(tokens)), CPU).data
    longest, num_slices = [], 0
    arena.fill_(1)  # memory that was never touched costs faults
    for _ in range(9):
        slices = StagedCopies(CPU).scatter(staged, buffer, arena, placed, tokens)
        start = time.perf_counter()
        ends = [time.perf_counter() for _ in slices]
        num_slices = len(ends)
        longest.append(max(end - begin for begin, end in itertools.pairwise([start, *ends])))
    print(
        f"\na scatter of {buffer.numel() >> 20} MiB goes in {num_slices} slices, the transport is polled between; ",
        end="",
    )
    print(f"the longest takes {statistics.median(longest) * 1e3:.1f} ms, at worst {max(longest) * 1e3:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="long")
    parser.add_argument("--chunk-mib", type=int, default=8)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in environment(OPTIONS).items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment(OPTIONS)})
    torch.set_num_threads(1)
    work = Work(SHAPES[args.shape], args.mib << 20, args.chunk_mib << 20)
    if not args.reader:
        measure(work, args.rounds, args.paths)
        show_slices(work)
        return
    target = Target("reader", work, list(dict.fromkeys(case for case, _ in rows())))
    ours, theirs = target.offer(), sys.stdin.readline()  # read first: neither line fits a pipe
    print(ours, flush=True)
    target.attach(theirs)
    target.serve()
    target.close()


if __name__ == "__main__":
    main()
