"""Every pair of sizes: cold, partly and wholly cached prompts are answered as transformers answers them."""

import itertools
from pathlib import Path

import pytest

from deltaserve.control.transfer.staging import StagingMode
from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup

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
WIDE = {
    ("qwen3", "staged"),
    ("qwen3_moe", "direct"),
    ("minimax_m2", "direct"),
    ("deepseek_v3", "staged"),
    ("gemma3_text", "staged"),
    ("gpt_oss", "direct"),
}
"""Quick ones whose other path shows the ranks; other families show the path."""
QUICK_RESTS = {("qwen3", 2, 4, "direct", "equal", "off"), ("deepseek_v3", 2, 1, "staged", "unequal", "off")}


def marks_of(family: str, sizes: tuple[int, ...], path: str) -> tuple[pytest.MarkDecorator, ...]:
    if (family, *sizes) not in QUICK:
        return (pytest.mark.slow,)
    return (pytest.mark.wide,) if (family, path) in WIDE else ()


def cases() -> list[object]:
    return [
        pytest.param(
            family,
            *sizes,
            mode,
            marks=marks_of(family, sizes, path),
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
    must_stage = staging is not None and is_staged(prefill_ranks, decode_ranks, family, (16, 16))
    assert (product.worker(PREFILL).count("staged_writes") > 0) is must_stage
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


def is_staged(prefill_ranks: int, decode_ranks: int, family: str, pages: tuple[int, int]) -> bool:
    """Where staging is on: what is not whole pages."""
    return pages[0] != pages[1] or (prefill_ranks != decode_ranks and family not in REPLICATED)


KEEP_ALL = FAMILIES[:5]
"""Families whose layers keep all tokens: page sizes may differ."""
CACHES = {"cache": True, "off": False}


def pages_of(prefill_ranks: int, decode_ranks: int) -> dict[str, tuple[int, int]]:
    """Larger ones where there are more ranks."""
    return {"equal": (16, 16), "unequal": (16, 48) if prefill_ranks <= decode_ranks else (48, 16)}


RESTS = [
    pytest.param(
        family,
        *sizes,
        mode,
        pages,
        cache,
        marks=() if (family, *sizes, path, name, kept) in QUICK_RESTS else pytest.mark.slow,
        id=f"{family}-P{sizes[0]}-D{sizes[1]}-{path}-{name}-{kept}",
    )
    for family, sizes, (path, mode), (kept, cache) in itertools.product(KEEP_ALL, SIZES, PATHS.items(), CACHES.items())
    for name, pages in pages_of(*sizes).items()
    if (name, kept) != ("equal", "cache")
]
"""With the test above the whole product of families, ranks, paths, page sizes and caches."""


@pytest.mark.parametrize(("family", "prefill_ranks", "decode_ranks", "staging", "pages", "cache"), RESTS)
def test_any_ranks_with_any_pages_with_and_without_a_cache(
    tiny_models: Path,
    family: str,
    prefill_ranks: int,
    decode_ranks: int,
    staging: StagingMode | None,
    pages: tuple[int, int],
    cache: bool,
) -> None:
    """No, all and a part of a prompt is cached on decode, or never anything."""
    sides = Pages(pages[0]), Pages(pages[1])
    product = Product(
        tiny_models / family, prefill_ranks, decode_ranks, sides, staging, setup=Setup(decode_cache=cache)
    )
    prompt = random_tokens(101, 5)
    hits = [(prompt, 0), (prompt, 101), ([*prompt[:70], *random_tokens(9, 6)], 70)]
    for asked, known in hits:
        (served,) = product.serve(asked)
        assert served.decode_cached_len == (known // pages[1] * pages[1] if cache else 0)
    must_stage = staging is not None and is_staged(prefill_ranks, decode_ranks, family, pages)
    assert (product.worker(PREFILL).count("staged_writes") > 0) is must_stage
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()
