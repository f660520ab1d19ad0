"""KV between unequal numbers of ranks: direct, staged, one descriptor for each token and head; and pages cut anew.

    python -m benchmarks.bench_staging [--mib 256] [--rounds 5] [--shape short] [--chunk-mib 8] [--page-size 16]
                                       [--paths direct staged scatter mooncake]

One process holds all ranks of the writer, another (this script with `--reader`) all of the reader; each pair of ranks
that has something to send has agents of its own on either side. Pages lie in an arena of four times what is sent, as a
fresh pool hands them out (ascending) or as an aged one does (the life of bench_runs.py on either side, other seeds).

    equal    the reader's number of ranks on both sides, direct: one descriptor for each run of pages
    direct   one descriptor for each page and range of heads
    staged   gather -> one bulk write for each pair and chunk -> scatter; a fixed number of chunks of staging memory
    scatter  one descriptor for each token, head, layer, K and V: what other engines do without staging (of an eighth of
             the pages: it takes long)
    mooncake direct, over Mooncake, aged pools; the others go over NIXL

Besides, between one rank and one: pages of 16 tokens and of 64, both ways (direct: one descriptor for each row of a
head), and bf16 that becomes fp8 (staged alone), of the same tokens. GB/s are of KV as the writer has it.

Time runs from the first post to the reader's word that everything was announced and, if staged, scattered. All rows
take turns within a round; medians over rounds. The reader compares every byte of the others after
the first round. A few minutes on two idle cores, 8 GiB of memory.
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
from itertools import pairwise
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_runs import Worker
from deltaserve.compute.memory.element_conversion import fp8_codes
from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.compute.memory.staged_copies import StagedCopies
from deltaserve.control.transfer.gate import cut_windows
from deltaserve.core.extents import Copy, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.layout.copy_plan import PageFormat, PlacedPages, Route, plan_routes
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import HeadBlock
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.transport import RemoteRank, RemoteRegion, Sharing, Transport, WriteId, WriteState
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.mooncake.process import engine_problem
from deltaserve.transports.mooncake.transport import MooncakeTransport
from deltaserve.transports.nixl.options import NixlOptions, environment
from deltaserve.transports.nixl.transport import NixlTransport

OPTIONS = NixlOptions("tcp,self", "lo")
CPU = torch.device("cpu")
ARENA, STAGING = RegionId(0), RegionId(1)
SHAPES = {
    "long": HeadBlock(8, 2 * 32, 128),  # 256 KiB a head and page: Llama 3.1 8B
    "short": HeadBlock(8, 2 * 2, 64),  # 8 KiB
}
PAGE_SIZES = (16, 64)
LARGEST_PAGE = max(PAGE_SIZES)
UNEQUAL = ((1, 2), (2, 1), (4, 2))
EQUAL = ((1, 1), (2, 2))
WINDOW_BYTES, MAX_WINDOWS = 8 << 20, 2  # as control/transfer/endpoint.py by default
SCATTER_PART = 8
SCATTERED_BYTES = 64 << 20
NUM_SLOTS = 4
"""Chunks of staging memory of a pair of ranks."""


class Case(NamedTuple):
    """Numbers of ranks, and of tokens in a page of either side; how the pages lie."""

    writers: int
    readers: int
    is_aged: bool
    pages: tuple[int, int]
    dtype: DType = DType.BFLOAT16
    """On the reader; the writer has bfloat16."""
    is_mooncake: bool = False

    @property
    def equal(self) -> "Case":
        """What it is held against: the reader's ranks and the writer's pages on both sides."""
        return Case(self.readers, self.readers, self.is_aged, (self.pages[0], self.pages[0]))

    @property
    def pool(self) -> str:
        names = ["aged" if self.is_aged else "fresh"]
        ours, theirs = self.pages
        names += [f"pages of {ours}"] if ours == theirs else [f"pages of {ours} -> {theirs}"]
        names += [f"bf16 -> {self.dtype.value}"] if self.dtype is not DType.BFLOAT16 else []
        return ", ".join(names)


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent, the same in both processes."""

    block: HeadBlock
    num_bytes: int
    chunk_bytes: int

    def formats(self, case: Case) -> tuple[PageFormat, PageFormat]:
        dtypes = (DType.BFLOAT16, case.dtype)
        sides = zip(case.pages, dtypes, case[:2], strict=True)
        writers, readers = (PageFormat((self.block,), size, dtype, ranks) for size, dtype, ranks in sides)
        return writers, readers

    @property
    def num_tokens(self) -> int:
        """Whole pages of every size."""
        token_bytes = PageFormat((self.block,), 1, DType.BFLOAT16).page_bytes
        return self.num_bytes // token_bytes // LARGEST_PAGE * LARGEST_PAGE

    def pool_pages(self, page_size: int) -> int:
        return max(2048, 4 * self.num_tokens // page_size)

    def pages(self, page_size: int, is_aged: bool, side: int) -> list[int]:
        num_pages = self.num_tokens // page_size
        return aged_pages(self.pool_pages(page_size), num_pages, side) if is_aged else list(range(num_pages))

    def chunks(self, staged: StagedRoute) -> list[range]:
        """Tokens of each bulk write."""
        size = max(1, self.chunk_bytes // staged.num_bytes(LARGEST_PAGE)) * LARGEST_PAGE
        return [range(first, min(first + size, self.num_tokens)) for first in range(0, self.num_tokens, size)]

    def content(self, rank: int, layout: PageFormat) -> Tensor:
        """[pages, bytes of a rank's page] uint8, in order of the prompt."""
        heads = self.block.num_heads // layout.num_ranks
        shape = (self.block.num_rows, self.num_tokens // layout.page_size, layout.page_size, self.block.row_width)
        pages = []
        for head in range(rank * heads, (rank + 1) * heads):
            torch.manual_seed(head)
            values = torch.randn(shape, dtype=torch.bfloat16).transpose(0, 1)  # [pages, rows, tokens, width]
            data = fp8_codes(values) if layout.dtype is DType.FP8_E4M3 else values.contiguous().view(torch.uint8)
            pages.append(data.flatten(1))
        return torch.cat(pages, 1)


def aged_pages(pool_pages: int, num_pages: int, seed: int) -> list[int]:
    """Pages of grants of at most 40 pages out of a pool that the tree has filled."""
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
    transport: Transport
    page_size: int
    """On this side."""
    pages: list[int]
    chunks: list[range]
    theirs: list[int] = field(default_factory=list)
    """The reader's pages, at the writer."""

    def placed(self, tokens: range) -> PlacedPages:
        first = tokens.start // self.page_size
        return PlacedPages(ARENA, first, self.pages[first : tokens.stop // self.page_size])

    def buffer(self, index: int) -> Tensor:
        """Buffer of the index-th chunk."""
        num_bytes = self.staged.num_bytes(len(self.chunks[index]))
        return self.slots[index % NUM_SLOTS, :num_bytes]


PEER = PeerName("peer")


def sharing_of(case: Case) -> Sharing:
    return Sharing.PROCESSES if case.is_mooncake else Sharing.PRIVATE


def make_transport(case: Case, name: str) -> Transport:
    if case.is_mooncake:
        return MooncakeTransport(MooncakeOptions())
    return NixlTransport(PeerName(name), Boot(os.getpid()), OPTIONS)


class Side:
    """All ranks of one side, of all cases."""

    def __init__(self, name: str, work: Work, cases: Sequence[Case]) -> None:
        is_reader = name == "reader"
        self.work = work
        self.pairs: dict[Case, list[Pair]] = {}
        self.arenas: dict[Case, list[MemoryBlock]] = {}
        self._buffers: list[MemoryBlock] = []
        sizes = {(case.pages[is_reader], case.is_aged) for case in cases}
        page_lists = {(size, is_aged): work.pages(size, is_aged, 1 + is_reader) for size, is_aged in sizes}
        for number, case in enumerate(cases):
            layout = work.formats(case)[is_reader]
            num_bytes = work.pool_pages(layout.page_size) * layout.page_bytes
            arenas = [MemoryBlock(num_bytes, CPU, sharing_of(case)) for _ in range(layout.num_ranks)]
            self.arenas[case] = arenas
            self.pairs[case] = [
                self._pair(f"{name}.{number}", case, route, arenas[route.reader if is_reader else route.writer])
                for route in itertools.chain(*plan_routes(*work.formats(case)))
                if not route.has_nothing
            ]
            for pair in self.pairs[case]:
                pair.page_size = layout.page_size
                pair.pages = page_lists[layout.page_size, case.is_aged]

    def _pair(self, name: str, case: Case, route: Route, arena: MemoryBlock) -> Pair:
        staged = StagedRoute.of(route)
        chunks = self.work.chunks(staged)
        slot_bytes = staged.num_bytes(len(chunks[0]))
        slots = MemoryBlock(NUM_SLOTS * slot_bytes, CPU, sharing_of(case))
        self._buffers.append(slots)
        transport = make_transport(case, f"{name}.{route.writer}.{route.reader}")
        transport.register(arena.region(ARENA))
        transport.register(slots.region(STAGING))
        return Pair(route, staged, arena.data, slots.data.view(NUM_SLOTS, slot_bytes), transport, 0, [], chunks)

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
                arena.data.view(-1, layout.page_bytes)[pages] = self.work.content(rank, layout)

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
            for _ in copier.gather(pair.staged, pair.arena, pair.placed(chunk), chunk, buffer):
                yield None
            span = Span(STAGING, index % NUM_SLOTS * pair.slots.shape[1], buffer.numel())
            yield [Copy(span, span)]
        while num_free < NUM_SLOTS:
            num_free += len(pair.transport.notifications())
            yield None


class Reader:
    """The other process, seen from the writer."""

    def __init__(self, stdin: IO[str], stdout: IO[str], cases: Sequence[Case]) -> None:
        self._stdin, self._stdout, self._cases = stdin, stdout, cases

    def tell(self, case: Case, method: str) -> None:
        print(json.dumps([self._cases.index(case), method]), file=self._stdin, flush=True)
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
            number, method = json.loads(line)
            case = list(self.pairs)[number]
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
                chunk, buffer = current.chunks[number], current.buffer(number)
                scatter = copier.scatter(current.staged, buffer, current.arena, current.placed(chunk), chunk)
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
            view = arena.data.view(-1, layout.page_bytes)
            if not torch.equal(view[pages], wanted):
                raise SystemExit(f"{case}: wrong bytes on rank {rank}")
            view[pages] = 0


# ---------------------------------------------------------------- the table


PATHS = ("direct", "staged", "scatter", "mooncake")
DEFAULT_PATHS = PATHS[:-1]
Row = tuple[Case, str]


def rows(page_size: int, paths: Sequence[str]) -> list[Row]:
    """(case, path)"""
    equal, both = (page_size, page_size), (False, True)
    found = [(Case(*pair, is_aged, equal), "equal") for pair in EQUAL for is_aged in both]
    found += [
        (Case(*pair, is_aged, equal, is_mooncake=path == "mooncake"), path)
        for pair in UNEQUAL
        for is_aged in both
        for path in paths
        if path != "mooncake" or is_aged
    ]
    cut = [path for path in ("direct", "staged") if path in paths]
    found += [(Case(1, 1, False, (size, size)), "equal") for size in PAGE_SIZES if size != page_size]
    found += [(Case(1, 1, False, pages), path) for pages in (PAGE_SIZES, PAGE_SIZES[::-1]) for path in cut]
    found += [(Case(1, 1, False, equal, DType.FP8_E4M3), "staged")] if "staged" in paths else []
    return found


def cases_of(page_size: int, paths: Sequence[str]) -> list[Case]:
    return list(dict.fromkeys(case for case, _ in rows(page_size, paths)))


def measure(work: Work, rounds: int, table: Sequence[Row], cases: Sequence[Case]) -> None:
    writer = Writer("writer", work, cases)
    command = [sys.executable, __file__, "--reader", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        print(writer.offer(), file=process.stdin, flush=True)
        writer.attach(process.stdout.readline())
        reader = Reader(process.stdin, process.stdout, cases)
        writer.fill()
        taken: dict[Row, list[float]] = {row: [] for row in table}
        copies: dict[Row, int] = {}
        for number in range(rounds + 1):
            for case, method in table:
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


def show(work: Work, taken: dict[Row, list[float]], copies: dict[Row, int]) -> None:
    for side, name in ((1, "writer"), (2, "reader")):
        for size in sorted({case.pages[side - 1] for case, _ in taken if case.is_aged}):
            pages = work.pages(size, True, side)
            num_runs = sum(page != before + 1 for before, page in pairwise([-2, *pages]))
            print(f"aged pool of the {name}: {len(pages)} pages of {size} in {num_runs} runs")
    print("\n| P -> D | pool | path | descriptors | GB/s | of equal | of scatter |\n|---|---|---|---:|---:|---:|---:|")
    for (case, method), seconds in taken.items():
        equal = taken[case.equal, "equal"]
        of_equal = statistics.median(np.divide(equal, seconds))
        scatter = taken.get((case._replace(is_mooncake=False), "scatter"))
        of_scatter = f"{statistics.median(np.divide(scatter, seconds)):.1f}" if scatter else ""
        print(
            f"| {case.writers} -> {case.readers} | {case.pool} | {method} "
            f"| {copies[case, method]} | {work.num_bytes / statistics.median(seconds) / 1e9:.2f} "
            f"| {of_equal:.2f} | {of_scatter} |"
        )


def show_slices(work: Work, page_size: int) -> None:
    """How long the transport is not polled while a chunk is scattered: the longest of a chunk's slices, by median."""
    case = Case(1, 2, True, (page_size, page_size))
    writers, readers = work.formats(case)
    staged = StagedRoute.of(plan_routes(writers, readers)[0][0])
    pages = work.pages(page_size, case.is_aged, 2)
    num_pages = min(len(pages), SCATTERED_BYTES // staged.num_bytes(page_size))
    placed, tokens = PlacedPages(ARENA, 0, pages[:num_pages]), range(num_pages * page_size)
    arena = MemoryBlock(work.pool_pages(page_size) * readers.page_bytes, CPU).data
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
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=PAGE_SIZES[0])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(DEFAULT_PATHS))
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in environment(OPTIONS).items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment(OPTIONS)})
    torch.set_num_threads(1)
    work = Work(SHAPES[args.shape], args.mib << 20, args.chunk_mib << 20)
    table, cases = rows(args.page_size, args.paths), cases_of(args.page_size, args.paths)
    if not args.reader:
        problem = engine_problem(MooncakeOptions()) if "mooncake" in args.paths else None
        if problem:
            raise SystemExit(f"no Mooncake here: {problem}")
        measure(work, args.rounds, table, cases)
        show_slices(work, args.page_size)
        return
    target = Target("reader", work, cases)
    ours, theirs = target.offer(), sys.stdin.readline()  # read first: neither line fits a pipe
    print(ours, flush=True)
    target.attach(theirs)
    target.serve()
    target.close()


if __name__ == "__main__":
    main()
