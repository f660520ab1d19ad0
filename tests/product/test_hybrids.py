"""Models with recurrent layers through prefill and decode: KV and states arrive together, on any ranks."""

import itertools
from pathlib import Path

import pytest

from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.layout.shard import Shard
from tests.compute.executor.world import random_tokens
from tests.fixtures.tiny_models import VARIANTS
from tests.fixtures.tiny_quantised import write_fp8_blocks
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SIZES = tuple(itertools.product((1, 2), repeat=2))
PATHS = {"direct": None, "staged": StagingMode.ON}
QUICK = {("qwen3_next", 1, 2, "direct"), ("qwen3_5", 1, 1, "direct"), ("qwen3_5_moe", 2, 1, "staged")}
"""The others take minutes."""


def cases() -> list[object]:
    return [
        pytest.param(
            family,
            *sizes,
            PATHS[path],
            marks=() if (family, *sizes, path) in QUICK else pytest.mark.slow,
            id=f"{family}-P{sizes[0]}-D{sizes[1]}-{path}",
        )
        for family, sizes, path in itertools.product(FAMILIES, SIZES, PATHS)
    ]


@pytest.mark.parametrize(("family", "prefill_ranks", "decode_ranks", "staging"), cases())
def test_answers_are_those_of_transformers(
    tiny_models: Path, family: str, prefill_ranks: int, decode_ranks: int, staging: StagingMode | None
) -> None:
    product = Product(tiny_models / family, prefill_ranks, decode_ranks, staging=staging)
    system, long, short = random_tokens(70, 1), random_tokens(53, 2), random_tokens(9, 3)
    (cold,) = product.serve([*system, *long])
    (whole,) = product.serve([*system, *long])
    assert whole.tokens == cold.tokens
    assert whole.decode_cached_len >= 112
    partly, other = product.serve([*system, *short], [*random_tokens(21, 4)])
    assert partly.decode_cached_len == 64
    assert other.decode_cached_len == 0
    (again,) = product.serve([*system, *short])
    assert again.tokens == partly.tokens
    product.serve([*system, *long, *cold.tokens, *random_tokens(30, 5)])  # the next turn
    is_staged = staging is not None and prefill_ranks != decode_ranks
    assert (product.worker(PREFILL).count("staged_writes") > 0) is is_staged
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


@pytest.mark.parametrize("staging", [StagingMode.ON, pytest.param(None, marks=pytest.mark.slow)])
def test_weights_of_8_bits_between_unequal_ranks(tmp_path: Path, staging: StagingMode | None) -> None:
    """More ranks than heads of KV on prefill. transformers computes with what the weights are worth."""
    folder, plain = write_fp8_blocks(VARIANTS["qwen3_5_moe"], tmp_path, (128, 128))
    product = Product(folder, 4, 2, Pages(64), staging, setup=Setup(reference=plain))
    prompt = random_tokens(137, 1)
    (cold,) = product.serve(prompt)
    whole, fork = product.serve(prompt, [*prompt[:70], *random_tokens(21, 2)])
    assert whole.tokens == cold.tokens
    assert (whole.decode_cached_len, fork.decode_cached_len) == (128, 64)
    assert (product.worker(PREFILL).count("staged_writes") > 0) is (staging is not None)
    product.close()


@pytest.mark.parametrize("page_size", [1, 64])
def test_over_page_sizes(tiny_models: Path, page_size: int) -> None:
    product = Product(tiny_models / "qwen3_5", 1, 1, Pages(page_size))
    prompts = [random_tokens(count, count) for count in (1, 64, 65, 131)]
    cold = product.serve(*prompts)
    again = product.serve(*prompts)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in cold]
    product.close()


@pytest.mark.parametrize(
    ("prompt_len", "first_len", "hit_len"), [(128, 0, 0), (128, 64, 64), (128, 128, 128), (129, 128, 128)]
)
def test_the_delta_of_kv_and_one_whole_state_are_sent(
    tiny_models: Path, prompt_len: int, first_len: int, hit_len: int
) -> None:
    """Whatever decode has of the KV, to the byte; beside them what announces them, with the first token in it."""
    product = Product(tiny_models / "qwen3_5", 1, 1)
    prompt = random_tokens(prompt_len, 6)
    if first_len:
        product.serve([*prompt[:first_len], *random_tokens(1, 9)])
    before = product.worker(PREFILL).count("bytes_sent")
    (answer,) = product.serve(prompt)
    assert answer.decode_cached_len == hit_len
    page, state = pool_page_bytes(product.worker(DECODE).config.cache, Shard())
    num_pages = -(-prompt_len // 16) - hit_len // 16
    payload = answer.transferred_bytes - num_pages * page - state
    assert 0 < payload < 200
    assert product.worker(PREFILL).count("bytes_sent") - before == answer.transferred_bytes
    product.close()
