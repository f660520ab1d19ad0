"""What the executor answers besides logits: plans without items, non-finite logits, sampling state, memory."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.control.sched.plan import ItemOutcome, PlanItem, SharedRun, TokenOf, TokenValues
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.model.checkpoint_config import load_spec
from tests.compute.executor.world import (
    GREEDY,
    VOCAB_SIZE,
    Driver,
    assert_same,
    distribution,
    drawn,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 5, **changes})


@pytest.fixture
def driver(tiny_models: Path) -> Driver:
    return Driver(tiny_models / "llama")


def generate(driver: Driver, row: int, prompt: list[int], sampling: SamplingParams, count: int) -> list[int]:
    driver.open(row, prompt, sampling)
    out = [drawn(driver.step([extend(row, prompt, 0, len(prompt))]).items[0])]
    while len(out) < count:
        out.append(drawn(driver.step([driver.decode(row, len(prompt) + len(out) - 1)]).items[0]))
    return out


def test_a_plan_without_items_opens_and_closes(driver: Driver) -> None:
    prompt = random_tokens(20, 0)
    driver.open(0, prompt)
    result = driver.step([])
    assert (result.step, result.items) == (0, ())
    driver.step([extend(0, prompt, 0, 20)])
    driver.step([], closes=[0])
    driver.open(0, prompt[:5])  # the row is free for another request
    assert len(driver.step([extend(0, prompt[:5], 0, 5)]).items) == 1


def test_only_asked_items_draw(driver: Driver) -> None:
    prompt = random_tokens(20, 0)
    driver.open(0, prompt)
    driver.open(1, prompt)
    plain = PlanItem(RowId(1), 0, 20, TokenValues(pack_u32(prompt)), samples=False)
    first, second = driver.step([plain, extend(0, prompt, 0, 20)]).items
    assert (first.row, first.drawn, first.outcome, first.prompt_logprobs) == (1, (), ItemOutcome.COMPUTED, ())
    assert second.drawn
    assert len(second.prompt_logprobs) == 19


def test_the_last_layer_computes_what_is_read(driver: Driver, tiny_models: Path) -> None:
    """Chunks of which nothing, the last token or everything is read, beside decoding rows: all as transformers."""
    path = tiny_models / "llama"
    prompts = [random_tokens(200, 11), random_tokens(150, 12), random_tokens(90, 13)]
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt, params(temperature=0.0, logprobs=VOCAB_SIZE))
    driver.open(3, prompts[0], GREEDY)

    def silent(row: int, start: int, end: int) -> PlanItem:
        """Draws at the end of the prompt only; no log-probabilities of the prompt."""
        tokens = TokenValues(pack_u32(prompts[row][start:end]))
        return PlanItem(RowId(row), start, end - start, tokens, samples=end == len(prompts[row]))

    nothing = driver.step([silent(0, 0, 120), silent(1, 0, 70)]).items
    assert [item.drawn for item in nothing] == [(), ()]
    mixed = driver.step([silent(1, 70, 150), silent(0, 120, 160), extend(3, prompts[0], 0, 120), silent(2, 0, 90)])
    last = driver.step([silent(0, 160, 200), extend(3, prompts[0], 120, 200)])
    for result, prompt in ((mixed.items[0], prompts[1]), (mixed.items[3], prompts[2]), (last.items[0], prompts[0])):
        assert_same(drawn_distribution(result), reference_logprobs(path, prompt)[-1])
    assert not mixed.items[1].drawn
    parts = [distribution(logprobs) for item in (mixed.items[2], last.items[1]) for logprobs in item.prompt_logprobs]
    assert_same(torch.stack(parts), reference_logprobs(path, prompts[0])[:-1])


def test_rows_that_share_keep_their_bits_beside_a_chunk_of_which_nothing_is_read(driver: Driver) -> None:
    prompt, other = random_tokens(101, 14), random_tokens(180, 15)
    sampling = params(temperature=0.0, logprobs=5)
    driver.open(0, prompt, sampling)
    driver.open(9, other, sampling)
    first = drawn(driver.step([extend(0, prompt, 0, 101)]).items[0])
    prompts = [[*prompt, first]] + [prompt[:96] + random_tokens(6 + row, row) for row in range(1, 4)]
    for row in range(1, 4):
        driver.open(row, prompts[row][:-1], sampling, prefix_of=0, prefix_len=96)
        driver.step([extend(row, prompts[row][:-1], 96, len(prompts[row]) - 1)])
    rows = [
        PlanItem(RowId(row), len(tokens) - 1, 1, TokenValues(pack_u32(tokens[-1:])), True)
        for row, tokens in enumerate(prompts)
    ]
    chunk = PlanItem(RowId(9), 0, 100, TokenValues(pack_u32(other[:100])), samples=False)
    items = [rows[0], chunk, *rows[1:]]
    alone = driver.step(items)
    together = driver.step(items, [SharedRun(0, 96, tuple(RowId(row) for row in range(4)))])
    assert [item.drawn for item in together.items] == [item.drawn for item in alone.items]
    assert together.shared_tokens_read == 3 * 96


def test_prompt_logprobs_reach_into_the_next_chunk(driver: Driver, tiny_models: Path) -> None:
    prompt = random_tokens(50, 1)
    driver.open(0, prompt, params(prompt_logprobs=0))
    result = driver.step([extend(0, prompt, 0, 30, samples=False)]).items[0]
    want = reference_logprobs(tiny_models / "llama", prompt)
    assert [entry.logprob for entry in result.prompt_logprobs] == pytest.approx(
        [want[i, prompt[i + 1]].item() for i in range(30)], abs=2e-3
    )


def test_seeded_sampling_repeats_and_ignores_the_batch(driver: Driver) -> None:
    prompt = random_tokens(30, 2)
    alone = generate(driver, 0, prompt, params(temperature=0.9), 12)
    other = generate(driver, 1, prompt, params(temperature=0.9, seed=6), 12)
    assert generate(driver, 2, prompt, params(temperature=0.9), 12) == alone != other


def test_a_resumed_row_goes_on_as_if_never_interrupted(driver: Driver) -> None:
    """Retraction: prompt + output come back as tokens of a new row; seed, penalties and position carry over."""
    prompt = random_tokens(30, 3)
    sampling = params(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    whole = generate(driver, 0, prompt, sampling, 12)
    known = prompt + whole[:5]
    driver.open(1, known, sampling, prompt_len=len(prompt))
    resumed = [drawn(driver.step([extend(1, known, 0, 35)]).items[0])]
    while len(resumed) < 7:
        resumed.append(drawn(driver.step([driver.decode(1, 34 + len(resumed))]).items[0]))
    assert resumed == whole[5:]


def test_penalties_see_the_prompt_and_the_output(driver: Driver) -> None:
    prompt = random_tokens(10, 4)
    never_again = params(temperature=0.0, repetition_penalty=1000.0)
    out = generate(driver, 0, prompt, never_again, 30)
    assert len({*prompt, *out}) == len({*prompt}) + 30
    only_output = params(temperature=0.0, presence_penalty=1000.0)
    assert len(set(generate(driver, 1, prompt, only_output, 30))) == 30


def test_nan_ends_its_own_row_only(driver: Driver) -> None:
    prompts = [random_tokens(40, 5), random_tokens(40, 6)]
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt)
        driver.step([extend(row, prompt, 0, 40)])
    arena = driver.executor.memory.kv.page_arenas[0]
    size = arena.layout.page_bytes
    page = driver.pages[1][0]
    arena.bytes[page * size : (page + 1) * size] = 0xFF  # NaN
    good, bad = driver.step([extend(row, [*prompts[row], 3], 40, 41) for row in range(2)]).items
    assert good.outcome is ItemOutcome.COMPUTED
    assert good.drawn
    assert (bad.outcome, bad.drawn) == (ItemOutcome.NOT_FINITE, ())
    dropped = PlanItem(RowId(1), 41, 1, TokenOf(StepIndex(driver.steps - 1)), True)  # planned before the result
    again = driver.step([driver.decode(0, 41), dropped]).items
    assert [item.outcome for item in again] == [ItemOutcome.COMPUTED, ItemOutcome.NOT_FINITE]


def test_a_step_that_fails_ends_its_requests_and_not_the_executor(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [random_tokens(40, 9), random_tokens(40, 10)]
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt)
    outside = [*prompts[1][:39], 10**6]  # no row of the embedding
    failed = driver.step([extend(0, prompts[0], 0, 40), extend(1, outside, 0, 40)])
    assert [(item.row, item.outcome, item.drawn) for item in failed.items] == [
        (0, ItemOutcome.FAILED, ()),
        (1, ItemOutcome.FAILED, ()),
    ]
    assert "step 0 of 80 tokens failed: its requests end" in caplog.text
    driver.step([], closes=[0, 1])
    want = generate(driver, 2, prompts[0], GREEDY, 5)
    assert generate(driver, 0, prompts[0], GREEDY, 5) == want


def test_pages_left_full_of_nan_harm_nobody(driver: Driver, tiny_models: Path) -> None:
    driver.executor.memory.kv.page_arenas[0].bytes.fill_(0xFF)
    prompt = random_tokens(45, 7)
    out = generate(driver, 0, prompt, GREEDY, 5)
    want = reference_logprobs(tiny_models / "llama", prompt + out[:-1])
    assert out == want[44:].argmax(-1).tolist()


def test_pages_moved_to_another_executor_continue_the_request(tiny_models: Path) -> None:
    """What a transfer does: bytes of pages to other pages of a second executor; checksums travel along."""
    path, prompt = tiny_models / "qwen3", random_tokens(40, 8)
    prefill, decode = Driver(path), Driver(path, num_pages=40)
    want = generate(prefill, 0, prompt, GREEDY, 8)
    decode.open(0, [*prompt, want[0]])
    src, dst = prefill.executor.memory, decode.executor.memory
    size = src.kv.page_arenas[0].layout.page_bytes
    moved = list(zip(prefill.pages[0][:3], decode.pages[0][:3], strict=True))
    for a, b in moved:
        dst.kv.page_arenas[0].bytes[b * size : (b + 1) * size] = src.kv.page_arenas[0].bytes[a * size : (a + 1) * size]
    sums = src.checksums(PoolId(0), [a for a, _ in moved])
    assert sums == dst.checksums(PoolId(0), [b for _, b in moved])
    assert len(unpack_u32(sums)) == 3
    first = PlanItem(RowId(0), 40, 1, TokenValues(pack_u32(want[:1])), True)
    got = [drawn(decode.step([first]).items[0])]
    while len(got) < 7:
        got.append(drawn(decode.step([decode.decode(0, 40 + len(got))]).items[0]))
    assert got == want[1:]


def test_logprobs_are_logs(driver: Driver) -> None:
    prompt = random_tokens(10, 9)
    driver.open(0, prompt, params(logprobs=2))
    (sampled,) = driver.step([extend(0, prompt, 0, 10)]).items[0].drawn
    assert sampled.logprobs is not None
    assert len(sampled.logprobs.top) == 2
    assert 0 < math.exp(sampled.logprobs.logprob) < 1


def test_input_tokens_must_match_the_item(driver: Driver) -> None:
    driver.open(0, [1, 2, 3])
    with pytest.raises(ValueError, match="2 input tokens for q_len 3"):
        driver.step([PlanItem(RowId(0), 0, 3, TokenValues(pack_u32([1, 2])), True)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_cuda_is_said_in_one_line(tiny_models: Path) -> None:
    path = tiny_models / "llama"
    spec = load_spec(path)
    sizes = ExecutorSizes((4,), 1, 64)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        TorchExecutor.load(path, spec, spec.cache_spec(16, spec.dtype), sizes, "cuda:0")


def test_memory_is_announced(driver: Driver) -> None:
    names = [name for name, _ in driver.executor.memory.regions()]
    assert names == ["kv"]
    assert len(driver.executor.memory.checksums(PoolId(0), [PageId(0), PageId(1)])) == 8
