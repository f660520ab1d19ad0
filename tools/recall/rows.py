"""Training rows: a document, questions about it, and labels on the answers only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from deltaserve.commands.load.recall import ASK, SEPARATOR, Document, DocumentShape, expected_chain, make_document
from tools.recall.tokenizer import ASSISTANT_ID, IM_END_ID, IM_START_ID, USER_ID

UNLABELLED = -100
"""The label cross_entropy ignores."""
CHAT_ANSWER_LEN = 8
"""Names in a chat answer after the one asked for. `<|im_end|>` follows them."""
LONGEST = 96
"""Names in an answer at most."""
INTRODUCTIONS = (b"", b"", b"Facts:", b"Here are some facts.\n", b"These are the facts:\n", b"Read this:")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the curriculum."""

    min_facts: int
    max_facts: int
    max_noise: float
    """Noise bytes per fact."""
    width: int
    """Tokens per row."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class Variety:
    """What rows differ in besides their facts, as shares of rows, 0 to 1."""

    chat: float = 0.0
    """Through the chat template."""
    round_trip: float = 0.0
    """Answers may go round the cycle. Not at first: the model would learn to copy from its own answer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Both # [rows, width] int64."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(slots=True)
class Row:
    """`labels[i]` is the token that must follow `tokens[i]`, or UNLABELLED."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def given(self, tokens: Iterable[int]) -> None:
        """Append context: nothing to learn from it."""
        self.tokens += tokens
        self.labels += [UNLABELLED] * (len(self.tokens) - len(self.labels))

    def answered(self, tokens: Sequence[int]) -> None:
        """Append an answer, each of whose tokens must be predicted from all before it."""
        self.labels[-1] = tokens[0]
        self.tokens += tokens
        self.labels += [*tokens[1:], UNLABELLED]


def make_batch(rng: Random, stage: Stage, variety: Variety) -> Batch:
    """Rows of `stage.width` tokens, cut or padded on the right."""
    num_facts = rng.randint(stage.min_facts, stage.max_facts)
    rows = []
    for _ in range(stage.num_rows):
        noise = stage.max_noise * rng.choice((0.0, 0.5, 1.0))
        document = make_document(rng, DocumentShape(num_facts, int(noise * num_facts)))
        if rng.random() < variety.chat:
            rows.append(chat_row(rng, document, stage.width))
        else:
            longest = LONGEST if rng.random() < variety.round_trip else num_facts - 1
            rows.append(plain_row(rng, document, stage.width, longest))
    tokens = [_fit(row.tokens, stage.width, SEPARATOR) for row in rows]
    labels = [_fit(row.labels, stage.width, UNLABELLED) for row in rows]
    return Batch(torch.tensor(tokens), torch.tensor(labels))


def _fit(values: list[int], width: int, padding: int) -> list[int]:
    return values[:width] + [padding] * (width - len(values))


def plain_row(rng: Random, document: Document, width: int, longest: int) -> Row:
    """document ? a chain ? b chain ...: what a client of /v1/completions sends, turn after turn.

    Chains have at most `longest` names.
    """
    row = Row()
    row.given(document.tokens)
    for start, chain in questions(rng, document, min(longest, rng.randint(4, rng.choice((12, 24, LONGEST))))):
        if len(row.tokens) + 2 >= width:
            break
        row.given((ASK, start))
        row.answered(chain)
    return row


def chat_row(rng: Random, document: Document, width: int) -> Row:
    """The same through the chat template: an answer is the name asked for, CHAT_ANSWER_LEN more, and the end."""
    row = Row()
    row.given((IM_START_ID, USER_ID, *b"\n", *rng.choice(INTRODUCTIONS), *document.tokens, *rng.choice((b"", b"\n"))))
    for start, chain in questions(rng, document, CHAT_ANSWER_LEN):
        if len(row.tokens) >= width:
            break
        row.given((ASK, start, IM_END_ID, *b"\n", IM_START_ID, ASSISTANT_ID, *b"\n"))
        row.answered((start, *chain, IM_END_ID))
        row.given((*b"\n", IM_START_ID, USER_ID, *b"\n"))
    return row


def questions(rng: Random, document: Document, answer_len: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(start, chain of answer_len) pairs, for ever.

    Half of the time the first ones are disjoint arcs of the cycle, so that no fact has been told by an earlier answer.
    """
    names = list(document.successor)
    if rng.random() < 0.5:
        cycle = (start := rng.choice(names), *expected_chain(document, start, len(names) - 1))
        starts = list(cycle[: len(cycle) - answer_len : answer_len])
        rng.shuffle(starts)
        yield from ((start, expected_chain(document, start, answer_len)) for start in starts)
    while True:
        start = rng.choice(names)
        yield start, expected_chain(document, start, answer_len)
