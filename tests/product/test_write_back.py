"""Answers that return to prefill: its tree reaches as far as decode's, and what it computes there is transformers'."""

from itertools import product
from pathlib import Path

import pytest

from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.ids import Role
from deltaserve.core.layout.dtype import DType
from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup

ANSWER_LEN = 70
NEW_LEN = 21


RANKS, SIZES = ((1, 1), (2, 1), (1, 2)), ((16, 16), (4, 16), (16, 4))
OF_LLAMA = [("llama", ranks, sizes) for ranks, sizes in product(RANKS, SIZES)]
OF_MOE = [("qwen3_moe", ranks, sizes) for ranks, sizes in product(RANKS, SIZES)]
"""Experts change nothing of what returns, nor of how."""
OF_RANKS = {("gemma3_text", (2, 1)), ("qwen3_next", (1, 2)), ("llama", (2, 1)), ("llama", (1, 2))}
"""Families with unequal ranks: windows, states and all keys and values are cut alike whoever computes them."""


def is_of_one_side(family: str, ranks: tuple[int, int]) -> bool:
    """Whether it is the family with other ranks than one that `make test` runs."""
    return ranks != (1, 1) and (family, ranks) not in OF_RANKS


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    cells([*OF_LLAMA, *OF_MOE], lambda *case: case in OF_MOE[1:]),
)
def test_the_next_turn_is_computed_from_what_came_back(
    tiny_models: Path, family: str, ranks: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """Prefill computes what is new of a turn, and at most a page and the last token more."""
    pages = Pages(sizes[0]), Pages(sizes[1])
    product = Product(tiny_models / family, *ranks, pages, setup=Setup(context_len=400, writes_back=True))
    turn = random_tokens(60, 1)
    for index in range(3):
        (answer,) = product.serve(turn, max_tokens=ANSWER_LEN)
        computed = len(turn) - answer.prefill_cached_len
        if index:
            assert computed <= NEW_LEN + max(sizes) + 1
        product.settle()
        turn = [*turn, *answer.tokens, *random_tokens(NEW_LEN, index)]
    assert product.metrics(DECODE)["deltaserve_write_backs_sent_total"] == 3
    assert product.metrics(PREFILL)["deltaserve_write_back_bytes_total"] > 0
    product.close()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=lambda ranks: f"P{ranks[0]}-D{ranks[1]}")
def test_by_way_of_staging_memory(tiny_models: Path, ranks: tuple[int, int]) -> None:
    setup = Setup(context_len=400, writes_back=True)
    product = Product(tiny_models / "llama", *ranks, Pages(16), StagingMode.ON, setup=setup)
    turn = random_tokens(60, 1)
    (answer,) = product.serve(turn, max_tokens=ANSWER_LEN)
    product.settle()
    assert product.metrics(PREFILL)["deltaserve_write_back_pages_total"] == (60 + ANSWER_LEN - 1) // 16 - 60 // 16
    assert product.metrics(DECODE)["deltaserve_staged_writes_total"] > 0
    (answer,) = product.serve([*turn, *answer.tokens, 7], max_tokens=4)
    assert answer.prefill_cached_len == (60 + ANSWER_LEN - 1) // 16 * 16
    product.close()


def test_only_the_answer_returns(tiny_models: Path) -> None:
    """What prefill has computed itself does not come back to it."""
    product = Product(tiny_models / "llama", 1, 1, Pages(16), setup=Setup(context_len=400, writes_back=True))
    product.serve(random_tokens(160, 1), max_tokens=33)
    product.settle()
    assert product.metrics(PREFILL)["deltaserve_write_back_pages_total"] == (160 + 33 - 1) // 16 - 160 // 16
    product.serve(random_tokens(160, 1), max_tokens=3)
    product.settle()
    assert product.metrics(DECODE)["deltaserve_write_backs_told_total"] == 1, "no page of it was closed"
    product.close()


def test_a_turn_that_decode_computed_returns_whole(tiny_models: Path) -> None:
    """Where decode computes what is new itself prefill has nothing of it, and still the next turn's prefix."""
    setup = Setup(context_len=400, writes_back=True, conditional_prefill=True, decode_extend_len=64)
    product = Product(tiny_models / "llama", 1, 1, Pages(4), setup=setup)
    turn = random_tokens(120, 1)
    for index in range(3):
        (answer,) = product.serve(turn, max_tokens=10)
        product.settle()
        turn = [*turn, *answer.tokens, *random_tokens(4, index)]
    assert product.metrics(DECODE)["deltaserve_conditional_prefills_total"] == 2
    product.worker(DECODE).instance.parts.cache.clear()
    (answer,) = product.serve(turn, max_tokens=3)
    assert answer.prefill_cached_len >= len(turn) - 4 - 4 - 1
    product.close()


@pytest.mark.parametrize(
    ("family", "ranks"), cells(product(("gemma3_text", "gpt_oss", "qwen3_next"), RANKS), is_of_one_side)
)
def test_windows_and_states_return_as_far_as_they_are_needed(
    tiny_models: Path, family: str, ranks: tuple[int, int]
) -> None:
    """Prefill goes on at an end that only decode has reached, from the windows or the state that came with it. States
    are kept every 64 tokens."""
    product = Product(tiny_models / family, *ranks, Pages(16), setup=Setup(context_len=400, writes_back=True))
    turn = random_tokens(60, 1)
    for index in range(3):
        (answer,) = product.serve(turn, max_tokens=ANSWER_LEN)
        computed = len(turn) - answer.prefill_cached_len
        if index:
            assert computed <= NEW_LEN + (64 if family == "qwen3_next" else 16) + 1
        product.settle()
        turn = [*turn, *answer.tokens, *random_tokens(NEW_LEN, index)]
    assert product.metrics(DECODE)["deltaserve_write_backs_sent_total"] == 3
    product.close()


def test_rounded_elements_stay(tiny_models: Path) -> None:
    """Prefill's tree serves others, which may keep more of each element than this decode worker."""
    pages = Pages(16, DType.FLOAT32), Pages(16, DType.BFLOAT16)
    setup = Setup(context_len=400, writes_back=True)
    product = Product(tiny_models / "llama", 1, 1, pages, StagingMode.ON, tolerance=0.1, setup=setup)
    product.serve(random_tokens(60, 1), max_tokens=40)
    product.settle()
    assert not product.metrics(DECODE)["deltaserve_write_backs_told_total"]
    product.close()


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.DECODE,), (Role.PREFILL,)], ids=str)
def test_beside_draft_heads(tiny_models: Path, roles: tuple[Role, ...]) -> None:
    """What a head of prefill keeps comes back with the answer, or the answer does not."""
    setup = Setup(context_len=400, writes_back=True, drafting=roles)
    product = Product(tiny_models / "deepseek_v3_mtp", 1, 1, Pages(16), setup=setup)
    turn = random_tokens(60, 1)
    (answer,) = product.serve(turn, max_tokens=ANSWER_LEN)
    product.settle()
    comes_back = roles != (Role.PREFILL,)
    assert product.metrics(DECODE)["deltaserve_write_backs_sent_total"] == comes_back
    (then,) = product.serve([*turn, *answer.tokens, *random_tokens(NEW_LEN, 2)], max_tokens=40)
    assert then.prefill_cached_len == ((60 + ANSWER_LEN - 1) if comes_back else 60) // 16 * 16
    product.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    cells(product(("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"), RANKS), is_of_one_side),
)
def test_prefill_pulls_what_only_decode_has(tiny_models: Path, family: str, ranks: tuple[int, int]) -> None:
    """Its own tree is empty, and it computes what is new, behind keys and values, windows and states of decode."""
    product = Product(tiny_models / family, *ranks, Pages(16), setup=Setup(context_len=400, writes_back=True))
    check_pull(product, most_behind=64 if family == "qwen3_next" else 16)


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)], ids=lambda sizes: f"page{sizes[0]}-page{sizes[1]}")
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=lambda ranks: f"P{ranks[0]}-D{ranks[1]}")
def test_pages_of_other_sizes_are_pulled(tiny_models: Path, sizes: tuple[int, int], ranks: tuple[int, int]) -> None:
    pages = Pages(sizes[0]), Pages(sizes[1])
    product = Product(tiny_models / "llama", *ranks, pages, setup=Setup(context_len=400, writes_back=True))
    check_pull(product, most_behind=16)


def check_pull(product: Product, most_behind: int) -> None:
    """`most_behind`: tokens that are computed again at most, as they fill no page or are behind a kept state."""
    turn = random_tokens(130, 1)
    (answer,) = product.serve(turn, max_tokens=ANSWER_LEN)
    product.settle()
    for index in range(2):
        product.worker(PREFILL).instance.parts.cache.clear()
        turn = [*turn, *answer.tokens, *random_tokens(NEW_LEN, index)]
        (answer,) = product.serve(turn, max_tokens=4)
        product.settle()
        assert len(turn) - answer.prefill_cached_len <= NEW_LEN + most_behind + 1
    assert product.metrics(PREFILL)["deltaserve_pulls_total"] == 2
    product.close()
