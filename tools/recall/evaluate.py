"""Greedy decoding through the model's own cache, compared token by token with the computed answers."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from deltaserve.commands.load.recall import ASK, Document, DocumentShape, expected_chain, make_document
from tools.recall.rows import CHAT_ANSWER_LEN
from tools.recall.tokenizer import ASSISTANT_ID, IM_END_ID, IM_START_ID, USER_ID


@dataclass(frozen=True, slots=True)
class Exam:
    """`num_documents` documents of one shape, `num_turns` questions about each, turn after turn."""

    shape: DocumentShape
    num_documents: int = 24
    num_turns: int = 1
    answer_len: int = 16
    chat: bool = False

    def __str__(self) -> str:
        noise = f", {self.shape.num_noise} noise bytes" if self.shape.num_noise else ""
        turns = f", {self.num_turns} turns" if self.num_turns > 1 else ""
        return f"{self.shape.num_facts} facts{noise}{turns}{', chat' if self.chat else ''}"


@dataclass(frozen=True, slots=True)
class Score:
    tokens_right: int
    tokens: int
    answers_right: int
    answers: int


def kv_exams() -> list[Exam]:
    """What the larger model is judged by: each size without noise and with the noise it was trained with."""
    sizes = ((8, 0), (16, 4), (32, 16), (64, 64), (96, 96), (120, 240))
    return [
        *(Exam(DocumentShape(facts)) for facts, _ in sizes),
        *(Exam(DocumentShape(facts, noise)) for facts, noise in sizes[1:]),
        *(Exam(DocumentShape(facts, facts // 2), num_documents=12, num_turns=6) for facts in (8, 16, 64, 96)),
        Exam(DocumentShape(120, 600)),
        Exam(DocumentShape(120, 1600)),
        *(
            Exam(DocumentShape(facts, facts // 2), num_turns=3, answer_len=CHAT_ANSWER_LEN, chat=True)
            for facts in (3, 12, 32, 64)
        ),
    ]


def state_exams() -> list[Exam]:
    """What the model of states is judged by."""
    sizes = ((8, 0), (16, 8), (24, 0), (24, 12), (32, 0), (32, 16))
    once = [Exam(DocumentShape(*size)) for size in sizes]
    return [*once, *(Exam(DocumentShape(*size), num_documents=12, num_turns=3, answer_len=12) for size in sizes)]


def grade(model: Any, exam: Exam, seed: int) -> Score:
    """Sit one exam. In multi-turn the model's own answers stay in its context, right or wrong."""
    rng = Random(f"{seed} {exam}")
    pairs = [pair for _ in range(exam.num_documents) for pair in _converse(model, exam, rng)]
    return Score(
        tokens_right=sum(got == want for answer, right in pairs for got, want in zip(answer, right, strict=True)),
        tokens=sum(len(right) for _, right in pairs),
        answers_right=sum(answer == right for answer, right in pairs),
        answers=len(pairs),
    )


def _converse(model: Any, exam: Exam, rng: Random) -> list[tuple[list[int], list[int]]]:
    """(answer given, right answer) of each turn about one new document."""
    document = make_document(rng, exam.shape)
    history, pairs = [], []
    for turn in range(exam.num_turns):
        start = rng.choice(list(document.successor))
        history += _question(exam, document if turn == 0 else None, start)
        chain = expected_chain(document, start, exam.answer_len)
        right = [start, *chain, IM_END_ID] if exam.chat else list(chain)
        answer = _generate(model, history, len(right))
        history += answer
        pairs.append((answer, right))
    return pairs


def _question(exam: Exam, document: Document | None, start: int) -> list[int]:
    facts = document.tokens if document else ()
    if not exam.chat:
        return [*facts, ASK, start]
    opening = b"" if document else b"\n"
    return [
        *opening,
        IM_START_ID,
        USER_ID,
        *b"\n",
        *facts,
        ASK,
        start,
        IM_END_ID,
        *b"\n",
        IM_START_ID,
        ASSISTANT_ID,
        *b"\n",
    ]


def _generate(model: Any, prompt: list[int], length: int) -> list[int]:
    """`length` greedy tokens; end tokens do not stop it."""
    answer: list[int] = []
    given, cache = prompt, None
    for _ in range(length):
        with torch.inference_mode():
            output = model(torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        answer.append(int(output.logits[0, -1].argmax()))
        given, cache = answer[-1:], output.past_key_values
    return answer
