"""Words of several tokens that an answer must not have: none has one, and it is the same however it is computed.

A model without sense draws at temperature 1. The words are pairs and triples that its free answers have. One
undisturbed worker says what is right. Front, engines and executors are those of the product; the world between them is
the simulator's.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.ids import Role
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams
from deltaserve.sim.process import Answer
from tests.compute.executor.world import random_tokens
from tests.product.in_process import DECODE, UNIFIED, Pages, Product, Setup, member_name

MAX_TOKENS, NUM_PROMPTS = 60, 12
PLAIN = Setup(rounding=Rounding.OF_POSITION, context_len=320, max_running=16, num_contexts=16)
Words = tuple[tuple[int, ...], ...]


def replaced(**changes: Any) -> Setup:
    return dataclasses.replace(PLAIN, **changes)


def asked(product: Product, words: Sequence[Words]) -> list[Answer]:
    answers = []
    for number, bad_words in enumerate(words):
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=number, temperature=0.1, bad_words=bad_words)
        answers.append(product.ask(random_tokens(20 + number, number), params))
    return answers


def words_of(tokens: Sequence[int]) -> Words:
    """Pairs and triples from everywhere in an answer, its first tokens among them."""
    return tuple(tuple(tokens[at : at + 2 + at % 2]) for at in range(0, MAX_TOKENS - 3, 5))


def has(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == tuple(word) for at in range(len(tokens)))


def answers_of(product: Product, words: Sequence[Words]) -> list[tuple[int, ...]]:
    answers = asked(product, words)
    product.run_until(answers)
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [tuple(answer.tokens) for answer in answers]


@pytest.fixture
def folder(tiny_models: Path) -> Path:
    return tiny_models / "llama"


@pytest.fixture(scope="module")
def right(tiny_models: Path) -> tuple[list[Words], list[tuple[int, ...]]]:
    """(bad words of each prompt, its answer without them), from one worker that does nothing else."""
    product = Product(tiny_models / "llama", 1, 1, setup=replaced(is_unified=True))
    free = answers_of(product, [()] * NUM_PROMPTS)
    words = [words_of(tokens) for tokens in free]
    bound = answers_of(product, words)
    product.close()
    for bad_words, before, tokens in zip(words, free, bound, strict=True):
        assert all(has(before, word) for word in bad_words)
        assert not any(has(tokens, word) for word in bad_words)
        assert tokens[0] == before[0], "the first token of a word is no word"
        assert len(tokens) == MAX_TOKENS
    return words, bound


def test_prefill_draws_the_first_token_and_decode_the_others(
    right: tuple[list[Words], list[tuple[int, ...]]], folder: Path
) -> None:
    product = Product(folder, 1, 1, setup=PLAIN)
    assert answers_of(product, right[0]) == right[1]
    product.close()


def test_rows_that_give_their_memory_back(right: tuple[list[Words], list[tuple[int, ...]]], folder: Path) -> None:
    product = Product(folder, 1, 1, Pages(4), setup=replaced(num_contexts=1))
    assert answers_of(product, right[0]) == right[1]
    assert product.worker(DECODE).instance.parts.scheduler.running.num_retractions
    product.close()


@pytest.mark.parametrize("is_unified", [True, False])
def test_guesses_at_the_next_tokens(
    right: tuple[list[Words], list[tuple[int, ...]]], folder: Path, is_unified: bool
) -> None:
    roles = (Role.UNIFIED, Role.DECODE)
    product = Product(folder, 1, 1, setup=replaced(is_unified=is_unified, drafting=roles, guesses="NGRAM"))
    assert answers_of(product, right[0]) == right[1]
    totals = product.worker(UNIFIED if is_unified else DECODE).instance.parts.scheduler.steps.speculation.totals
    assert totals.num_verified
    product.close()


def test_a_decode_worker_that_is_killed_in_the_middle(
    right: tuple[list[Words], list[tuple[int, ...]]], folder: Path
) -> None:
    """Its requests go on at the other one, behind what their clients have."""
    product = Product(folder, 1, 1, setup=replaced(num_decode=2))
    answers = asked(product, right[0])
    product.kill_in_the_middle(member_name(0))
    product.run_until(answers)
    assert [tuple(answer.tokens) for answer in answers] == right[1]
    product.close()
