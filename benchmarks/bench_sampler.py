"""Time of drawing one token for each of 16 rows with a vocabulary of 152K.

    python -m benchmarks.bench_sampler [--rows 16] [--vocab 152000] [--threads 1]

Two kinds of logits: `peaked`, where 0.9 of the weight lies on a few hundred tokens, as in a language model, and `flat`,
where it takes more than the 1024 candidates and every row goes over its whole vocabulary. The clock is the process's
CPU time.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from deltaserve.compute.executor.sampler import SampleRow, finite_rows, sample
from deltaserve.core.sampling import SamplingParams

RULES: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("greedy", {"temperature": 0.0}, None),
    ("temperature 0.8", {"temperature": 0.8}, None),
    ("top_p 0.9", {"top_p": 0.9}, 25.0),
    ("top_k 40", {"top_k": 40}, None),
    ("top_k 40, top_p 0.9, temperature 0.8", {"top_k": 40, "top_p": 0.9, "temperature": 0.8}, None),
    ("min_p 0.05", {"min_p": 0.05}, None),
)
REPEATS = 9


def peaked(rows: int, vocab: int) -> Tensor:
    """Weights that fall with the rank to the power of 1.3, in an order of its own for each row."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.3 * torch.arange(1, vocab + 1).log()
    return torch.stack([falling[torch.randperm(vocab, generator=generator)] for _ in range(rows)])


def flat(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def median_ms(logits: Tensor, rows: list[SampleRow]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        own = logits.clone()
        start = time.process_time()
        finite_rows(own)
        sample(own, rows)
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"instruction set: {torch.backends.cpu.get_cpu_capability()}, {args.threads} thread(s)")
    print(f"{'rules':40} {'peaked ms':>10} {'flat ms':>10} {'bar':>6}")
    kinds = (peaked(args.rows, args.vocab), flat(args.rows, args.vocab))
    for name, changes, bar in RULES:
        rows = [SampleRow(SamplingParams(**{"max_tokens": 1, "seed": i, **changes}), 0, None) for i in range(args.rows)]
        found = [median_ms(logits, rows) for logits in kinds]
        print(f"{name:40} {found[0]:10.1f} {found[1]:10.1f} {'' if bar is None else bar:>6}")


if __name__ == "__main__":
    main()
