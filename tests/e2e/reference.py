"""The same model in transformers, float32: what a server's tokens and log-probabilities must be."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.lifetime import Lifetime
from deltaserve.model.checkpoint_config import load_spec
from tests.compute.executor.world import TOLERANCE, reference_logprobs
from tests.e2e.server import Answer

TIE = 1e-2
"""Two tokens whose log-probabilities are nearer than this may change places."""


MAX_PAYLOAD_BYTES = 512
"""What may move beside pages: the first token, its log-probabilities, counts."""


def page_bytes(model: Path, page_size: int, kv_dtype: DType | None = None) -> int:
    """Bytes of a page over all pools."""
    spec = load_spec(model)
    return sum(pool_page_bytes(spec.cache_spec(page_size, kv_dtype or spec.dtype)))


def moved_bytes(model: Path, page_size: int, length: int, hit: int, window_hit: int | None = None) -> int:
    """Bytes of the pages that a prompt brings to decode, which has `hit` tokens of it. A recurrent model's state is
    always brought: who computes the prompt's last token has the one at its end.

    `window_hit`: as far as it has what a window shows of them, where that is not as far.
    """
    spec = load_spec(model)
    cache = spec.cache_spec(page_size, spec.dtype)
    hits = [hit, *[hit if window_hit is None else window_hit] * (cache.num_pools - 1)]
    kept = zip(cache.pools, hits, strict=True)
    hits = [min(n, length - 1) if retention.lifetime is Lifetime.STATE else n for retention, n in kept]
    firsts = (
        max(retention.first_needed(length, page_size), n // page_size)
        for retention, n in zip(cache.pools, hits, strict=True)
    )
    sizes = zip(firsts, pool_page_bytes(cache), strict=True)
    return sum((-(-length // page_size) - first) * num_bytes for first, num_bytes in sizes)


def random_prompt(count: int, seed: int) -> list[int]:
    """Ids of single bytes."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(count)]


def assert_true(model: Path, prompt: Sequence[int], answer: Answer, tolerance: float = TOLERANCE) -> None:
    """Every log-probability of prompt and output, and greedy choices, are those of the reference."""
    output = answer.tokens
    want = reference_logprobs(model, [*prompt, *output[:-1]])  # [T, V]
    drawn = want[len(prompt) - 1 :]  # [N, V]
    assert drawn.shape[0] == len(output) == len(answer.logprobs)
    chosen = drawn.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert_near(answer.logprobs, chosen.tolist(), tolerance)
    behind = (drawn.max(-1).values - chosen).tolist()
    assert max(behind) <= TIE + tolerance, f"not greedy: {behind}"
    for got, line in zip(answer.tops, drawn, strict=True):
        best = line.topk(8).values.tolist()
        assert all(min(abs(value - other) for other in best) <= tolerance for value in got), (got, best)
    if answer.prompt_logprobs:
        told = torch.tensor(list(prompt[1:]))
        assert_near(
            answer.prompt_logprobs, want[: len(told)].gather(1, told.unsqueeze(1)).squeeze(1).tolist(), tolerance
        )


def assert_near(got: Sequence[float], want: Sequence[float], tolerance: float) -> None:
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst <= tolerance, f"logprobs differ by {worst:.2e}: {got} {want}"
