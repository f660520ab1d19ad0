"""What was evicted comes back from a file: with it a prompt is computed as transformers does, for every family."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from deltaserve.core.ids import Role
from deltaserve.core.layout.dtype import DType
from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup, accepted_per_round

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


FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3")
OF_RANKS = {
    ("llama", (2, 1)),
    ("llama", (1, 2)),
    ("gemma3_text", (2, 1)),
    ("qwen3_next", (1, 2)),
    ("deepseek_v3", (2, 1)),
}
"""Families with unequal ranks: of each kind of what is kept."""


@pytest.mark.parametrize(
    ("family", "ranks"),
    cells(
        product(FAMILIES, ((1, 1), (2, 1), (1, 2))),
        lambda family, ranks: ranks != (1, 1) and (family, ranks) not in OF_RANKS,
    ),
)
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


@pytest.mark.parametrize(
    ("family", "sizes"),
    cells(product(("llama", "qwen3_moe"), ((4, 16), (16, 4))), lambda family, _: family == "qwen3_moe"),
)
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


@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "qwen3_next_mtp"])
def test_what_a_draft_head_keeps_comes_back_with_its_pages(tiny_models: Path, tmp_path: Path, name: str) -> None:
    """As many guesses are right behind prompts that were read from the file as behind those that stayed in memory."""
    roles = (Role.PREFILL, Role.DECODE)
    prompts = [[*prompt, *random_tokens(NEW_LEN, 20)] for prompt in PROMPTS]
    counted = []
    for setup in (setup_of(tmp_path), Setup(context_len=CONTEXT_LEN, num_contexts=6, max_running=1)):
        product = Product(tiny_models / name, 1, 1, Pages(16), setup=replace(setup, drafting=roles))
        serve_in_turn(product, 10)
        answers = [product.serve(prompt, max_tokens=40)[0] for prompt in prompts]
        assert sum(answer.prefill_cached_len + answer.decode_cached_len for answer in answers) > sum(map(len, PROMPTS))
        counted.append(accepted_per_round(answers))
        metrics = product.metrics(DECODE)
        product.close()
        if setup.cache_folder is not None:
            assert metrics[LOADED] > 0
            assert metrics["deltaserve_tier_failures_total"] == 0
    assert counted[0] == pytest.approx(counted[1], rel=0.02)
    assert counted[0] > 0.1


def test_pages_that_the_head_has_yet_to_fill_are_not_in_the_file(tiny_models: Path, tmp_path: Path) -> None:
    """Prefill has no head: decode fills the pages of a prompt after they have come."""
    setup = replace(setup_of(tmp_path), drafting=(Role.DECODE,))
    product = Product(tiny_models / "deepseek_v3_mtp", 1, 1, Pages(16), setup=setup)
    prompt = PROMPTS[0][:96]
    (answer,) = product.serve(prompt, max_tokens=40)
    product.settle()
    metrics = product.metrics(DECODE)
    assert metrics["deltaserve_tier_pages_stored_total"] == (96 + 40 - 1) // 16 - 96 // 16
    assert metrics["deltaserve_unsent_draft_tokens_total"] == len(prompt)
    assert answer.num_rounds > 0
    product.close()
