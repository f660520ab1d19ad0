"""The batched sampler against rules written out one row at a time, and its distribution with fixed seeds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.compute.executor.penalties import Penalties, penalised, penalised_row
from deltaserve.compute.executor.randomness import uniform
from deltaserve.compute.executor.row_state import History
from deltaserve.compute.executor.sampler import SampleRow, finite_rows, sample, token_logprobs
from deltaserve.core.sampling import SamplingParams

VOCAB = 50


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, **changes})


def row(position: int = 0, history: History | None = None, **changes: Any) -> SampleRow:
    return SampleRow(params(**changes), position, history)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def history(prompt: list[int], output: list[int]) -> History:
    made = History(VOCAB, torch.device("cpu"))
    made.add(np.array(prompt, np.int64), is_output=False)
    made.add(np.array(output, np.int64), is_output=True)
    return made


def plain_probs(logits: list[float], p: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p in plain Python."""
    scaled = [x / p.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if p.top_k is not None:
        order = order[: p.top_k]
    top = scaled[order[0]]
    weights = {token: math.exp(scaled[token] - top) for token in order}
    total = sum(weights.values())
    kept: dict[int, None] = {}
    mass = 0.0
    for token in order:
        kept[token] = None
        mass += weights[token] / total
        if mass >= p.top_p:
            break
    kept = {token: None for token in kept if weights[token] >= p.min_p * weights[order[0]]}
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def pick(probs: list[float], u: float) -> int:
    mass = 0.0
    for token, prob in enumerate(probs):
        mass += prob
        if mass > u:
            return token
    raise AssertionError("probabilities do not reach the point")


RULES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.9, "top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
    {"min_p": 0.2},
]


def test_mixed_batch_equals_plain_rules_one_by_one() -> None:
    logits = random_logits(200)
    rows = [row(position=i, seed=7 * i, **RULES[i % len(RULES)]) for i in range(200)]
    got = [draw.token for draw in sample(logits.clone(), rows)]
    want = [
        pick(plain_probs(logits[i].tolist(), r.params), uniform(r.params.seed, r.position)) for i, r in enumerate(rows)
    ]
    assert got == want


WIDE_RULES: list[dict[str, Any]] = [
    *RULES,
    {"top_k": 2000},
    {"top_k": 1024, "top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
    {"min_p": 1e-9},
]


@pytest.mark.parametrize("vocab", [1024, 3000, 20_001])
@pytest.mark.parametrize("spread", [0.5, 6.0], ids=["flat", "peaked"])
def test_rows_whose_choice_fits_the_candidates_and_rows_whose_does_not(vocab: int, spread: float) -> None:
    """Both in one batch, against plain rules: where the vocabulary is larger than the candidates, and in groups."""
    count = 2 * len(WIDE_RULES)
    logits = random_logits(count, seed=4, vocab=vocab) * spread / 3
    rows = [row(position=i, seed=11 * i, **WIDE_RULES[i % len(WIDE_RULES)]) for i in range(count)]
    got = [draw.token for draw in sample(logits.clone(), rows)]
    probs = [plain_probs(logits[i].tolist(), r.params) for i, r in enumerate(rows)]
    assert got == [pick(p, uniform(r.params.seed, r.position)) for p, r in zip(probs, rows, strict=True)]
    assert got == [sample(logits[i : i + 1].clone(), [r])[0].token for i, r in enumerate(rows)]


@pytest.mark.parametrize("rules", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 1500, "top_p": 0.3}, {"min_p": 0.9}])
def test_ties_with_the_last_one_kept_stay(rules: dict[str, Any]) -> None:
    """2,000 equal logits, more than there are candidates: top-k and top-p cannot tell them apart."""
    logits = torch.full((400, 20_000), -50.0)
    logits[:, 5_000:7_000] = 1.0
    tokens = [draw.token for draw in sample(logits, [row(position=i, **rules) for i in range(400)])]
    assert min(tokens) < 5_100
    assert 6_900 < max(tokens) < 7_000


@pytest.mark.parametrize("allowed", [(0,), (511, 512), (600, 1023), (0, 511, 1024, 1299), (1299,)])
def test_only_tokens_with_weight_are_drawn(allowed: tuple[int, ...]) -> None:
    """Wherever they stand: at the ends of the blocks in which weights are summed, and in the last, shorter one."""
    logits = torch.full((300, 1_300), -1e30)
    logits[:, list(allowed)] = 1.0
    tokens = [draw.token for draw in sample(logits, [row(position=i) for i in range(300)])]
    assert set(tokens) == set(allowed)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = random_logits(60)
    rows = [row(position=i, seed=i, **RULES[i % len(RULES)]) for i in range(60)]
    rows[10] = row(temperature=0.0)
    together = [draw.token for draw in sample(logits.clone(), rows)]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0].token for i in range(60)]
    assert together == alone


def test_greedy_takes_the_largest() -> None:
    logits = random_logits(20)
    draws = sample(logits.clone(), [row(temperature=0.0, seed=i) for i in range(20)])
    assert [draw.token for draw in draws] == logits.argmax(-1).tolist()
    assert all(draw.logprobs is None for draw in draws)


@pytest.mark.parametrize("rules", RULES)
def test_frequencies_follow_the_distribution(rules: dict[str, Any]) -> None:
    """Chi-square over 4000 positions of one seed; fixed, so it never flickers."""
    logits, count = random_logits(1, seed=3)[0], 4000
    want = plain_probs(logits.tolist(), params(**rules))
    rows = [row(position=i, seed=99, **rules) for i in range(count)]
    drawn = [draw.token for draw in sample(logits.repeat(count, 1), rows)]
    observed = [drawn.count(token) for token in range(VOCAB)]
    assert all(prob > 0 for token, prob in enumerate(want) if observed[token])
    cells = [(seen, prob * count) for seen, prob in zip(observed, want, strict=True) if prob * count >= 5]
    chi = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    assert chi < len(cells) + 4 * math.sqrt(2 * len(cells))


def test_uniform_numbers() -> None:
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) > 9990
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert uniform(1, 2) == uniform(1, 2)
    assert uniform(2**64 - 1, 2**31) != uniform(2**64 - 1, 2**31 + 1)


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    golden = 0x9E3779B97F4A7C15
    assert uniform(5 + golden, 0) != uniform(5, 1)


def test_the_nucleus_may_be_wider_than_the_candidates() -> None:
    vocab = 5000
    logits = torch.zeros(1, vocab) + torch.linspace(0, 1e-3, vocab)
    tokens = [sample(logits.clone(), [row(position=i, top_p=0.5)])[0].token for i in range(60)]
    assert min(tokens) >= vocab // 2 - 10
    assert min(tokens) < vocab * 0.6


@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_what_changes_nothing_may_be_left_out(repetition: float) -> None:
    """To the bit, of zeros with either sign, too."""
    line, own = random_logits(1)[0], history([3, 4], [4, 5, 5, 7])
    line[2:6] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    rules = params(repetition_penalty=repetition, frequency_penalty=0.3, presence_penalty=-0.1)
    want = penalised(line, own.seen, own.output_counts, Penalties.of(rules, line.device))
    assert torch.equal(penalised_row(line, rules, own).view(torch.int32), want.view(torch.int32))


def test_penalties() -> None:
    logits = random_logits(1, seed=5)
    past = history(prompt=[1, 2, 2, 3], output=[3, 4, 4])
    rules: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.3}
    want = logits[0].clone()
    for token in (1, 2, 3, 4):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    for token, times in ((3, 1), (4, 2)):
        want[token] += 0.3 - 0.4 * times
    got = logits.clone()
    sample(got, [row(history=past, temperature=0.0, **rules)])
    torch.testing.assert_close(got[0], want)


def test_logit_bias_and_min_tokens() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    bias: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((7, 100.0), (best, -50.0))}
    assert sample(logits.clone(), [row(**bias)])[0].token == 7
    stop: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (best, 7), "min_tokens": 3}
    assert sample(logits.clone(), [row(position=2, **stop)])[0].token not in (best, 7)
    assert sample(logits.clone(), [row(position=3, **stop)])[0].token == best
    biased_stop = row(position=0, **stop, logit_bias=((7, 100.0),))
    assert sample(logits.clone(), [biased_stop])[0].token != 7


def test_what_is_known_to_be_the_largest_is_taken_where_no_rule_changes_logits() -> None:
    """Named here is another token, to see who takes it."""
    logits = random_logits(1)
    best, named = int(logits.argmax()), [int(logits.argmin())]
    greedy: dict[str, Any] = {"temperature": 0.0}

    def token(**rules: Any) -> int:
        return sample(logits.clone(), [row(position=1, **rules)], named)[0].token

    assert token(**greedy) == named[0]
    assert token(**greedy, stop_token_ids=(best,)) == named[0]
    assert token(**greedy, stop_token_ids=(named[0],), min_tokens=3) == best
    assert token(**greedy, logit_bias=((named[0], -1.0),)) == best
    assert token(temperature=1.0, top_k=1) == best
    draws = sample(torch.cat((logits, logits)), [row(**greedy), row(temperature=1.0, top_k=1)], named * 2)
    assert [draw.token for draw in draws] == [named[0], best]


EXTREMES: list[dict[str, Any]] = [
    *({"temperature": t} for t in (1e-9, 1e-30, 1e-38, 1e-45, 5e-324)),
    {"temperature": 1.0, "repetition_penalty": 5e-324},
    {"temperature": 2.0, "repetition_penalty": 1e-30},
    {"temperature": 2e-5, "top_k": 1, "top_p": 5e-324, "min_p": 1.0},
    {"temperature": 1.0, "stop_token_ids": tuple(range(VOCAB)), "min_tokens": 8},
]


@pytest.mark.parametrize("rules", EXTREMES)
def test_the_extremes_of_every_rule_draw_a_token_of_the_vocabulary(rules: dict[str, Any]) -> None:
    """And the rows beside them draw what they would have drawn alone."""
    logits = random_logits(3, seed=2)
    past = history(prompt=list(range(10)), output=[int(logits[1].argmax())])
    rows = [row(seed=5), row(history=past, **rules), row(seed=6)]
    draws = sample(logits.clone(), rows)
    assert 0 <= draws[1].token < VOCAB
    for index in (0, 2):
        assert draws[index] == sample(logits[index : index + 1].clone(), [rows[index]])[0]


def test_a_temperature_close_to_zero_is_greedy() -> None:
    logits = random_logits(8)
    for temperature in (2e-5, 1e-5, 1e-9, 1e-38, 5e-324):
        draws = sample(logits.clone(), [row(temperature=temperature, seed=i) for i in range(8)])
        assert [draw.token for draw in draws] == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(4)
    rows = [
        row(logprobs=0, temperature=0.5, logit_bias=((7, 100.0),)),
        row(temperature=0.0),
        row(logprobs=3, top_k=1),
        row(logprobs=VOCAB + 9, temperature=0.0),
    ]
    draws = sample(logits.clone(), rows)
    raw = logits.log_softmax(-1)
    first, _, third, last = (draw.logprobs for draw in draws)
    assert first is not None
    assert (draws[0].token, first.top) == (7, ())
    assert first.logprob == pytest.approx(raw[0, 7].item())
    assert draws[1].logprobs is None
    assert third is not None
    assert [token for token, _ in third.top] == raw[2].topk(3).indices.tolist()
    assert third.top[0] == (draws[2].token, third.logprob)
    assert last is not None
    assert len(last.top) == VOCAB
    assert sum(math.exp(value) for _, value in last.top) == pytest.approx(1.0, abs=1e-5)


def test_token_logprobs() -> None:
    logits = random_logits(3)
    found = token_logprobs(logits, torch.tensor([4, 5, 6]), 2)
    raw = logits.log_softmax(-1)
    assert [entry.logprob for entry in found] == pytest.approx([raw[i, 4 + i].item() for i in range(3)])
    assert [[token for token, _ in entry.top] for entry in found] == raw.topk(2).indices.tolist()
    assert all(entry.top == () for entry in token_logprobs(logits, torch.tensor([4, 5, 6]), 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_rows(bad: float) -> None:
    logits = random_logits(3)
    logits[1, 20] = bad
    assert finite_rows(logits) == [True, False, True]
    logits[2] = 3e38  # large, but numbers
    logits[2, 0] = -3e38
    assert finite_rows(logits)[2]
