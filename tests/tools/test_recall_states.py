"""The micro-model of states is right, and nothing but the state of a document makes it so."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from deltaserve.commands.load.recall import ASK, Document, DocumentShape, expected_chain, make_document
from tests.recall_models import STATE_MODEL
from tools.recall.evaluate import Exam, grade

SHAPE = DocumentShape(22, 11)
ANSWER_LEN = 10


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(STATE_MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "exam",
    [Exam(DocumentShape(8), 4), Exam(DocumentShape(16, 8), 4), Exam(SHAPE, 4, num_turns=3, answer_len=10)],
    ids=str,
)
def test_every_answer_is_right(model: Any, exam: Exam) -> None:
    score = grade(model, exam, seed=2)
    assert (score.tokens_right, score.answers_right) == (score.tokens, score.answers)


def lost(own: Any, other: Any) -> None:
    own.layers[1].recurrent_states[0].zero_()


def foreign(own: Any, other: Any) -> None:
    """Give it the states of a document of the same length."""
    own.layers[1].recurrent_states[0].copy_(other.layers[1].recurrent_states[0])


def foreign_keys(own: Any, other: Any) -> None:
    own.layers[0].keys.copy_(other.layers[0].keys)
    own.layers[0].values.copy_(other.layers[0].values)


@pytest.mark.parametrize(("damage", "most", "least"), [(lost, 0.2, 0.0), (foreign, 0.2, 0.0), (foreign_keys, 1.0, 0.9)])
def test_the_state_alone_says_what_is_right(
    model: Any, damage: Callable[[Any, Any], None], most: float, least: float
) -> None:
    rng = Random(7)
    right = 0
    for _ in range(4):
        documents = make_document(rng, SHAPE), make_document(rng, SHAPE)
        own, other = (read(model, document) for document in documents)
        with torch.inference_mode():
            damage(own, other)
        start = rng.choice(list(documents[0].successor))
        want = expected_chain(documents[0], start, ANSWER_LEN)
        right += sum(a == b for a, b in zip(answer(model, own, start), want, strict=True))
    assert least <= right / (4 * ANSWER_LEN) <= most


def read(model: Any, document: Document) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([document.tokens]), past_key_values=cache, use_cache=True)
    return cache


def answer(model: Any, cache: Any, start: int) -> list[int]:
    given, told = [ASK, start], list[int]()
    for _ in range(ANSWER_LEN):
        with torch.inference_mode():
            logits = model(torch.tensor([given]), past_key_values=cache, use_cache=True).logits
        told.append(int(logits[0, -1].argmax()))
        given = told[-1:]
    return told


def test_the_folder_is_small_and_says_how_good_it_is() -> None:
    assert sum(file.stat().st_size for file in STATE_MODEL.iterdir()) <= 2 * 2**20
    scores = json.loads((STATE_MODEL / "recall.json").read_text())["scores"]
    assert scores["16 facts, 8 noise bytes"]["tokens_right"] == scores["16 facts, 8 noise bytes"]["tokens"]
