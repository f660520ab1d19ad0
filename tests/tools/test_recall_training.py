"""Training rows teach right answers only, and training is repeatable."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.commands.load.recall import ASK, FIRST_NAME, Document, DocumentShape, make_document
from tools.recall.model import make_kv_model
from tools.recall.rows import CHAT_ANSWER_LEN, UNLABELLED, Batch, Row, Stage, Variety, chat_row, make_batch, plain_row
from tools.recall.tokenizer import IM_END_ID, build_tokenizer
from tools.recall.train import STAGES, Curriculum, Recipe, learning_rate, train


def document(seed: int, num_facts: int = 12) -> Document:
    return make_document(Random(seed), DocumentShape(num_facts, num_noise=6))


def labelled(row: Row) -> list[tuple[int, int]]:
    return [(at, label) for at, label in enumerate(row.labels) if label != UNLABELLED]


@given(seed=st.integers(0, 500), num_facts=st.integers(4, 60))
def test_a_plain_row_asks_for_the_successor_of_each_token(seed: int, num_facts: int) -> None:
    facts = document(seed, num_facts)
    row = plain_row(Random(seed), facts, width=3 * num_facts + 60, longest=9)
    assert len(row.tokens) == len(row.labels)
    assert tuple(row.tokens[: len(facts.tokens)]) == facts.tokens
    answered = labelled(row)
    assert answered
    for at, label in answered:
        assert at >= len(facts.tokens)
        assert label == facts.successor[row.tokens[at]] == row.tokens[at + 1]


@given(seed=st.integers(0, 500))
def test_a_chat_row_restates_the_name_follows_the_chain_and_ends(seed: int) -> None:
    facts = document(seed)
    row = chat_row(Random(seed), facts, width=150)
    asked = [row.tokens[at + 1] for at, token in enumerate(row.tokens) if token == ASK]
    answers: list[list[int]] = []
    for at, label in labelled(row):
        assert label == row.tokens[at + 1]
        if row.labels[at - 1] == UNLABELLED:
            answers.append([])
        answers[-1].append(label)
    assert len(answers) == len(asked) > 1
    for name, answer in zip(asked, answers, strict=True):
        assert answer[0] == name
        assert answer[1:-1] == [facts.successor[told] for told in answer[:-2]]
        assert (len(answer), answer[-1]) == (CHAT_ANSWER_LEN + 2, IM_END_ID)


def test_a_chat_row_is_what_the_chat_template_makes() -> None:
    tokenizer = build_tokenizer(8192)
    row = chat_row(Random(3), document(3), width=60)
    at = labelled(row)[0][0] + 1
    user = tokenizer.decode(row.tokens[2 + 1 : row.tokens.index(IM_END_ID)])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode(prompt, add_special_tokens=False) == row.tokens[:at]


def test_batches_are_rectangular_and_repeatable() -> None:
    stage = Stage(min_facts=3, max_facts=10, max_noise=1.0, width=50, num_rows=7)
    variety = Variety(chat=0.5, round_trip=0.5)
    batch, again = make_batch(Random(1), stage, variety), make_batch(Random(1), stage, variety)
    assert batch.tokens.shape == batch.labels.shape == (7, 50)
    assert torch.equal(batch.tokens, again.tokens)
    right = batch.labels[:, :-1] != UNLABELLED
    assert torch.equal(batch.tokens[:, 1:][right], batch.labels[:, :-1][right])


def test_first_answers_do_not_go_round() -> None:
    stage = Stage(min_facts=4, max_facts=8, max_noise=0.0, width=64, num_rows=30)
    assert not any(goes_round(*row) for row in rows_of(make_batch(Random(1), stage, Variety())))
    assert any(goes_round(*row) for row in rows_of(make_batch(Random(1), stage, Variety(round_trip=0.5))))


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True))


def goes_round(tokens: list[int], labels: list[int]) -> bool:
    """Whether an answer comes to the name that was asked for."""
    asked = None
    for at, label in enumerate(labels):
        asked = tokens[at] if at and tokens[at - 1] == ASK else asked
        if label == asked:
            return True
    return False


def test_every_stage_has_documents_without_noise() -> None:
    for stage in STAGES:
        tokens = torch.cat([make_batch(Random(seed), stage, Variety()).tokens for seed in range(8)])
        letters = ((tokens < FIRST_NAME) & (tokens > ASK)).sum(dim=1)
        assert int(letters.min()) == 0
        assert bool((letters > 0).any()) == (stage.max_noise > 0)


def test_the_curriculum_moves_on_when_accurate_and_looks_back() -> None:
    curriculum = Curriculum(len(STAGES), Random(0))
    for _ in range(500):
        curriculum.record(0, 0.9)
    assert curriculum.level == 0
    for _ in range(200):
        curriculum.record(curriculum.level + 1, 1.0)
    assert curriculum.level == 0
    for _ in range(5000):
        curriculum.record(curriculum.level, 1.0)
    assert curriculum.level == len(STAGES) - 1
    assert {curriculum.choose() for _ in range(200)} == set(range(len(STAGES)))


def test_the_learning_rate_rises_then_falls() -> None:
    recipe = Recipe(num_steps=1000)
    rates = [learning_rate(recipe, step) for step in range(1000)]
    assert rates[0] < rates[50] < max(rates) <= recipe.peak_lr
    assert rates[999] < 0.03 * recipe.peak_lr


def test_equal_recipes_give_equal_weights(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        model = make_kv_model()
        train(model, Recipe(seed=seed, num_steps=3))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
