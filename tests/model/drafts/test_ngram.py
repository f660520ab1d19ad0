"""Guesses by what the text said before, and draws that verify guesses."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from deltaserve.compute.executor.randomness import uniform
from deltaserve.control.sched.plan import PlanItem, Sampled, TokenValues
from deltaserve.control.sched.speculation import right_draws
from deltaserve.core.ids import RowId
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.model.drafts.drafter import DraftAsk
from deltaserve.model.drafts.ngram import NgramDrafter
from tests.compute.executor.test_runner import generate, params
from tests.compute.executor.world import Driver, extend, random_tokens

ROW = RowId(0)


def guessed(tokens: list[int], count: int = 4) -> tuple[int, ...]:
    (drafts,) = NgramDrafter(min_len=2, max_len=4).propose([DraftAsk(ROW, np.array(tokens, np.int64), count)])
    return unpack_u32(drafts)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], (3, 4, 9, 1)),
        ([1, 2, 3, 7, 1, 2, 5, 8, 1, 2], (5, 8, 1, 2)),  # the latest of equally long ones
        ([6, 1, 2, 3, 1, 2, 4, 6, 1, 2], (3, 1, 2, 4)),  # a longer one is older
        ([1, 2, 9, 2], ()),  # one token alone says too little
        ([5, 5, 5, 5], (5,)),
        ([1, 2, 3, 4], ()),
        ([1], ()),
        ([], ()),
    ],
)
def test_what_followed_before_is_guessed(tokens: list[int], drafts: tuple[int, ...]) -> None:
    assert guessed(tokens) == drafts
    assert guessed(tokens, 1) == drafts[:1]
    assert guessed(tokens, 0) == ()


def item(start: int, last: int, drafts: list[int]) -> PlanItem:
    return PlanItem(
        ROW, start, 1 + len(drafts), TokenValues(pack_u32([last, *drafts])), samples=True, num_drafts=len(drafts)
    )


RULES = [
    params(temperature=0.0),
    params(temperature=0.9, logprobs=3),
    params(temperature=0.8, top_k=20, top_p=0.9),
    params(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4),
    params(temperature=0.0, presence_penalty=1.5, logprobs=0),
]


@pytest.mark.parametrize("rules", RULES, ids=["greedy", "sampled", "nucleus", "counts", "counts-greedy"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_verified_tokens_are_those_of_one_at_a_time(tiny_models: Path, family: str, rules: SamplingParams) -> None:
    driver, prompt = Driver(tiny_models / family), random_tokens(41, 0)
    want = generate(driver, 1, prompt, rules, 16)
    driver.open(0, prompt, rules)
    result = driver.step([extend(0, prompt, 0, len(prompt))]).items[0]
    out = [sampled.token for sampled in result.drawn]
    for right in (3, 0, 2, 1, 3):  # of 4 guesses so many are right
        ahead = want[len(out) : len(out) + 4]
        drafts = [token if place < right else (token + 1) % 7 for place, token in enumerate(ahead)]
        (result,) = driver.step([item(len(prompt) + len(out) - 1, out[-1], drafts)]).items
        expected = next((i for i, (a, b) in enumerate(zip(drafts, ahead, strict=True)) if a != b), len(drafts))
        assert len(result.drawn) == expected + 1
        out += [sampled.token for sampled in result.drawn]
        assert out == want[: len(out)]


def test_log_probabilities_of_accepted_tokens_are_those_of_one_at_a_time(tiny_models: Path) -> None:
    rules = params(temperature=0.0, logprobs=20)
    driver, prompt = Driver(tiny_models / "llama"), random_tokens(41, 0)
    driver.open(1, prompt, rules)
    plain = [driver.step([extend(1, prompt, 0, len(prompt))]).items[0].drawn[0]]
    while len(plain) < 5:
        plain.append(driver.step([driver.decode(1, len(prompt) + len(plain) - 1)]).items[0].drawn[0])
    driver.open(0, prompt, rules)
    driver.step([extend(0, prompt, 0, len(prompt))])
    (result,) = driver.step([item(len(prompt), plain[0].token, [s.token for s in plain[1:4]])]).items
    assert [s.token for s in result.drawn] == [s.token for s in plain[1:]]
    for own, other in zip(result.drawn, plain[1:], strict=True):
        assert own.logprobs is not None
        assert other.logprobs is not None
        assert own.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


def test_a_round_ends_with_the_answer(tiny_models: Path) -> None:
    driver, prompt = Driver(tiny_models / "llama"), random_tokens(41, 0)
    want = generate(driver, 1, prompt, params(temperature=0.0), 6)
    stops = params(temperature=0.0, stop_token_ids=(want[2],))
    driver.open(0, prompt, stops)
    driver.step([extend(0, prompt, 0, len(prompt))])
    (result,) = driver.step([item(len(prompt), want[0], want[1:5])]).items
    assert [s.token for s in result.drawn] == want[1 : want.index(want[2]) + 1]


def test_guesses_do_not_change_how_tokens_are_distributed() -> None:
    """Pairs of tokens drawn with a guess at the first, over 20,000 seeds: chi-square against exact probabilities."""
    first = [0.5, 0.3, 0.15, 0.05]
    after = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.05, 0.05, 0.45, 0.45]]
    found: Counter[tuple[int, int]] = Counter()
    num_seeds = 20_000
    for seed in range(num_seeds):
        guess = seed % 4
        params_of = SamplingParams(max_tokens=2, seed=seed)
        seen: list[int] = []

        def draw(place: int, seed: int = seed, guess: int = guess, seen: list[int] = seen) -> Sampled:
            weights = first if place == 0 else after[guess]
            token = int(np.searchsorted(np.cumsum(weights), uniform(seed, len(seen)), side="right"))
            seen.append(token)
            return Sampled(token)

        drawn = [s.token for s in right_draws(item(0, 9, [guess]), params_of, 0, draw)]
        if len(drawn) == 1:  # the next step draws the second, behind the token that is there
            weights = np.cumsum(after[drawn[0]])
            drawn.append(int(np.searchsorted(weights, uniform(seed, 1), side="right")))
        found[drawn[0], drawn[1]] += 1
    expected = {(a, b): num_seeds * first[a] * after[a][b] for a in range(4) for b in range(4)}
    chi_square = sum((found[pair] - count) ** 2 / count for pair, count in expected.items())
    assert chi_square < 30.6, "1 % of 15 degrees of freedom"
