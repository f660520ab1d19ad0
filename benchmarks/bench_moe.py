"""One layer of experts in the sizes of Qwen3-30B-A3B, matrices plain and packed in turns; memory of both.

    python -m benchmarks.bench_moe [--experts 64]

The sizes are real but for the number of experts (128), which decides how many tokens meet in one. One thread; the
clock is the process's CPU time.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch

from benchmarks.paired import take_turns
from deltaserve.compute.layers.moe import MoeWeights
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.weights.packing import pack
from deltaserve.model.layers.moe import MoeSpec, RouterKind

HIDDEN, INNER, CHOSEN = 2048, 768, 8
TOKENS = (1, 16, 128)
ROUNDS = 7


def resident_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def draw(num_experts: int, dtype: torch.dtype) -> MoeWeights:
    gate_up = (torch.rand(num_experts, 2 * INNER, HIDDEN) / 64).to(dtype)
    down = (torch.rand(num_experts, HIDDEN, INNER) / 64).to(dtype)
    spec = MoeSpec(RouterKind.SOFTMAX, num_experts, CHOSEN, INNER, renormalise=True)
    return MoeWeights(spec, torch.randn(num_experts, HIDDEN).to(dtype), None, gate_up.unbind(), down.unbind())


@torch.inference_mode()
def measure(num_experts: int, dtype: torch.dtype) -> None:
    before = resident_mib()
    plain = draw(num_experts, dtype)
    drawn = resident_mib()
    packed = replace(plain, gate_up=tuple(map(pack, plain.gate_up)), down=tuple(map(pack, plain.down)))
    print(f"{dtype}: plain {drawn - before:.0f} MiB, packed {resident_mib() - drawn:.0f} MiB")
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, HIDDEN).to(dtype)
        times = take_turns([partial(weights.compute, x, TorchOps()) for weights in (plain, packed)], ROUNDS)
        print(
            f"{num_tokens:5} tokens | {' | '.join(f'{ms:6.1f}' for ms in times.medians)} ms | {times.ratio([0], [1])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}; plain | packed | plain over packed (minima)")
    for dtype in (torch.bfloat16, torch.float32):
        measure(args.experts, dtype)


if __name__ == "__main__":
    main()
