"""Guesses that come with a step's results: those of the dense head, whatever was verified, shared or sent before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.control.sched.plan import ItemResult, PageUpdate, PlanItem, SharedRun, StepResult, TokenValues
from deltaserve.core.ids import PoolId, RowId
from deltaserve.core.lifetime import KEEP_LAST
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.model.model_spec import ModelSpec
from tests.compute.executor.world import GREEDY, Driver, RankDriver, drawn, extend, random_tokens, reference_logprobs
from tests.compute.layers.dense_heads import HEADS, NUM_GUESSES, dense_drafted, dense_head, drafting

NUM_STEPS = 8
LONG = msgspec.structs.replace(GREEDY, max_tokens=256, logprobs=None, prompt_logprobs=None)


class DraftingDriver(Driver):
    """With the head of that name, not rounded. A row's recurrent states stay in one slot, as the scheduler has it where
    nobody keeps them: after a guess that was wrong the slot is that of fewer tokens."""

    quantization = "none"

    def __init__(self, tiny_models: Path, name: str, page_size: int = 16, device: str = "cpu") -> None:
        self._drafting = drafting(tiny_models, name)
        super().__init__(self._drafting[0], page_size=page_size, device=device)

    def model(self, path: Path) -> ModelSpec:
        return self._drafting[1]

    def step(
        self, items: Sequence[PlanItem], shared: Sequence[SharedRun] = (), closes: Sequence[int] = ()
    ) -> StepResult:
        for opened in self._opens:
            pages = self.pages[opened.row]
            for pool, kept in enumerate(self.cache.pools):
                if kept == KEEP_LAST:
                    self._updates.append(PageUpdate(opened.row, PoolId(pool), 0, pages[:1] * len(pages)))
        return super().step(items, shared, closes)


class DraftingRanks(DraftingDriver, RankDriver):
    def __init__(self, tiny_models: Path, name: str, tp_size: int, page_size: int = 16) -> None:
        self._drafting = drafting(tiny_models, name)
        RankDriver.__init__(self, self._drafting[0], tp_size, page_size)


def driver_of(tiny_models: Path, name: str, tp_size: int = 1, page_size: int = 16) -> Driver:
    if tp_size > 1:
        return DraftingRanks(tiny_models, name, tp_size, page_size)
    return DraftingDriver(tiny_models, name, page_size)


def wanting(item: PlanItem, num_guesses: int = NUM_GUESSES) -> PlanItem:
    return replace(item, wants_prompt_logprobs=False, wanted_drafts=num_guesses if item.samples else 0)


def decode(row: int, text: Sequence[int], guesses: Sequence[int] = ()) -> PlanItem:
    """The last known token, and guesses behind it."""
    inputs = TokenValues(pack_u32([text[-1], *guesses]))
    return PlanItem(RowId(row), len(text) - 1, 1 + len(guesses), inputs, True, False, len(guesses), NUM_GUESSES)


def guesses_of(result: ItemResult) -> list[int]:
    return list(unpack_u32(result.drafts))


def prefill(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[ItemResult]:
    """Both prompts cut at odd places; the results of their last chunks."""
    results: dict[RowId, ItemResult] = {}
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt, LONG)
    ends = [len(prompt) for prompt in prompts]
    for chunks in ([(0, 0, 37), (1, 0, 3)], [(1, 3, 4)], [(0, 37, ends[0]), (1, 4, ends[1])]):
        items = [wanting(extend(row, prompts[row], start, end)) for row, start, end in chunks]
        results |= {result.row: result for result in driver.step(items).items}
    return [results[RowId(row)] for row in range(len(prompts))]


def prompts() -> list[list[int]]:
    return [random_tokens(90, 1), random_tokens(41, 2)]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", HEADS)
def test_guesses_come_with_every_token(tiny_models: Path, name: str, tp_size: int) -> None:
    driver, model = driver_of(tiny_models, name, tp_size), dense_head(tiny_models, name)
    texts = prompts()
    results = prefill(driver, texts)
    for _ in range(3):
        for text, result in zip(texts, results, strict=True):
            text.append(drawn(result))
            assert guesses_of(result) == dense_drafted(model, text)[1]
        results = list(driver.step([decode(row, text) for row, text in enumerate(texts)]).items)


@pytest.mark.parametrize(("tp_size", "page_size"), [(1, 1), (2, 16)])
@pytest.mark.parametrize("name", HEADS)
def test_guesses_that_are_verified(tiny_models: Path, name: str, tp_size: int, page_size: int) -> None:
    """The text is that without guesses; some guesses are right, and those behind them are the dense head's again."""
    driver, model = driver_of(tiny_models, name, tp_size, page_size), dense_head(tiny_models, name)
    texts, num_right = prompts(), 0
    results = prefill(driver, texts)
    for _ in range(NUM_STEPS):
        for text, result in zip(texts, results, strict=True):
            text += [sampled.token for sampled in result.drawn]
            num_right += len(result.drawn) - 1
            assert guesses_of(result) == dense_drafted(model, text)[1]
        items = [
            decode(row, text, guesses_of(result)) for row, (text, result) in enumerate(zip(texts, results, strict=True))
        ]
        results = list(driver.step(items).items)
    assert num_right > NUM_STEPS / 2
    path = drafting(tiny_models, name)[0]
    for text, prompt in zip(texts, prompts(), strict=True):
        want = reference_logprobs(path, text).argmax(-1).tolist()
        assert text[len(prompt) :] == want[len(prompt) - 1 : -1]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "llama_eagle3"])
def test_a_head_stops_guessing_where_it_is_not_sure(tiny_models: Path, name: str, tp_size: int) -> None:
    driver, model = driver_of(tiny_models, name, tp_size), dense_head(tiny_models, name)
    texts = prompts()
    results, counts = prefill(driver, texts), []
    for least_likely in (0.0, 0.01, 0.2, 0.5, 0.9, 1.5):
        for text, result in zip(texts, results, strict=True):
            text.append(drawn(result))
        driver.least_likely = least_likely
        results = list(driver.step([decode(row, text) for row, text in enumerate(texts)]).items)
        found = [guesses_of(result) for result in results]
        wanted = [dense_drafted(model, [*text, drawn(result)])[1] for text, result in zip(texts, results, strict=True)]
        assert found == [want[: len(guesses)] for guesses, want in zip(found, wanted, strict=True)]
        counts.append(sum(map(len, found)))
    assert counts[0] == 2 * NUM_GUESSES
    assert counts[-1] == 0
    assert any(0 < count < 2 * NUM_GUESSES for count in counts)


def handed_over(tiny_models: Path, name: str, *, with_pages: bool, with_features: bool) -> tuple[list[int], list[int]]:
    """What a worker guesses behind a prompt that another one computed, and the text so far."""
    prefilling, decoding = driver_of(tiny_models, name), driver_of(tiny_models, name)
    prompt = prompts()[0]
    prefilling.open(0, prompt)
    prefilling.step([extend(0, prompt, 0, 37, samples=False)])
    (result,) = prefilling.step([replace(extend(0, prompt, 37, 90), wants_features=True)]).items
    assert guesses_of(result) == []
    text = [*prompt, drawn(result)]
    decoding.open(0, text, prompt_len=90)
    for ours, theirs in zip(decoding.executor.memory.kv.arenas, prefilling.executor.memory.kv.arenas, strict=True):
        if with_pages or not theirs.layout.group.is_for_guesses:
            ours.bytes.copy_(theirs.bytes)
    start = DraftStart(90 if with_pages else 0, result.features if with_features else b"")
    decoding._opens = [replace(opened, draft_start=start) for opened in decoding._opens]
    (result,) = decoding.step([decode(0, text)]).items
    return guesses_of(result), [*text, drawn(result)]


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_that_was_computed_elsewhere(tiny_models: Path, name: str) -> None:
    """With the head's pages and features guesses are those of one worker; without, of a head that has seen no more of
    the prompt than its tokens."""
    features, head = dense_head(tiny_models, name)
    guesses, text = handed_over(tiny_models, name, with_pages=True, with_features=True)
    assert guesses == dense_drafted((features, head), text)[1]

    def unknown(before: int) -> Tensor:
        made = features(text).clone()
        made[before:90] = 0.0
        return made

    guesses, text = handed_over(tiny_models, name, with_pages=False, with_features=False)
    assert guesses == dense_drafted((lambda tokens: unknown(0), head), text)[1]
    guesses, text = handed_over(tiny_models, name, with_pages=True, with_features=False)
    assert guesses == dense_drafted((lambda tokens: unknown(89), head), text)[1]


def test_a_prefix_of_another_row_has_the_head_s_entries(tiny_models: Path) -> None:
    """But what the model made of its last token is known only to the row that computed it."""
    name = "deepseek_v3_mtp"
    driver, (features, head) = driver_of(tiny_models, name), dense_head(tiny_models, name)
    first = prompts()[0]
    driver.open(0, first)
    driver.step([wanting(extend(0, first, 0, 90))])
    second = [*first[:64], *random_tokens(11, 5)]
    driver.open(1, second, prefix_of=0, prefix_len=64)
    (result,) = driver.step([wanting(extend(1, second, 64, 75))]).items
    text = [*second, drawn(result)]

    def known(tokens: Sequence[int]) -> Tensor:
        made = features(tokens).clone()
        made[63] = 0.0
        return made

    assert guesses_of(result) == dense_drafted((known, head), text)[1]


def test_a_long_prompt_is_filled_in_passes(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3_next_mtp"
    whole = handed_over(tiny_models, name, with_pages=False, with_features=False)
    monkeypatch.setattr("deltaserve.compute.executor.model_drafter._PASS_LEN", 32)
    assert handed_over(tiny_models, name, with_pages=False, with_features=False) == whole
