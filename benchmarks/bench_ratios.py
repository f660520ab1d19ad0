"""Whole steps of a bfloat16 checkpoint compared within one run: mixed with rows alone, types with each other.

    python -m benchmarks.bench_ratios MODEL_FOLDER [--isa avx2] [--rounds 25]

`as served` is the type that `deltaserve serve` chooses on a CPU with these instructions. `--isa avx2` makes torch and
oneDNN use nothing newer, whatever this CPU has. One thread; the clock is the process's CPU time.

Under each mixed step stands how much of it is matrix products: those of the model alone, with as many tokens, and
what the extend's 16 tokens take at the rate of 256 at once, the best there is: what a mixed step costs more at least.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_step import SPLIT_TOKENS, Bench, decode_item
from benchmarks.paired import Ratio, Times, take_turns
from deltaserve.compute.attention.attention_choice import open_native
from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.targets import Linear
from deltaserve.compute.weights.weights import DecoderWeights
from deltaserve.control.sched.plan import PlanItem, StepPlan, TokenValues, WorkList
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.tokens import pack_u32
from deltaserve.launch.compose import Checkpoint, transport_facts
from deltaserve.launch.cpu import read_cpuinfo, slow_dtypes
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import MachineFacts, resolve

AVX2_ONLY = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"}
ROWS, CONTEXT = 17, 256
EXTEND, MANY = 16, 256
"""Tokens."""


def served_dtype(model: Path, is_avx2: bool) -> DType:
    """What resolve() comes to."""
    cpuinfo = "flags: avx2 fma" if is_avx2 else read_cpuinfo()
    machine = MachineFacts(
        "cpu", num_cores=2, free_bytes=1 << 40, slow_dtypes=slow_dtypes(cpuinfo), transports=transport_facts()
    )
    return DType(resolve(Settings(), Checkpoint.open(str(model)).facts(), machine).dtype)


def extend(row: int, start: int, length: int) -> PlanItem:
    return PlanItem(RowId(row), start, length, TokenValues(pack_u32([1] * length)), True)


def step(bench: Bench, items: Sequence[PlanItem]) -> Callable[[], object]:
    plan = StepPlan(StepIndex(0), tuple(items), WorkList(SPLIT_TOKENS))
    return lambda: bench.executor.execute(plan)


def show(name: str, times: Times, ratio: Ratio, bar: str) -> None:
    print(f"{name:64} {' | '.join(f'{ms:.1f}' for ms in times.medians):>20} {ratio!s:>14} {bar:>7}")


def matrices(weights: DecoderWeights) -> list[Matrix]:
    """Matrices of the layers, but those of experts."""
    parts: list[Any] = [part for layer in weights.layers for part in (layer.attention, layer.mlp)]
    values = [getattr(part, field.name) for part in parts for field in fields(part)]
    return [value.weight for value in values if isinstance(value, Linear)]


def products(weights: DecoderWeights, num_tokens: int, num_logits: int) -> Callable[[], object]:
    """Nothing but a step's matrix products."""
    dtype = weights.embedding.dtype
    ops = make_step_ops(open_native("auto", weights.embedding.device, 1), dtype)
    pairs: list[tuple[Tensor, Matrix]]
    pairs = [(torch.randn(num_tokens, weight.shape[1]).to(dtype), weight) for weight in matrices(weights)]
    if num_logits:
        pairs.append((torch.randn(num_logits, weights.lm_head.shape[1]).to(dtype), weights.lm_head))

    @torch.inference_mode()
    def run() -> None:
        for x, weight in pairs:
            ops.product(x, weight)

    return run


def compare_mixed(name: str, bench: Bench, model: Path, num_rounds: int) -> None:
    rows = [decode_item(row, 199) for row in range(16)]
    mixed = [*rows, extend(16, 200 - EXTEND, EXTEND)]
    steps = take_turns([step(bench, rows), step(bench, mixed)], num_rounds)
    show(f"{name}: 16 rows at 200 | with a 16-token extend to 200", steps, steps.ratio([1], [0]), "<= 1.2")
    weights = load_weights(model, bench.spec, torch_dtype(bench.spec.dtype), torch.device("cpu"))
    few = take_turns([products(weights, 16, 16), products(weights, 16 + EXTEND, 17)], num_rounds)
    show(f"{name}: the same, matrix products alone", few, few.ratio([1], [0]), "")
    many = take_turns([products(weights, MANY, 0)], num_rounds)
    least = many.medians[0] * EXTEND / MANY
    best = f"{name}: {EXTEND} tokens' products at the best rate"
    print(f"{best:64} {least:20.1f} {1 + least / steps.medians[0]:14.2f}")


def compare_types(served: Bench, wide: Bench, num_rounds: int) -> None:
    """How many times as fast as float32 the model is as it is served."""
    steps = {
        "16 rows at 200": [decode_item(row, 199) for row in range(16)],
        "1 row at 200": [decode_item(0, 199)],
        "extend of 128 at 0": [extend(0, 0, 128)],
    }
    for name, items in steps.items():
        times = take_turns([step(wide, items), step(served, items)], num_rounds)
        show(f"{name}: float32 | as served", times, times.ratio([0], [1]), ">= 0.9")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", choices=["native", "avx2"], default="native")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    if args.isa == "avx2" and os.environ.get("DNNL_MAX_CPU_ISA") != "AVX2":  # both are read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2_ONLY)
    dtype = served_dtype(args.model, args.isa == "avx2")
    served = Bench(args.model, ROWS, dtype, "cpu", 1, CONTEXT)
    wide = Bench(args.model, ROWS, DType.FLOAT32, "cpu", 1, CONTEXT)
    for bench in (served, wide):
        bench.lay_out(0)
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}; 1 thread; as served: {dtype.value}")
    print(f"{'steps':64} {'ms, medians':>20} {'ratio (minima)':>14} {'bar':>7}")
    compare_mixed("as served", served, args.model, args.rounds)
    compare_mixed("float32", wide, args.model, args.rounds)
    compare_types(served, wide, args.rounds)


if __name__ == "__main__":
    main()
