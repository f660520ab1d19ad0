"""What was evicted comes back from a file: with it a prompt is computed as transformers does, for every family."""

from pathlib import Path

import pytest

from deltaserve.core.layout.dtype import DType
from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup

CONTEXT_LEN = 208
PROMPTS = [random_tokens(150 + index, seed=index) for index in range(4)]
"""No two of them fit into a worker's memory beside a request that runs."""
NEW_LEN = 5
LOADED = "deltaserve_tier_tokens_loaded_total"


def setup_of(folder: Path, writes_back: bool = False) -> Setup:
    return Setup(context_len=CONTEXT_LEN, num_contexts=2, max_running=1, cache_folder=folder, writes_back=writes_back)


def serve_in_turn(product: Product, tail: int) -> list[int]:
    """Every prompt with new tokens behind it; how many tokens of each prefill had to compute."""
    computed = []
    for prompt in PROMPTS:
        (answer,) = product.serve([*prompt, *random_tokens(NEW_LEN, tail)])
        product.settle()
        computed.append(len(prompt) + NEW_LEN - answer.prefill_cached_len)
    return computed


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=lambda ranks: f"P{ranks[0]}-D{ranks[1]}")
def test_what_was_evicted_is_read_and_not_computed(
    tiny_models: Path, tmp_path: Path, family: str, ranks: tuple[int, int]
) -> None:
    """Computed is what is new, and at most a page more; of Qwen3-Next, of which states are kept every 64 tokens, that
    and less than 64."""
    product = Product(tiny_models / family, *ranks, Pages(16), setup=setup_of(tmp_path))
    first, second = serve_in_turn(product, 10), serve_in_turn(product, 20)
    assert sum(first) > sum(map(len, PROMPTS))
    assert max(second) <= NEW_LEN + 16 + (64 if family == "qwen3_next" else 0)
    for name in (PREFILL, DECODE):
        metrics = product.metrics(name)
        assert metrics[LOADED] > 0
        assert metrics["deltaserve_tier_failures_total"] == 0
    product.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)], ids=lambda sizes: f"page{sizes[0]}-page{sizes[1]}")
def test_pages_of_unequal_sizes(tiny_models: Path, tmp_path: Path, family: str, sizes: tuple[int, int]) -> None:
    pages = Pages(sizes[0]), Pages(sizes[1])
    product = Product(tiny_models / family, 1, 1, pages, setup=setup_of(tmp_path))
    serve_in_turn(product, 10)
    assert max(serve_in_turn(product, 20)) <= NEW_LEN + sizes[0]
    assert product.metrics(DECODE)[LOADED] > 0
    product.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_elements_of_two_bytes(tiny_models: Path, tmp_path: Path, family: str) -> None:
    pages = Pages(16, DType.BFLOAT16)
    product = Product(tiny_models / family, 1, 1, pages, tolerance=0.2, setup=setup_of(tmp_path))
    serve_in_turn(product, 10)
    assert max(serve_in_turn(product, 20)) <= NEW_LEN + 16
    product.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_answers_that_returned_come_back_too(tiny_models: Path, tmp_path: Path, family: str) -> None:
    """What decode wrote back is in the file under prefill's tree as all else is."""
    product = Product(tiny_models / family, 1, 1, Pages(16), setup=setup_of(tmp_path, writes_back=True))
    (answer,) = product.serve(turn := PROMPTS[0][:80], max_tokens=70)
    product.settle()
    serve_in_turn(product, 10)
    (then,) = product.serve([*turn, *answer.tokens, *random_tokens(NEW_LEN, 30)])
    assert len(turn) + 70 + NEW_LEN - then.prefill_cached_len <= NEW_LEN + 17 + (64 if family == "qwen3_next" else 0)
    product.close()
