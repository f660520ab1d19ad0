"""Models that keep less than the KV of all tokens, through prefill and decode with reuse: answers of transformers.

Hits at every kind of checkpoint that control/sched/checkpoints.py names; then after evictions of states or windows
alone, of KV alone, and of both. Each launch has several packed requests of odd lengths in it.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup

RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
WINDOWED = ("gemma3_text", "gpt_oss")
PAGE_SIZES = (1, 16, 64)
RANKS = ((1, 1), (1, 2), (2, 1), (2, 2))
CHUNKS = {1: 37, 16: 80, 64: 64}
"""Page size |-> tokens. Prompts are cut anywhere that pages allow."""
ALL = 10_000
EVICTIONS = {"states or windows": (0, ALL), "KV": (ALL, 0), "both": (ALL, ALL), "some of both": (5, 2)}


class Launch(NamedTuple):
    family: str
    page_size: int
    ranks: tuple[int, int]


QUICK = {
    Launch("qwen3_next", 64, (1, 2)),
    Launch("qwen3_5", 16, (1, 1)),
    Launch("qwen3_5_moe", 1, (2, 1)),
    Launch("gemma3_text", 64, (2, 2)),
    Launch("gpt_oss", 1, (1, 2)),
}
"""Every family, page size and pair of ranks. The others take minutes."""
LAUNCHES = [Launch(*row) for row in itertools.product((*RECURRENT, *WINDOWED), PAGE_SIZES, RANKS)]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(
            launch,
            id=f"{launch.family}-page{launch.page_size}-P{launch.ranks[0]}-D{launch.ranks[1]}",
            marks=() if launch in QUICK else pytest.mark.slow,
        )
        for launch in LAUNCHES
    ],
)
def test_hits_at_every_kind_of_checkpoint(tiny_models: Path, launch: Launch) -> None:
    setup = Setup(chunk_len=CHUNKS[launch.page_size], context_len=320)
    product = Product(tiny_models / launch.family, *launch.ranks, Pages(launch.page_size), setup=setup)
    system = random_tokens(140, 1)
    first, second, third = ([*system, *random_tokens(length, length)] for length in (61, 21, 33))
    (cold,) = product.serve(first, max_tokens=12)
    equal, fork, other = product.serve(first, second, random_tokens(37, 5), max_tokens=12)
    assert equal.tokens == cold.tokens
    (at_fork,) = product.serve(third, max_tokens=12)
    assert other.prefill_cached_len == cold.prefill_cached_len == 0
    if launch.family in RECURRENT:  # the grid is of 64 tokens
        assert [answer.prefill_cached_len for answer in (equal, fork, at_fork)] == [192, 0, 128]
    assert equal.decode_cached_len == 201 // launch.page_size * launch.page_size
    turn = [*first, *cold.tokens, *random_tokens(7, 6)]
    (next_turn,) = product.serve(turn)
    assert next_turn.prefill_cached_len > 0
    for evicted in EVICTIONS.values():
        for name in (PREFILL, DECODE):
            product.worker(name).instance.parts.cache.evict(evicted)
        again, at_fork_again = product.serve(first, third, max_tokens=12)
        assert (again.tokens, at_fork_again.tokens) == (cold.tokens, at_fork.tokens)
    product.close()


def test_hits_at_checkpoints_of_an_interval(tiny_models: Path) -> None:
    """Where nobody parted yet."""
    setup = Setup(chunk_len=96, context_len=320, state_interval_len=64)
    product = Product(tiny_models / "qwen3_5", 1, 1, setup=setup)
    system = random_tokens(140, 1)
    product.serve([*system, *random_tokens(61, 2)])
    (hit,) = product.serve([*system, *random_tokens(23, 3)])
    assert hit.prefill_cached_len == 128
    product.close()


@pytest.mark.parametrize(
    "family", [RECURRENT[1], *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT[::2])]
)
def test_decode_goes_on_from_the_end_of_an_answer(tiny_models: Path, family: str) -> None:
    """It computes the little that is new itself: the only one that has that state."""
    setup = Setup(context_len=320, decode_extend_len=64, conditional_prefill=True)
    product = Product(tiny_models / family, 1, 1, setup=setup)
    prompt = random_tokens(101, 1)
    (cold,) = product.serve(prompt, max_tokens=30)
    sent = product.worker(PREFILL).count("bytes_sent")
    (turn,) = product.serve([*prompt, *cold.tokens, *random_tokens(5, 2)], max_tokens=12)
    assert turn.decode_cached_len == 128
    assert product.worker(PREFILL).count("bytes_sent") == sent
    product.close()
