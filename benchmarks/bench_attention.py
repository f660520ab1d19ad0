"""Time of attention in one step, without weights: by torch (index tensors, then 12 layers) where rows differ in length,
then one layer by torch and by the native library, beside what this machine reads and multiplies in the same run.

    python -m benchmarks.bench_attention [--layers 12] [--json]
    python -m benchmarks.bench_attention --device cuda: on a GPU, see bench_attention_cuda.py

Every ratio compares runs that took turns, so other load on the machine falls on both sides: the median over all rounds,
and in brackets that of the best times. One thread; the clock is the process's CPU time.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.paired import Ratio, Times, take_turns
from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.native.native_attention import NativeAttention
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.native.native_library import NativeContext, NativeLibrary, NativeUnavailable
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup

PAGE_SIZE, SPLIT_TOKENS, LONG = 16, 256, 128 * 1024
KV_HEADS, GROUP_SIZE, HEAD_DIM = 4, 2, 64
ROUNDS, LONG_ROUNDS, STEP_ROUNDS = 40, 7, 9


@dataclass(frozen=True, slots=True)
class Line:
    """Some steps, and what the last of them costs in terms of the others together."""

    name: str
    ms: tuple[float, ...]
    """Median of each."""
    ratio: Ratio | None = None
    bar: float | None = None


class Bench:
    """One long row and 32 short ones, of which a step takes some. All layers lie on the same KV."""

    def __init__(self, num_layers: int, dtype: DType) -> None:
        self.num_layers = num_layers
        cache = CacheSpec(PAGE_SIZE, (PageGroup("kv", 1, KV_HEADS, HEAD_DIM, dtype),))
        lens = [LONG] + [4608] + [256] * 32
        num_pages = sum(lens) // PAGE_SIZE
        pool = KvPool(cache, (num_pages,), torch.device("cpu"))
        pool.page_arenas[0].bytes.fill_(0x3C)  # a small number in every type; untouched memory would all be one page
        self.tables = PageTable(1, len(lens), LONG // PAGE_SIZE)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        for line, length in enumerate(lens):
            pages = tuple(PageId(order.pop()) for _ in range(length // PAGE_SIZE))
            self.tables.write(PoolId(0), line, 0, pages)
        self.backend = TorchAttention(pool, self.tables, (KV_HEADS * GROUP_SIZE,))
        self.dtype = torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float32

    def step(self, queries: Sequence[Query]) -> Callable[[], object]:
        batch = Batch(tuple(queries), SPLIT_TOKENS)
        q = torch.randn(batch.num_tokens, KV_HEADS * GROUP_SIZE, HEAD_DIM).to(self.dtype)

        def run() -> None:
            attention = self.backend.begin_step(batch)[0]
            for _ in range(self.num_layers):
                attention.attend(0, q, HEAD_DIM**-0.5)

        return run


def line(name: str, times: Times, ratio: Ratio | None = None, bar: float | None = None) -> Line:
    return Line(name, times.medians, ratio, bar)


@torch.inference_mode()
def measure(bench: Bench) -> list[Line]:
    short = [Query(line, 199, 1) for line in range(2, 34)]
    long_row = Query(0, LONG - 1, 1)
    mixed = take_turns([bench.step(short[:16]), bench.step([*short[:16], Query(33, 184, 16)])], ROUNDS)
    beside = [bench.step(short[:31]), bench.step([long_row]), bench.step([long_row, *short[:31]])]
    long = take_turns(beside, LONG_ROUNDS)
    lines = [
        line("16 rows at 200 | with a 16-token extend to 200", mixed, mixed.ratio([1], [0]), 1.2),
        line("31 rows at 200 | one at 128K | together", long, long.ratio([2], [0, 1]), 1.1),
    ]
    for start, length in ((0, 512), (4096, 512), (2048, 128)):
        lines.append(line(f"extend of {length} at {start}", take_turns([bench.step([Query(1, start, length)])], 5)))
    return lines


@dataclass(frozen=True, slots=True)
class Machine:
    """What one thread can do, measured now."""

    read_gb_s: float
    gflop_s: float
    """Rate of a product of two float32 matrices of 1024 x 1024."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of one step."""

    name: str
    kv_heads: int
    group_size: int
    head_dim: int
    queries: tuple[Query, ...]
    common: int = 0
    """Positions that lie on the first row's pages."""


STEPS = (
    Step("16 rows, 2,048 private", 4, 2, 64, tuple(Query(line, 2047, 1) for line in range(16))),
    Step("8 rows, 8,192 shared", 2, 4, 128, tuple(Query(line, 8192 + 127, 1) for line in range(8)), 8192),
    Step("8 rows, 8,192 private", 2, 4, 128, tuple(Query(line, 8192 + 127, 1) for line in range(8))),
    Step("extend of 512 at 4,096", 2, 4, 128, (Query(0, 4096, 512),)),
    Step("prefill of 512", 2, 4, 128, (Query(0, 0, 512),)),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """One layer by one backend: the median, and of the best time what it reads and computes."""

    step: str
    backend: str
    ms: float
    gb_s: float
    """Rate at which KV is read, each shared position once."""
    gflop_s: float


def backends_of(step: Step, dtype: DType) -> dict[str, TorchAttention | NativeAttention]:
    """Over the same random pages."""
    cache = CacheSpec(PAGE_SIZE, (PageGroup("kv", 1, step.kv_heads, step.head_dim, dtype),))
    num_pages = [cache.num_pages(query.q_end) for query in step.queries]
    pool, tables = KvPool(cache, (sum(num_pages),), torch.device("cpu")), PageTable(1, len(num_pages), max(num_pages))
    pool.page_arenas[0].bytes.view(torch_dtype(dtype)).normal_()
    order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(0)).tolist()
    common = [PageId(page) for page in order[: step.common // PAGE_SIZE]]
    for line, count in enumerate(num_pages):
        own = [PageId(order.pop()) for _ in range(count - len(common))]
        tables.write(PoolId(0), line, 0, (*common, *own))
    heads = step.kv_heads * step.group_size
    found: dict[str, TorchAttention | NativeAttention] = {"torch": TorchAttention(pool, tables, (heads,))}
    try:
        library = NativeLibrary()
    except NativeUnavailable as error:
        print(f"no native library: {error}")
        return found
    for instruction_set in library.instruction_sets[1:] or library.instruction_sets:
        context = NativeContext(library, instruction_set)
        found[instruction_set.name] = NativeAttention(pool, tables, (heads,), context)
    return found


@torch.inference_mode()
def rates(step: Step, dtype: DType) -> list[Rate]:
    """All backends in turns."""
    shared = (Shared(0, step.common, tuple(range(len(step.queries)))),) if step.common else ()
    batch = Batch(step.queries, SPLIT_TOKENS, shared)
    heads = step.kv_heads * step.group_size
    q = torch.randn(batch.num_tokens, heads, step.head_dim).to(torch_dtype(dtype))
    backends = backends_of(step, dtype)
    begun = [backend.begin_step(batch)[0] for backend in backends.values()]
    calls = [partial(attention.attend, 0, q, step.head_dim**-0.5) for attention in begun]
    times = take_turns(calls, STEP_ROUNDS)
    read = batch.tokens_read - max(0, len(step.queries) - 1) * step.common
    num_bytes = 2 * read * step.kv_heads * step.head_dim * dtype.itemsize
    seen = sum(sum(range(query.q_start + 1, query.q_end + 1)) for query in step.queries)
    flops = 4 * seen * heads * step.head_dim
    best = [min(taken) * 1e6 for taken in zip(*times.rounds, strict=True)]
    return [
        Rate(step.name, name, ms, num_bytes / ns, flops / ns)
        for name, ms, ns in zip(backends, times.medians, best, strict=True)
    ]


def measure_machine() -> Machine:
    numbers, matrix = torch.randn(64 << 20), torch.randn(1024, 1024)
    rounds = take_turns([numbers.sum, lambda: matrix @ matrix], 5).rounds
    read, product = (min(taken) * 1e6 for taken in zip(*rounds, strict=True))
    return Machine(4 * numbers.numel() / read, 2 * 1024**3 / product)


def print_rates(machine: Machine, found: dict[str, list[Rate]]) -> None:
    print(f"this machine: {machine.read_gb_s:.1f} GB/s, {machine.gflop_s:.0f} GFLOP/s (float32)")
    for dtype, lines in found.items():
        for line in lines:
            shares = f"{line.gb_s / machine.read_gb_s:5.0%} {line.gflop_s:7.1f} {line.gflop_s / machine.gflop_s:5.0%}"
            print(f"{dtype:9} {line.step:26} {line.backend:11} {line.ms:8.2f} ms {line.gb_s:6.1f} {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cuda":
        on_gpu: Any = importlib.import_module("benchmarks.bench_attention_cuda")  # where triton can be had
        on_gpu.measure()
        return
    torch.set_num_threads(1)
    found = {dtype.value: measure(Bench(args.layers, dtype)) for dtype in (DType.BFLOAT16, DType.FLOAT32)}
    machine = measure_machine()
    steps = {
        dtype.value: [rate for step in STEPS for rate in rates(step, dtype)]
        for dtype in (DType.BFLOAT16, DType.FLOAT32)
    }
    if args.json:
        told = {dtype: [asdict(line) for line in lines] for dtype, lines in found.items()}
        rate_of = {dtype: [asdict(rate) for rate in lines] for dtype, lines in steps.items()}
        print(json.dumps({"machine": asdict(machine), "steps": told, "layers": rate_of}, indent=2))
        return
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'KV':9} {'steps':50} {'ms':>26} {'ratio (minima)':>14} {'bar':>5}")
    for dtype, lines in found.items():
        for line in lines:
            shown = " | ".join(f"{ms:.1f}" for ms in line.ms)
            compared = "" if line.ratio is None else f"{line.ratio!s:>14} {line.bar:5.1f}"
            print(f"{dtype:9} {line.name:50} {shown:>26} {compared}")
    print_rates(machine, steps)


if __name__ == "__main__":
    main()
