"""Steps launched before anybody has read what the one before drew: the same tokens and the same pages as one by one."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deltaserve.compute.executor.candidates import SamplingLimits
from deltaserve.compute.executor.launched import AtOnce, Launched
from deltaserve.compute.executor.sampler import SampleRow, sample
from deltaserve.compute.executor.unread_draws import draw_unread
from deltaserve.control.sched.plan import (
    ItemOutcome,
    ItemResult,
    PlanItem,
    StepPlan,
    StepResult,
    TokenOf,
    TokenValues,
)
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from tests.compute.executor.world import Driver, random_tokens

OUTPUT_LEN = 12
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "free": {"temperature": 1.3},
    "nucleus": {"temperature": 0.9, "top_p": 0.8},
    "top-k": {"temperature": 0.9, "top_k": 5, "min_p": 0.02},
    "biased": {"temperature": 0.0, "logit_bias": ((7, 4.0), (11, -100.0))},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.9, "repetition_penalty": 1.4},
    "not yet": {"temperature": 0.7, "presence_penalty": 1.5, "min_tokens": 5, "stop_token_ids": (3, 5)},
}


def rules(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": seed, **changes})


class LaunchingDriver(Driver):
    """Each plan is launched before the result of the one before is read."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        Driver.__init__(self, path, device=device)
        self.launched: list[Launched | AtOnce] = []

    def run(self, plan: StepPlan) -> StepResult:
        """The result of the plan before: not before another one was launched."""
        self.launched.append(self.executor.launch(plan))
        return self.launched[-2].wait() if len(self.launched) > 1 else StepResult(StepIndex(0), ())


def prompt_item(row: int, tokens: Sequence[int], start: int = 0) -> PlanItem:
    return PlanItem(RowId(row), start, len(tokens) - start, TokenValues(pack_u32(tokens[start:])), True)


def outputs(driver: Driver, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """One row after the other starts, beside those that decode; each row's tokens."""
    prompts = [random_tokens(10 + 7 * row, row) for row in range(len(sampling))]
    results: list[StepResult] = []
    for step in range(len(sampling) + OUTPUT_LEN):
        items = []
        if step < len(sampling):
            driver.open(step, prompts[step], sampling[step], capacity=96)
            items.append(prompt_item(step, prompts[step]))
        for row in range(min(step, len(sampling))):
            items.append(driver.decode(row, len(prompts[row]) + step - row - 1))
        results.append(driver.step(items))
    if isinstance(driver, LaunchingDriver):
        results = [launched.wait() for launched in driver.launched]
    found: list[list[int]] = [[] for _ in sampling]
    for result in results:
        for item in result.items:
            found[item.row] += [sampled.token for sampled in item.drawn]
    return [tokens[:OUTPUT_LEN] for tokens in found]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
def test_tokens_are_those_of_one_step_after_the_other(tiny_models: Path, name: str) -> None:
    sampling = [rules(seed, **changes) for seed, changes in enumerate(RULES.values())]
    launching = LaunchingDriver(tiny_models / name)
    assert outputs(launching, sampling) == outputs(Driver(tiny_models / name), sampling)
    assert all(isinstance(launched, Launched) for launched in launching.launched)


@pytest.mark.parametrize("changes", [{}, {"logprobs": 1}], ids=["launched", "at once"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_chunks_of_a_prompt_behind_each_other(tiny_models: Path, name: str, changes: dict[str, Any]) -> None:
    """And what is drawn behind the last of them, while another row decodes."""
    sampling = [rules(1, temperature=0.8), rules(2, temperature=0.9, **changes)]
    want = _drawn_behind_chunks(Driver(tiny_models / name), sampling)
    launching = LaunchingDriver(tiny_models / name)
    assert _drawn_behind_chunks(launching, sampling) == want
    assert [len(tokens) for tokens in want] == [7, 4]


def _drawn_behind_chunks(driver: Driver, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    prompts = [random_tokens(10, 1), random_tokens(30, 2)]
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt, sampling[row], capacity=96)
    results = [driver.step([prompt_item(0, prompts[0])])]
    for step, start in enumerate(range(0, 30, 12)):
        chunk = prompts[1][start : start + 12]
        item = PlanItem(RowId(1), start, len(chunk), TokenValues(pack_u32(chunk)), start + len(chunk) == 30)
        results.append(driver.step([driver.decode(0, 10 + step), item]))
    results += [driver.step([driver.decode(0, 13 + step), driver.decode(1, 30 + step)]) for step in range(3)]
    if isinstance(driver, LaunchingDriver):
        results = [launched.wait() for launched in driver.launched]
    drawn = [(item.row, sampled.token) for result in results for item in result.items for sampled in item.drawn]
    return [[token for of_row, token in drawn if of_row == row] for row in range(2)]


@pytest.mark.parametrize(
    "changes", [{"logprobs": 2}, {"bad_words": ((1, 2),), "presence_penalty": 0.5}], ids=["logprobs", "bad words"]
)
def test_what_the_host_must_see_at_once_is_computed_at_once(tiny_models: Path, changes: dict[str, Any]) -> None:
    """Steps of both kinds follow each other."""
    sampling = [rules(1, temperature=0.8), rules(2, temperature=0.5, **changes), rules(3, temperature=0.0)]
    launching = LaunchingDriver(tiny_models / "llama")
    assert outputs(launching, sampling) == outputs(Driver(tiny_models / "llama"), sampling)
    assert {type(launched) for launched in launching.launched} == {Launched, AtOnce}


@pytest.mark.parametrize("changes", [{}, {"logprobs": 1}], ids=["launched", "at once"])
def test_seconds_hold_what_is_done_before_a_step_is_computed(tiny_models: Path, changes: dict[str, Any]) -> None:
    prompt, delay_s = random_tokens(5, 1), 0.2
    for driver in (LaunchingDriver(tiny_models / "llama"), Driver(tiny_models / "llama")):
        driver.open(0, prompt, rules(1, **changes))
        apply = driver.executor._apply

        def delayed(plan: StepPlan, apply: Callable[[StepPlan], None] = apply) -> None:
            time.sleep(delay_s)
            apply(plan)

        with patch.object(driver.executor, "_apply", delayed):
            result = driver.step([prompt_item(0, prompt)])
        if isinstance(driver, LaunchingDriver):
            result = driver.launched[-1].wait()
        assert result.items[0].drawn and result.seconds >= delay_s


def test_a_row_that_another_request_has_taken_learns_nothing(tiny_models: Path) -> None:
    driver = Driver(tiny_models / "llama")
    launch = driver.executor.launch
    old, new = random_tokens(20, 1), random_tokens(9, 2)
    driver.run = launch  # type: ignore[method-assign, assignment]
    driver.open(0, old, rules(1))
    first = driver.step([prompt_item(0, old)])
    driver.open(0, new, rules(2))
    second = driver.step([prompt_item(0, new)], closes=[0])
    first.wait()  # type: ignore[attr-defined]
    second.wait()  # type: ignore[attr-defined]
    third = driver.step([driver.decode(0, len(new))]).wait()  # type: ignore[attr-defined]
    alone = Driver(tiny_models / "llama")
    alone.open(0, new, rules(2))
    alone.step([prompt_item(0, new)])
    assert third.items == alone.step([alone.decode(0, len(new))]).items


def test_a_row_that_is_not_finite_is_told_and_harms_nobody(tiny_models: Path) -> None:
    def bad(driver: Driver) -> None:
        for page in driver.pages[0]:
            for arena in driver.executor.memory.kv.arenas:
                arena.bytes[page * arena.page_bytes : (page + 1) * arena.page_bytes] = 0xFF

    found = []
    for driver in (LaunchingDriver(tiny_models / "llama"), Driver(tiny_models / "llama")):
        results = []
        for row in range(2):
            driver.open(row, random_tokens(20, row), rules(row))
        results.append(driver.step([prompt_item(row, random_tokens(20, row)) for row in range(2)]))
        bad(driver)
        results += [driver.step([driver.decode(row, 20 + step) for row in range(2)]) for step in range(3)]
        if isinstance(driver, LaunchingDriver):
            results = [launched.wait() for launched in driver.launched]
        assert [result.items[0].outcome for result in results[1:]] == [ItemOutcome.NOT_FINITE] * 3
        found.append([result.items[1] for result in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}], ids=["launched", "at once"])
def test_one_step_that_is_not_finite_ends_that_request_only(tiny_models: Path, changes: dict[str, Any]) -> None:
    """The step behind it is launched, or computed at once, before the host hears of it, and its logits are finite."""
    found = spoiled_results(LaunchingDriver(tiny_models / "llama"), [0], changes)
    assert found[1].items[0].outcome is ItemOutcome.NOT_FINITE
    assert of_others(found) == of_others(spoiled_results(Driver(tiny_models / "llama"), [], changes))


def spoiled_results(driver: Driver, spoiled: Sequence[int], changes: dict[str, Any]) -> list[StepResult]:
    """Two rows decode, of which the logits of `spoiled` are no numbers in the first decode step alone. A third row of
    other rules joins them in the next one, behind which row 0 leaves."""
    decoder, prompts = driver.executor._decoder, [random_tokens(20, row) for row in range(3)]
    logits_of = decoder.logits

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        logits[list(spoiled)] = float("nan")
        return logits

    for row in range(2):
        driver.open(row, prompts[row], rules(row))
    results = [driver.step([prompt_item(row, prompts[row]) for row in range(2)])]
    with patch.object(decoder, "logits", spoil):
        results.append(driver.step([driver.decode(row, 20) for row in range(2)]))
    driver.open(2, prompts[2], rules(2, **changes))
    results.append(driver.step([driver.decode(0, 21), driver.decode(1, 21), prompt_item(2, prompts[2])]))
    results.append(driver.step([driver.decode(1, 22), driver.decode(2, 20)], closes=[0]))
    results.append(driver.step([driver.decode(1, 23), driver.decode(2, 21)]))
    return [launched.wait() for launched in driver.launched] if isinstance(driver, LaunchingDriver) else results


def of_others(results: Sequence[StepResult]) -> list[list[ItemResult]]:
    """Results of all rows but the first."""
    return [[item for item in result.items if item.row] for result in results]


def test_a_step_that_fails_ends_its_requests_only(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LaunchingDriver(tiny_models / "llama")
    prompt = random_tokens(20, 1)
    driver.open(0, prompt, rules(1))
    driver.step([prompt_item(0, prompt)])
    with monkeypatch.context() as broken:
        broken.setattr("deltaserve.compute.executor.unread_rows.draw_unread", lambda *_: 1 / 0)
        assert driver.step([driver.decode(0, 20)]).items[0].drawn
    assert driver.launched[-1].wait().items[0].outcome is ItemOutcome.FAILED
    driver.open(1, prompt, rules(1))
    driver.step([prompt_item(1, prompt)], closes=[0])
    assert driver.launched[-1].wait().items[0].drawn == driver.launched[0].wait().items[0].drawn


@pytest.mark.parametrize("vocab_size", [16, 1024, 5000, 40_000])
def test_draws_are_those_of_the_sampler(vocab_size: int) -> None:
    """Flat and steep distributions, ties, and nuclei that are larger than the candidates."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = []
    for index in range(48):
        top_p, top_k = (1.0, 0.5, 0.95, 0.9999)[index % 4], (None, 3, 2000, None)[index // 4 % 4]
        min_p = (0.0, 0.05, 1e-6)[index % 3]
        wanted = rules(index, temperature=(0.0, 0.3, 1.0, 3.0)[index // 3 % 4], top_p=top_p, top_k=top_k, min_p=min_p)
        rows.append(SampleRow(wanted, index, None))
    logits = torch.randn(48, vocab_size, generator=generator) * torch.logspace(-2, 1, 48)[:, None]
    logits[::5] = logits[::5].round()  # ties
    logits[7] = 0.0
    draws = draw_unread(logits.clone(), rows)
    assert draws.is_finite.all()
    assert draws.tokens.tolist() == [draw.token for draw in sample(logits.clone(), rows)]


def test_lines_that_are_not_finite_are_told() -> None:
    logits = torch.randn(6, 3000)
    logits[1, 5], logits[2, 9], logits[4, 0] = float("nan"), float("inf"), float("-inf")
    rows = [SampleRow(rules(i, temperature=0.8, top_p=0.9 if i % 2 else 1.0), 0, None) for i in range(6)]
    draws = draw_unread(logits, rows)
    assert draws.is_finite.tolist() == [True, False, False, True, False, True]
    assert ((draws.tokens >= 0) & (draws.tokens < 3000)).all()


def test_limits_are_columns() -> None:
    limits = SamplingLimits.of([(rules(1, top_k=4), 0.25), (rules(2, top_p=0.5), 0.75)], 100, torch.device("cpu"))
    assert limits.top_k.tolist() == [[4], [100]] and limits.points.dtype is torch.float64


def test_an_input_that_was_never_drawn_is_a_mistake_of_the_plan(tiny_models: Path) -> None:
    """A row that drew nothing in the step that its input names is computed as token 0, and dropped by its planner."""
    driver = LaunchingDriver(tiny_models / "llama")
    prompt = random_tokens(20, 1)
    driver.open(0, prompt, rules(1))
    driver.step([PlanItem(RowId(0), 0, 20, TokenValues(pack_u32(prompt)), False)])
    driver.step([PlanItem(RowId(0), 20, 1, TokenOf(StepIndex(0)), True)])
    assert driver.launched[-1].wait().items[0].outcome is ItemOutcome.COMPUTED
