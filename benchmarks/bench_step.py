"""Time of one step of the torch executor: decode batches (prefix private or shared) and prefill chunks.

    python -m benchmarks.bench_step MODEL_FOLDER [--rows 16] [--dtype float32] [--device cpu] [--threads 1] [--json]

Each line compares with a roof: bytes that must be read (weights once, every KV page once) at the measured read
bandwidth, or matrix work at the rate of one large product in the model's type or float32, whichever is faster. On
the CPU with one thread the clock is the process's CPU time, so other load counts less. There a decode step is measured
once more with a step's operators by torch, with products alone by the native library, and with all of them, in turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paired import Times, take_turns
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.compute.layers.step_ops import StepOps, TorchOps
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.compute.weights.packing import pack_values, product
from deltaserve.control.sched.plan import PageUpdate, PlanItem, RowOpen, SharedRun, StepPlan, TokenValues, WorkList
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.quantization import Quantization
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.layers.moe import MoeSpec
from deltaserve.model.model_spec import ModelSpec

PAGE_SIZE, SPLIT_TOKENS = 16, 256
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
DECODE_CONTEXTS = (64, 512, 2048, 8192)
CHUNKS = ((0, 512), (2048, 128), (4096, 512), (0, 2048))
"""(q_start, q_len)"""
MAX_CONTEXT = max(*DECODE_CONTEXTS, *(start + length for start, length in CHUNKS))


@dataclass(frozen=True, slots=True)
class Line:
    """One measured step."""

    name: str
    ms: float
    """Best of several."""
    tokens_per_s: float
    roof_ms: float
    roof_share: float
    """roof_ms / ms"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this device does at best, measured now."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls with a clock in seconds."""

    clock: Callable[[], float]

    def best_s(self, call: Callable[[], object], repeats: int = 7) -> float:
        """Seconds of the fastest of several calls: other load on the machine only ever adds."""
        call()
        times = []
        for _ in range(repeats):
            start = self.clock()
            call()
            times.append(self.clock() - start)
        return min(times)


def measure_machine(watch: Stopwatch, dtype: torch.dtype, device: str) -> Machine:
    data = torch.ones(32 << 20, dtype=torch.int64, device=device)  # 256 MiB, written: zeros may have no memory yet
    a = torch.ones(1024, 2048, dtype=dtype, device=device)
    b = torch.ones(2048, 2048, dtype=dtype, device=device)
    read = watch.best_s(lambda: data.sum().item())
    best = min(_product_s(watch, a, b), _product_s(watch, a.float(), b.float()))
    return Machine(data.numel() * 8 / read, 2 * 1024 * 2048 * 2048 / best)


@torch.inference_mode()
def _product_s(watch: Stopwatch, a: Tensor, b: Tensor) -> float:
    """As the model computes it."""
    packed = pack_values(b)
    return watch.best_s(lambda: product(a, packed)[0, 0].item())


class Bench:
    """An executor with all rows open over one line of pages each, for `context` tokens."""

    def __init__(
        self,
        model: Path,
        rows: int,
        dtype: DType | None,
        device: str,
        threads: int,
        context: int = MAX_CONTEXT,
        quantization: Quantization = "auto",
    ) -> None:
        spec = load_spec(model)
        self.spec = replace(spec, dtype=dtype or spec.dtype)
        cache = self.spec.cache_spec(PAGE_SIZE, self.spec.dtype)
        self.context = context + PAGE_SIZE
        self.pages_per_row = cache.num_pages(self.context)
        num_pages = self.pages_per_row * rows
        self.token_bytes = pool_page_bytes(cache)[0] // PAGE_SIZE
        sizes = ExecutorSizes((num_pages,), rows, self.context, threads, quantization=quantization)
        self.executor = TorchExecutor.load(model, self.spec, cache, sizes, device, self.spec.dtype)
        for arena in self.executor.memory.kv.arenas:
            arena.bytes.fill_(0x3C)  # a small number in every dtype; untouched memory would all be one page
        self.watch = Stopwatch(time.process_time if device == "cpu" and threads == 1 else time.perf_counter)
        self.machine = measure_machine(self.watch, torch_dtype(self.spec.dtype), device)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.private = [order[row * self.pages_per_row :][: self.pages_per_row] for row in range(rows)]
        self.opens = tuple(
            RowOpen(RowId(row), GREEDY, pack_u32([1] * self.context), self.context) for row in range(rows)
        )
        self.executor.execute(StepPlan(StepIndex(0), (), WorkList(SPLIT_TOKENS), self.opens))

    def lay_out(self, shared_len: int) -> None:
        """Rows start anew, with the first `shared_len` tokens of all on the pages of row 0."""
        count = shared_len // PAGE_SIZE
        updates = tuple(
            PageUpdate(RowId(row), PoolId(0), 0, tuple(PageId(p) for p in self.private[0][:count] + pages[count:]))
            for row, pages in enumerate(self.private)
        )
        closes = tuple(opened.row for opened in self.opens)
        self.executor.execute(StepPlan(StepIndex(0), (), WorkList(SPLIT_TOKENS), self.opens, updates, closes))

    def run(self, name: str, items: Sequence[PlanItem], shared: Sequence[SharedRun] = ()) -> Line:
        plan = StepPlan(StepIndex(0), tuple(items), WorkList(SPLIT_TOKENS, tuple(shared)))
        result = self.executor.execute(plan)
        seconds = self.watch.best_s(lambda: self.executor.execute(plan))
        read = result.tokens_read - result.shared_tokens_read
        seen = sum(item.q_len * item.q_start + item.q_len * (item.q_len + 1) // 2 for item in items)
        roof = self.roof_s(plan.num_tokens, sum(item.samples for item in items), read, seen)
        return Line(name, seconds * 1e3, plan.num_tokens / seconds, roof * 1e3, roof / seconds)

    def roof_s(self, num_tokens: int, num_logits: int, kv_tokens: int, num_seen: int) -> float:
        """`num_seen`: keys that all tokens see, together."""
        body, head = body_parameters(self.spec), self.spec.vocab_size * self.spec.hidden_size
        itemsize = self.spec.dtype.itemsize
        num_bytes = (body + head * bool(num_logits)) * itemsize + kv_tokens * self.token_bytes
        of_key = 2 * self.spec.num_heads * self.spec.head_dim * len(self.spec.layers)  # scores, and weighted values
        flops = 2 * (body * num_tokens + head * num_logits + of_key * num_seen)
        return max(num_bytes / self.machine.read_bytes_per_s, flops / self.machine.flops_per_s)


def body_parameters(spec: ModelSpec) -> int:
    """Parameters of the matrices a token meets, without embedding and head; experts counted as used by one token."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    total = 0
    for layer in spec.layers:
        match layer.mlp:
            case DenseSpec(inner):
                total += attention + 3 * inner * spec.hidden_size
            case MoeSpec() as moe:
                total += attention + 3 * moe.intermediate_size * moe.experts_per_token * spec.hidden_size
    return total


def decode_item(row: int, position: int) -> PlanItem:
    return PlanItem(RowId(row), position, 1, TokenValues(pack_u32([1])), True)


def measure(bench: Bench, rows: int) -> list[Line]:
    lines = []
    for context in DECODE_CONTEXTS:
        items = [decode_item(row, context - 1) for row in range(rows)]
        bench.lay_out(0)
        lines.append(bench.run(f"decode {rows} rows at {context}", items))
        shared_len = (context - 1) // SPLIT_TOKENS * SPLIT_TOKENS
        if shared_len and rows > 1:
            bench.lay_out(shared_len)
            run = SharedRun(0, shared_len, tuple(RowId(row) for row in range(rows)))
            lines.append(bench.run(f"decode {rows} rows at {context}, {shared_len} shared", items, [run]))
    lines.append(bench.run("decode 1 row at 512", [decode_item(0, 511)]))
    for start, length in CHUNKS:
        bench.lay_out(0)
        item = PlanItem(RowId(0), start, length, TokenValues(pack_u32([1] * length)), True)
        lines.append(bench.run(f"prefill {length} at {start}", [item]))
    return lines


class NativeProducts(TorchOps):
    """Products by other operators, the rest by torch."""

    def __init__(self, ops: StepOps) -> None:
        self._ops = ops

    def product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return self._ops.product(x, weight, bias)


def compare_operators(bench: Bench, rows: int, num_rounds: int = 40) -> Times:
    """A decode step at short context: torch, products native, all native. Attention is the same in all."""
    bench.lay_out(0)
    items = tuple(decode_item(row, DECODE_CONTEXTS[0] - 1) for row in range(rows))
    plan = StepPlan(StepIndex(0), items, WorkList(SPLIT_TOKENS))
    decoder = bench.executor._decoder
    native = decoder._ops

    def step(ops: StepOps) -> None:
        decoder._ops = ops
        bench.executor.execute(plan)

    forms = (TorchOps(), NativeProducts(native), native)
    return take_turns([partial(step, ops) for ops in forms], num_rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], help="by default the checkpoint's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    dtype = None if args.dtype is None else DType(args.dtype)
    bench = Bench(args.model, args.rows, dtype, args.device, args.threads)
    lines = measure(bench, args.rows)
    if args.json:
        print(json.dumps({"machine": asdict(bench.machine), "lines": [asdict(line) for line in lines]}, indent=2))
        return
    machine = bench.machine
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}, weights and KV {bench.spec.dtype.value}")
    print(f"read {machine.read_bytes_per_s / 1e9:.1f} GB/s, products {machine.flops_per_s / 1e9:.0f} GFLOP/s")
    print(f"{'step':40} {'ms':>9} {'tokens/s':>10} {'roof ms':>9} {'of roof':>8}")
    for line in lines:
        print(f"{line.name:40} {line.ms:9.2f} {line.tokens_per_s:10.0f} {line.roof_ms:9.2f} {line.roof_share:8.0%}")
    if args.device == "cpu" and args.threads == 1:
        for rows in sorted({1, args.rows}):
            times = compare_operators(bench, rows)
            shown = " | ".join(f"{ms:.2f}" for ms in times.medians)
            name = f"decode {rows} rows at {DECODE_CONTEXTS[0]}"
            print(f"{name}: torch | products native | all native: {shown} ms, {times.ratio([0], [2])} in all")


if __name__ == "__main__":
    main()
