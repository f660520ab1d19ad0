"""Answers of the model to drawn conversations, each compared with the right one, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import torch

from tools.calling.conversations import NOTED, UNKNOWN, Conversation, Shape, draw_conversation
from tools.calling.rows import Rows

ANY = Shape()
"""Conversations of all sizes that the model was trained with."""


class Kind(StrEnum):
    """What an answer does."""

    CALL = "a call"
    RESULT = "a result"
    FACT = "a fact"
    UNKNOWN = "unknown"
    NOTED = "noted"


@dataclass(slots=True)
class Score:
    right: int = 0
    answers: int = 0


def kind_of(conversation: Conversation, index: int) -> Kind:
    """What the answer at that index of the messages does."""
    message = conversation.messages[index]
    if "tool_calls" in message:
        return Kind.CALL
    if conversation.messages[index - 1]["role"] == "tool":
        return Kind.RESULT
    if message["content"] == NOTED:
        return Kind.NOTED
    return Kind.UNKNOWN if message["content"].endswith(f":{UNKNOWN}") else Kind.FACT


def right_answers(model: Any, rows: Rows, conversation: Conversation) -> list[bool]:
    """Whether greedy decoding gives each answer, behind the right ones before it.

    One pass is enough: a token is drawn behind the right ones, and counts only where all before it are right.
    """
    tokens = rows.tokens(conversation)
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()  # [T]: what follows token i
    return [all(best[at - 1] == tokens[at] for at in answer) for answer in rows.answers(tokens)]


def drawn(seed: int, count: int, shape: Shape = ANY) -> Sequence[Conversation]:
    rng = Random(f"conversations {seed}")
    return [draw_conversation(rng, shape) for _ in range(count)]


def grade(model: Any, rows: Rows, conversations: Sequence[Conversation]) -> dict[Kind, Score]:
    """Kind of answer |-> how many are right."""
    scores = {kind: Score() for kind in Kind}
    for kind, is_right in _judged(model, rows, conversations):
        scores[kind].answers += 1
        scores[kind].right += is_right
    return scores


def _judged(model: Any, rows: Rows, conversations: Sequence[Conversation]) -> Iterator[tuple[Kind, bool]]:
    for conversation in conversations:
        right = right_answers(model, rows, conversation)
        yield from ((kind_of(conversation, at), ok) for at, ok in zip(conversation.steps(), right, strict=True))
