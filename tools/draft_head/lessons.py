"""Chats as a head learns from them: batches of texts of about one length, and which tokens it chooses among."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tools.draft_head.chats import Chat

_WINDOW = 16
"""Batches within which texts are sorted by length: little padding, and each batch still a mixture."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """B chats, padded on the right to L tokens."""

    tokens: Tensor  # [B, L] int64
    read: Tensor  # [B, L, 3 * hidden] bfloat16
    asked: Tensor  # [M] int64 into B * L: positions behind which the model drew a token of an answer
    drawn: Tensor  # [M] int64: that token
    normed: Tensor  # [M, hidden] bfloat16: what the model's output matrix read there


def guessable_tokens(chats: Iterable[Chat], count: int, vocab_size: int) -> Tensor:
    """[count] int64, ascending: the most frequent tokens of answers, and where those are few the first of all."""
    seen = Counter(token for chat in chats for token in chat.tokens[chat.first + 1 :])
    ranked = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(ranked[:count]))


def lessons(chats: Sequence[Chat], size: int, rng: Random) -> Iterator[Lesson]:
    """All chats once, in an order drawn anew."""
    order = list(range(len(chats)))
    rng.shuffle(order)
    window = _WINDOW * size
    batches = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda index: len(chats[index].tokens))
        batches += [near[at : at + size] for at in range(0, len(near), size)]
    rng.shuffle(batches)
    for batch in batches:
        yield _lesson([chats[index] for index in batch])


def _lesson(chats: Sequence[Chat]) -> Lesson:
    length = max(len(chat.tokens) - 1 for chat in chats)
    tokens = torch.zeros(len(chats), length, dtype=torch.int64)
    read = torch.zeros(len(chats), length, chats[0].read.shape[1], dtype=torch.bfloat16)
    asked = []
    for line, chat in enumerate(chats):
        count = len(chat.tokens) - 1
        tokens[line, :count] = torch.tensor(chat.tokens[:count])
        read[line, :count] = chat.read
        asked.append(torch.arange(chat.first, count) + line * length)
    drawn = torch.tensor([token for chat in chats for token in chat.tokens[chat.first + 1 :]])
    return Lesson(tokens, read, torch.cat(asked), drawn, torch.cat([chat.normed for chat in chats]))
