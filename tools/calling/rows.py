"""Training rows: whole conversations, and labels on the answers only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from tools.calling.conversations import Conversation, Shape, draw_conversation
from tools.recall.rows import UNLABELLED, Batch
from tools.recall.tokenizer import IM_END_ID, IM_START_ID, PAD_ID


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the curriculum."""

    shape: Shape
    num_rows: int


class Rows:
    """Draws conversations and writes them with the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._assistant_id = tokenizer.convert_tokens_to_ids("assistant")

    def tokens(self, conversation: Conversation) -> list[int]:
        """All of a conversation, up to the line break behind its last answer."""
        tools = [tool.as_json() for tool in conversation.tools]
        messages = list(conversation.messages)
        text = self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def answers(self, tokens: Sequence[int]) -> Iterator[range]:
        """Where each answer stands, its end with it."""
        for at in range(len(tokens) - 2):
            if tokens[at] == IM_START_ID and tokens[at + 1] == self._assistant_id:
                begin = at + 3  # behind the line break
                yield range(begin, tokens.index(IM_END_ID, begin) + 1)

    def batch(self, rng: Random, stage: Stage) -> Batch:
        """Rows as long as the longest of them."""
        rows = [self.tokens(draw_conversation(rng, stage.shape)) for _ in range(stage.num_rows)]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
        labels = torch.full_like(tokens, UNLABELLED)
        for index, row in enumerate(rows):
            for answer in self.answers(row):
                labels[index, answer.start - 1 : answer.stop - 1] = tokens[index, answer.start : answer.stop]
        return Batch(tokens, labels)
