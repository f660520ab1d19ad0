"""Time of attention in one step (index tensors, then 12 layers), without weights: where rows differ in length.

    python benchmarks/bench_attention.py [--layers 12] [--json]

Every ratio compares runs that took turns, so other load on the machine falls on both sides: the median over all rounds,
and in brackets that of the best times. One thread; the clock is the process's CPU time.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.paired import Ratio, Times, take_turns
from deltaserve.base.ids import PageId, PoolId
from deltaserve.device.attention import Batch, Query
from deltaserve.device.kv_pool import KvPool
from deltaserve.device.page_table import PageTable
from deltaserve.device.torch_attention import TorchAttention
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import CacheSpec, PageGroup

PAGE_SIZE, SPLIT_TOKENS, LONG = 16, 256, 128 * 1024
KV_HEADS, GROUP_SIZE, HEAD_DIM = 4, 2, 64
ROUNDS, LONG_ROUNDS = 40, 7


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
        self.backend = TorchAttention(pool, self.tables, KV_HEADS * GROUP_SIZE)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {dtype.value: measure(Bench(args.layers, dtype)) for dtype in (DType.BFLOAT16, DType.FLOAT32)}
    if args.json:
        print(json.dumps({dtype: [asdict(line) for line in lines] for dtype, lines in found.items()}, indent=2))
        return
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'KV':9} {'steps':50} {'ms':>26} {'ratio (minima)':>14} {'bar':>5}")
    for dtype, lines in found.items():
        for line in lines:
            shown = " | ".join(f"{ms:.1f}" for ms in line.ms)
            compared = "" if line.ratio is None else f"{line.ratio!s:>14} {line.bar:5.1f}"
            print(f"{dtype:9} {line.name:50} {shown:>26} {compared}")


if __name__ == "__main__":
    main()
