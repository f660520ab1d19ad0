"""Draft heads through prefill and decode: answers are those without guesses, and as many are right as on one worker."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.ids import Namespace, Role
from deltaserve.core.keys import extend_keys
from deltaserve.core.tokens import pack_u32
from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.fixtures.tiny_models import EAGLE3_HEAD, EAGLE3_MODEL
from tests.product.in_process import DECODE, UNIFIED, Pages, Product, Setup, accepted_per_round

BOTH = (Role.PREFILL, Role.DECODE)
HEADS = ("deepseek_v3_mtp", EAGLE3_HEAD, "qwen3_next_mtp", "qwen3_5_mtp", "qwen3_5_moe_mtp")
QUICK = {("deepseek_v3_mtp", 1, False), ("deepseek_v3_mtp", 64, True), (EAGLE3_HEAD, 16, True)}
"""Head, page size, decode's cache. The others take minutes."""
QUICK_HEADS = {name for name, *_ in QUICK}
ALIKE = ("qwen3_next_mtp", "qwen3_5_mtp")
"""Heads of hybrid models, as that of qwen3_5_moe is."""


def is_alike(name: str, *_: object) -> bool:
    return name in ALIKE


def drafting(tiny_models: Path, name: str, **fields: object) -> tuple[Path, Setup]:
    setup = Setup(drafting=BOTH, **fields)  # type: ignore[arg-type]
    if name == EAGLE3_HEAD:
        return tiny_models / EAGLE3_MODEL, replace(setup, draft_folder=tiny_models / EAGLE3_HEAD)
    return tiny_models / name, setup


@pytest.mark.parametrize(
    ("name", "page_size", "decode_cache"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((name, page, cache) for name in HEADS for page in (1, 16, 64) for cache in (False, True))
    ],
)
def test_answers_are_those_without_guesses(tiny_models: Path, name: str, page_size: int, decode_cache: bool) -> None:
    """Hits of nothing, of all of a prompt, of a part; the next turn of a conversation."""
    path, setup = drafting(tiny_models, name, decode_cache=decode_cache)
    product = Product(path, 1, 1, Pages(page_size), setup=setup)
    system, long, short = random_tokens(70, 1), random_tokens(58, 2), random_tokens(9, 3)
    (cold,) = product.serve([*system, *long], max_tokens=16)
    (whole,) = product.serve([*system, *long], max_tokens=16)
    assert whole.tokens == cold.tokens
    partly, other = product.serve([*system, *short], random_tokens(21, 4), max_tokens=16)
    (again,) = product.serve([*system, *short], max_tokens=16)
    assert again.tokens == partly.tokens
    (turn,) = product.serve([*system, *long, *cold.tokens, *random_tokens(30, 5)], max_tokens=16)
    assert ({answer.decode_cached_len for answer in (whole, partly, again, turn)} == {0}) is not decode_cache
    assert accepted_per_round([cold, whole, partly, other, again, turn]) > 0.1
    product.close()


@pytest.mark.parametrize(
    ("name", "prefill_ranks", "decode_ranks", "staging"),
    cells(((name, *sides) for name in HEADS for sides in ((2, 1, StagingMode.ON), (1, 2, None))), is_alike),
)
def test_between_ranks(
    tiny_models: Path, name: str, prefill_ranks: int, decode_ranks: int, staging: StagingMode | None
) -> None:
    path, setup = drafting(tiny_models, name)
    product = Product(path, prefill_ranks, decode_ranks, staging=staging, setup=setup)
    answers = product.serve(random_tokens(70, 1), random_tokens(21, 4), max_tokens=16)
    assert accepted_per_round(answers) > 0.1
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


def test_between_page_sizes(tiny_models: Path) -> None:
    path, setup = drafting(tiny_models, "deepseek_v3_mtp")
    product = Product(path, 1, 1, (Pages(16), Pages(64)), staging=StagingMode.ON, setup=setup)
    assert accepted_per_round(product.serve(random_tokens(150, 1), max_tokens=16)) > 0.1
    product.close()


def counted(path: Path, setup: Setup) -> float:
    """Accepted per round over prompts that no cache holds."""
    product = Product(path, 1, 1, setup=setup)
    answers = product.serve(*(random_tokens(40 + 7 * seed, seed) for seed in range(10)), max_tokens=96)
    product.close()
    return accepted_per_round(answers)


@pytest.mark.parametrize("name", cells(((name,) for name in HEADS), lambda name: name not in QUICK_HEADS))
def test_as_many_guesses_are_right_as_on_one_worker(tiny_models: Path, name: str) -> None:
    """With the head's pages and the last hidden state. Where prefill has no head fewer are, and answers the same."""
    path, setup = drafting(tiny_models, name)
    together = counted(path, replace(setup, drafting=(Role.UNIFIED,), is_unified=True))
    apart = counted(path, setup)
    without = counted(path, replace(setup, drafting=(Role.DECODE,)))
    print(f"{name}: accepted per round {together:.2f} on one worker, {apart:.2f} apart, {without:.2f} none on prefill")
    assert apart == pytest.approx(together, rel=0.02)
    assert without > 0.0


def kept_of(path: Path, setup: Setup, prompt: list[int]) -> Tensor:
    """What the head of the worker that decodes keeps of a prompt's full pages: [pages, elements]."""
    product = Product(path, 1, 1, setup=setup)
    product.serve(prompt, max_tokens=2)
    product.settle()
    worker = product.worker(UNIFIED if setup.is_unified else DECODE)
    cache, tokens = worker.instance.parts.cache, pack_u32(prompt)
    keys = extend_keys(worker.config.seed_of(Namespace("")), tokens, cache.page_size)
    lease = cache.lease_kv(cache.match(Namespace(""), tokens, keys), len(prompt))
    (executor,) = worker.computing.executors
    (arena,) = (
        arena for arena in executor.memory.kv.arenas if arena.layout.group.name == worker.config.cache.draft_group
    )
    kept = arena.bytes.view(arena.num_pages, -1)[list(lease.pages(0))].view(torch.float32)
    cache.release(lease)
    product.close()
    return kept


@pytest.mark.parametrize("name", cells(((name,) for name in HEADS), is_alike))
def test_a_head_keeps_of_a_prompt_what_it_does_on_one_worker(tiny_models: Path, name: str) -> None:
    """Decode has what prefill's head computed, page by page. Where prefill has no head, decode's pages lack it."""
    path, setup = drafting(tiny_models, name)
    prompt = random_tokens(70, 1)
    together = kept_of(path, replace(setup, drafting=(Role.UNIFIED,), is_unified=True), prompt)
    apart = kept_of(path, setup, prompt)
    without = kept_of(path, replace(setup, drafting=(Role.DECODE,)), prompt)
    assert together.shape == apart.shape == without.shape
    assert len(together) == len(prompt) // 16
    assert together.abs().amax(dim=1).min() > 0.01
    torch.testing.assert_close(apart, together, rtol=1e-3, atol=1e-4)
    assert (without - together).abs().amax(dim=1).min() > 0.01, "what this compares depends on what was sent"


@pytest.mark.parametrize(
    ("name", "roles"), cells(itertools.product(HEADS, [(Role.PREFILL,), (Role.DECODE,)]), is_alike)
)
def test_only_one_side_has_a_head(tiny_models: Path, name: str, roles: tuple[Role, ...]) -> None:
    path, setup = drafting(tiny_models, name)
    product = Product(path, 1, 1, setup=replace(setup, drafting=roles))
    prompts = random_tokens(70, 1), random_tokens(21, 4)
    cold = product.serve(*prompts, max_tokens=16)
    again = product.serve(*prompts, max_tokens=16)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in cold]
    unsent = product.worker(DECODE).instance.metrics()["deltaserve_unsent_draft_tokens_total"]
    cached = sum(answer.decode_cached_len for answer in again)
    assert unsent == (2 * 91 - cached if roles == (Role.DECODE,) else 0)
    assert (sum(answer.num_rounds for answer in cold) > 0) is (roles == (Role.DECODE,))
    product.close()


@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "qwen3_next_mtp"])
def test_rows_that_give_their_memory_back(tiny_models: Path, name: str) -> None:
    """The youngest rows are retracted between rounds, and resume from what the tree and prefill have."""
    path, setup = drafting(tiny_models, name, num_contexts=1, decode_extend_len=64)
    product = Product(path, 1, 1, setup=setup)
    answers = product.serve(*(random_tokens(50 + seed, seed) for seed in range(4)), max_tokens=64)
    assert accepted_per_round(answers) > 0.1
    assert product.worker(DECODE).instance.metrics()["deltaserve_retractions_total"] > 0
    product.close()
