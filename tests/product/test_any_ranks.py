"""Every pair of sizes: cold, partly and wholly cached prompts are answered as transformers answers them."""

import itertools
from pathlib import Path

import pytest

from deltaserve.transfer.staging import StagingMode
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup
from tests.runner.world import random_tokens

FAMILIES = ("llama", "qwen3", "qwen3_moe", "minimax_m2", "deepseek_v3", "gemma3_text", "gpt_oss")
SIZES = tuple(itertools.product((1, 2, 4), repeat=2))
REPLICATED = ("deepseek_v3",)
"""Every rank holds the latent of all heads: one writer sends it as it is."""
PATHS = {"direct": None, "staged": StagingMode.ON}
QUICK = {
    ("llama", 1, 4),
    ("qwen3", 4, 1),
    ("qwen3_moe", 2, 4),
    ("minimax_m2", 4, 2),
    ("deepseek_v3", 2, 1),
    ("gemma3_text", 2, 1),
    ("gpt_oss", 1, 2),
}
"""The others take minutes."""


def cases() -> list[object]:
    return [
        pytest.param(
            family,
            *sizes,
            mode,
            marks=() if (family, *sizes) in QUICK else pytest.mark.slow,
            id=f"{family}-P{sizes[0]}-D{sizes[1]}-{path}",
        )
        for family, sizes, (path, mode) in itertools.product(FAMILIES, SIZES, PATHS.items())
    ]


@pytest.mark.parametrize(("family", "prefill_ranks", "decode_ranks", "staging"), cases())
def test_answers_are_those_of_transformers(
    tiny_models: Path, family: str, prefill_ranks: int, decode_ranks: int, staging: StagingMode | None
) -> None:
    product = Product(tiny_models / family, prefill_ranks, decode_ranks, staging=staging)
    system, long, short = random_tokens(70, 1), random_tokens(53, 2), random_tokens(9, 3)
    (cold,) = product.serve([*system, *long])
    assert cold.decode_cached_len == 0
    assert cold.transferred_bytes > 0
    (whole,) = product.serve([*system, *long])
    assert whole.tokens == cold.tokens
    assert whole.decode_cached_len >= 112
    partly, other = product.serve([*system, *short], [*random_tokens(20, 4)])
    assert partly.decode_cached_len == 64
    assert other.decode_cached_len == 0
    is_staged = staging is not None and prefill_ranks != decode_ranks and family not in REPLICATED
    assert (product.worker(PREFILL).count("staged_writes") > 0) is is_staged
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


@pytest.mark.parametrize(("family", "prefill_ranks", "decode_ranks"), [("qwen3", 2, 4), ("deepseek_v3", 1, 2)])
def test_without_a_cache_on_decode(tiny_models: Path, family: str, prefill_ranks: int, decode_ranks: int) -> None:
    product = Product(tiny_models / family, prefill_ranks, decode_ranks, Pages(4), setup=Setup(decode_cache=False))
    prompt = random_tokens(61, 5)
    (cold,) = product.serve(prompt)
    (again,) = product.serve(prompt)
    assert again.tokens == cold.tokens
    assert again.decode_cached_len == 0
    assert again.transferred_bytes == cold.transferred_bytes
    product.close()
