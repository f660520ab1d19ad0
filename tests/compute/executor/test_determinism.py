"""Rounding.OF_POSITION (--enable-deterministic-inference): the bits of a position follow from what comes before it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.rounding import Rounding
from tests.compute.executor.world import Driver, distribution, drawn_distribution, extend, random_tokens
from tests.compute.native.native_build import compiled_library

PROMPT = random_tokens(150, 1)
ONE_BY_ONE = tuple(range(151))
CUTS = ((0, 150), (0, 16, 33, 150), (0, 5, 6, 104, 149, 150), ONE_BY_ONE)


class DeterministicDriver(Driver):
    rounding = Rounding.OF_POSITION


class TorchDriver(DeterministicDriver):
    attention = "torch"


def distributions(driver: Driver, cuts: Sequence[int], others: Sequence[int] = ()) -> Tensor:
    """[150, V]: of the prompt's positions, computed in such chunks, each beside a chunk of so many positions."""
    row = driver.steps + 1
    driver.open(row % 32, PROMPT)
    found = []
    for step, end in enumerate(cuts[1:]):
        items = [extend(row % 32, PROMPT, cuts[step], end)]
        for index, length in enumerate(others if step == 0 else ()):
            other = random_tokens(length, index)
            driver.open((row + 1 + index) % 32, other)
            items.append(extend((row + 1 + index) % 32, other, 0, length))
        (result, *_) = driver.step(items).items
        found += [distribution(logprobs) for logprobs in result.prompt_logprobs]
    return torch.stack([*found, drawn_distribution(result)])


@pytest.mark.parametrize("name", ["llama", "llama_bf16", "llama_bias_mha", "qwen3", "gemma3_text_scaled"])
def test_chunks_and_company_change_no_bit(tiny_models: Path, name: str) -> None:
    compiled_library()
    want = distributions(DeterministicDriver(tiny_models / name), CUTS[0])
    for cuts in CUTS:
        assert torch.equal(distributions(DeterministicDriver(tiny_models / name), cuts), want)
    beside = distributions(DeterministicDriver(tiny_models / name, num_pages=96), CUTS[1], others=(70, 3, 200))
    assert torch.equal(beside, want)


class RoundedStatesDriver(DeterministicDriver):
    state_dtype = DType.BFLOAT16


@pytest.mark.parametrize(
    ("make", "kv_dtype"), [(RoundedStatesDriver, DType.FLOAT32), (DeterministicDriver, DType.FP8_E4M3)]
)
def test_states_that_the_end_of_a_step_rounds_are_refused(
    tiny_models: Path, make: type[Driver], kv_dtype: DType
) -> None:
    compiled_library()
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: a step's end rounds the states"):
        make(tiny_models / "qwen3_next", kv_dtype=kv_dtype)


def test_without_the_native_library_it_is_refused(tiny_models: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-deterministic-inference: only the native library rounds so"):
        TorchDriver(tiny_models / "llama")
