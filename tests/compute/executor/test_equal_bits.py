"""What a request is told has equal bits alone and in any company: every family, on every backend of a CPU.

And, with Rounding.OF_POSITION (--enable-deterministic-inference), whatever was cached and however its prompt was cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.control.sched.plan import PlanItem, StepResult
from deltaserve.core.layout.dtype import DType
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams
from tests.cells import cells
from tests.compute.executor.world import Driver, distribution, drawn_distribution, extend, random_tokens
from tests.compute.native.native_build import compiled_library
from tests.fixtures.families import FAMILIES

PROMPT = random_tokens(75, 1)
CUT = 32
"""Where the prompt is cut in the runs that find its beginning cached."""
NUM_DECODE = 5
OTHERS = (3, 70, 17, 40, 9, 1, 33, 20, 2, 64, 12)
"""Lengths of the prompts of eleven others."""
OF_OTHERS = (
    SamplingParams(max_tokens=1, seed=7, temperature=0.9, top_p=0.95),
    SamplingParams(max_tokens=1, seed=0, temperature=0.0),
)


def native_driver(path: Path, dtype: DType, rounding: Rounding) -> Driver:
    compiled_library()
    return _driver("native", rounding)(path, dtype=dtype, num_pages=160)


def torch_driver(path: Path, dtype: DType, rounding: Rounding) -> Driver:
    return _driver("torch", rounding)(path, dtype=dtype, num_pages=160)


def _driver(choice: str, how: Rounding) -> type[Driver]:
    class Made(Driver):
        attention = choice
        rounding = how

    return Made


MakeDriver = Callable[[Path, DType, Rounding], Driver]
BACKENDS = {"native": native_driver, "torch": torch_driver}


@dataclass
class Asked:
    """The request at row 0, and what it was told."""

    driver: Driver
    told: list[Tensor] = field(default_factory=list)

    def keep(self, result: StepResult) -> None:
        (mine,) = [item for item in result.items if item.row == 0]
        self.told += [distribution(logprobs) for logprobs in mine.prompt_logprobs]
        if mine.drawn:
            self.told.append(drawn_distribution(mine))

    def step(self, items: Sequence[PlanItem]) -> None:
        self.keep(self.driver.step(items))


def alone(driver: Driver, cuts: Sequence[int]) -> Tensor:
    """[told, V]: what it is told when nothing else is computed."""
    return _answer(driver, cuts, lambda items, _: items)


def in_company(driver: Driver, cuts: Sequence[int], in_turn: Callable[[list[PlanItem]], list[PlanItem]]) -> Tensor:
    """The same beside eleven others, whose prompts come with its own and who go on beside it."""
    prompts = {row: random_tokens(length, 100 + row) for row, length in enumerate(OTHERS, start=1)}
    for row, prompt in prompts.items():
        driver.open(row, prompt, OF_OTHERS[row % 2], capacity=128)
    begun: dict[int, int] = {}

    def beside(items: list[PlanItem], is_last_chunk: bool) -> list[PlanItem]:
        items = [*items, *(driver.decode(row, position) for row, position in begun.items())]
        for row in begun:
            begun[row] += 1
        if is_last_chunk:
            chunks = [extend(row, prompt, 0, len(prompt)) for row, prompt in prompts.items()]
            items += [replace(chunk, wants_prompt_logprobs=False) for chunk in chunks]
            begun.update({row: len(prompt) for row, prompt in prompts.items()})
        return in_turn(items)

    return _answer(driver, cuts, beside)


def _answer(driver: Driver, cuts: Sequence[int], beside: Callable[[list[PlanItem], bool], list[PlanItem]]) -> Tensor:
    asked = Asked(driver)
    for start, end in pairwise(cuts):
        asked.step(beside([extend(0, PROMPT, start, end)], end == len(PROMPT)))
    for count in range(NUM_DECODE):
        asked.step(beside([driver.decode(0, len(PROMPT) + count)], False))
    return torch.stack(asked.told)


def cold(driver: Driver) -> tuple[int, ...]:
    driver.open(0, PROMPT, capacity=96)
    return 0, len(PROMPT)


def cached(driver: Driver) -> tuple[int, ...]:
    """Another has computed the beginning of its prompt."""
    driver.open(31, PROMPT[:CUT], capacity=CUT)
    driver.step([extend(31, PROMPT[:CUT], 0, CUT)])
    driver.open(0, PROMPT, capacity=96, prefix_of=31, prefix_len=CUT)
    return CUT, len(PROMPT)


def reversed_order(items: list[PlanItem]) -> list[PlanItem]:
    return items[::-1]


def same_order(items: list[PlanItem]) -> list[PlanItem]:
    return items


def assert_equal(got: Tensor, want: Tensor) -> None:
    differ = (got != want).any(-1).sum().item()
    assert not differ, f"{differ} of {len(want)} distributions differ, by {(got - want).abs().max().item():.1e} at most"


@pytest.mark.parametrize(
    ("family", "backend", "dtype"),
    cells(
        product(FAMILIES, BACKENDS, (DType.FLOAT32, DType.BFLOAT16)),
        lambda family, backend, dtype: (backend, dtype) == ("torch", DType.BFLOAT16),
    ),
)
def test_company_changes_no_bit(tiny_models: Path, family: str, backend: str, dtype: DType) -> None:
    make = partial(BACKENDS[backend], tiny_models / family, dtype, Rounding.OF_QUERY)
    for begin in (cold, cached):
        driver = make()
        want = alone(driver, begin(driver))
        for order in (same_order, reversed_order):
            driver = make()
            assert_equal(in_company(driver, begin(driver), order), want)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_no_bit_where_it_follows_from_positions(tiny_models: Path, family: str, dtype: DType) -> None:
    """Nor does company, nor what is cached, nor the size of pages."""
    folder, of_position = tiny_models / family, Rounding.OF_POSITION
    driver = native_driver(folder, dtype, of_position)
    want = alone(driver, cold(driver))
    for cuts in ((0, 16, 33, len(PROMPT)), (0, 5, 6, 70, 74, len(PROMPT)), tuple(range(len(PROMPT) + 1))):
        driver = native_driver(folder, dtype, of_position)
        cold(driver)
        assert_equal(alone(driver, cuts), want)
    driver = _driver("native", of_position)(folder, page_size=8, dtype=dtype)
    assert_equal(alone(driver, cold(driver)), want)
    driver = native_driver(folder, dtype, of_position)
    assert_equal(in_company(driver, cached(driver), same_order), want[CUT:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_bit_of_what_follows_a_short_prompt(tiny_models: Path, family: str, backend: str) -> None:
    """The last layer computed all tokens of a prompt alone, and only the last ones of two together."""
    driver = BACKENDS[backend](tiny_models / family, DType.FLOAT32, Rounding.OF_QUERY)
    prompts = [random_tokens(length, length) for length in (56, 63, 130)]
    for row, prompt in enumerate([prompts[0], *prompts]):
        driver.open(row, prompt, capacity=144)
    chunks = [extend(row, prompt, 0, len(prompt)) for row, prompt in enumerate([prompts[0], *prompts])]
    mine, *others = [replace(chunk, wants_prompt_logprobs=False) for chunk in chunks]
    (alone_told,) = driver.step([mine]).items
    told = driver.step(others).items[0]
    assert_equal(drawn_distribution(told)[None], drawn_distribution(alone_told)[None])
