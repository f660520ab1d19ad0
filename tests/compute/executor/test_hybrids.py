"""Models with recurrent layers: where requests go on from, what they leave, and that a wrong state is seen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.compute.memory.state_arena import StateArena
from deltaserve.core.layout.dtype import DType
from tests.compute.executor.world import (
    Driver,
    RankDriver,
    assert_same,
    check_generation,
    distribution,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("name", [*HYBRIDS, "qwen3_5_text"])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (64, 64)])
def test_generation_over_page_sizes(tiny_models: Path, name: str, page_size: int, split_tokens: int) -> None:
    check_generation(Driver(tiny_models / name, page_size, split_tokens), tiny_models / name)


def state_arenas(driver: Driver) -> tuple[StateArena, ...]:
    ranks = driver.ranks if isinstance(driver, RankDriver) else [driver.executor]
    return tuple(arena for rank in ranks for arena in rank.memory.kv.state_arenas)


def with_ranks(folder: Path, tp_size: int) -> Driver:
    return Driver(folder) if tp_size == 1 else RankDriver(folder, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
def test_several_requests_go_on_from_one_checkpoint(tiny_models: Path, name: str, tp_size: int) -> None:
    """None of them writes it, and what lies in slots that nobody has written is not read."""
    path = tiny_models / name
    driver = with_ranks(path, tp_size)
    for arena in state_arenas(driver):
        arena.bytes.fill_(0xFF)  # NaN
    first = random_tokens(130, 6)
    driver.open(0, first)
    driver.step([extend(0, first, 0, 64)])
    driver.step([extend(0, first, 64, 130)])
    prompts = {row: first[:64] + random_tokens(length, row) for row, length in ((1, 1), (2, 20), (3, 77))}
    for row, prompt in prompts.items():
        driver.open(row, prompt, prefix_of=0, prefix_len=64)
    items = driver.step([extend(row, prompt, 64, len(prompt)) for row, prompt in prompts.items()]).items
    for item, prompt in zip(items, prompts.values(), strict=True):
        want = reference_logprobs(path, prompt)
        assert_same(drawn_distribution(item), want[-1])
        if item.prompt_logprobs:
            got = torch.stack([distribution(logprobs) for logprobs in item.prompt_logprobs])
            assert_same(got, want[64:-1])
    (again,) = driver.step([extend(0, [*first, 7], 130, 131)]).items
    assert_same(drawn_distribution(again), reference_logprobs(path, [*first, 7])[-1])


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text"])
def test_only_the_last_token_of_a_prompt_is_computed_to_the_end(tiny_models: Path, name: str) -> None:
    """The last layer is one of attention, or a recurrent one: then all its tokens change its states."""
    path, prompt = tiny_models / name, random_tokens(300, 4)
    driver = Driver(path)
    driver.open(0, prompt, capacity=320)
    driver.step([replace(extend(0, prompt, 0, 150), wants_prompt_logprobs=False)])
    (item,) = driver.step([replace(extend(0, prompt, 150, 300), wants_prompt_logprobs=False)]).items
    assert_same(drawn_distribution(item), reference_logprobs(path, prompt)[-1])
    (item,) = driver.step([extend(0, [*prompt, 9], 300, 301)]).items
    assert_same(drawn_distribution(item), reference_logprobs(path, [*prompt, 9])[-1])


def next_token(driver: Driver, prompt: list[int], row: int) -> Tensor:
    """[V] after the prompt's last token, which is computed alone."""
    driver.open(row, prompt)
    driver.step([extend(row, prompt, 0, len(prompt) - 1, samples=False)])
    (item,) = driver.step([extend(row, prompt, len(prompt) - 1, len(prompt))]).items
    return drawn_distribution(item)


@pytest.mark.parametrize("group", ["conv", "ssm"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_that_is_lost_changes_every_distribution(tiny_models: Path, name: str, group: str) -> None:
    """By far more than what is told apart from noise: 2e-3."""
    driver, prompt = Driver(tiny_models / name), random_tokens(100, 8)
    good = next_token(driver, prompt, 0)
    driver.open(1, prompt)
    driver.step([extend(1, prompt, 0, 99, samples=False)])
    (arena,) = [arena for arena in state_arenas(driver) if arena.layout.group.name == group]
    slot, size = driver.pages[1][98 // 16], arena.page_bytes
    arena.bytes[slot * size : (slot + 1) * size] = 0
    (item,) = driver.step([extend(1, prompt, 99, 100)]).items
    assert (drawn_distribution(item) - good).abs().max() > 0.1


class HalfStates(Driver):
    state_dtype = DType.BFLOAT16


def test_states_in_16_bits_stay_close(tiny_models: Path) -> None:
    path, prompt = tiny_models / "qwen3_5", random_tokens(150, 9)
    driver = HalfStates(path)
    assert [arena.layout.group.dtype for arena in state_arenas(driver)] == [DType.FLOAT32, DType.BFLOAT16]
    got = next_token(driver, prompt, 0)
    want = reference_logprobs(path, prompt)[-1]
    assert_same(got, want, 0.3)
    assert (got - want).abs().max() > 0


def test_weights_in_16_bits_stay_close(tiny_models: Path) -> None:
    path, prompt = tiny_models / "qwen3_5", random_tokens(150, 9)
    got = next_token(Driver(path, dtype=DType.BFLOAT16), prompt, 0)
    assert_same(got, reference_logprobs(path, prompt)[-1], 1.0)
