"""The recall task: questions whose answers can be computed from the document alone.

A document is a list of facts `a b ;` that form one cycle over its names, with noise between facts. After `? a` the
answer is next(a), next(next(a)), ...: every generated token is one more lookup in the document's KV, so a page that is
missing, stale or another request's changes the text. Ids are those of the recall tokenizer: bytes 0-255, eight special
tokens, three for the roles of a chat, then one id per name.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from deltaserve.commands.load.traffic import ChatTurn, Conversation

FIRST_NAME = 267
NUM_NAMES = 128
SEPARATOR = ord(";")
ASK = ord("?")
NOISE = tuple(ord(c) for c in string.ascii_letters + string.digits + " ,.:\n")


@dataclass(frozen=True, slots=True)
class Document:
    """A text of facts and what it says."""

    tokens: tuple[int, ...]
    successor: Mapping[int, int]
    """name |-> the name its fact leads to; one cycle over all names of the document."""


@dataclass(frozen=True, slots=True)
class DocumentShape:
    """How long a document is: `3 * num_facts + num_noise` tokens, whatever the seed."""

    num_facts: int
    num_noise: int = 0
    """Noise bytes, spread over random gaps between facts."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_facts <= NUM_NAMES:
            raise ValueError(f"num_facts is {self.num_facts}; a cycle needs 2 to {NUM_NAMES} facts")
        if self.num_noise < 0:
            raise ValueError(f"num_noise is {self.num_noise}; it cannot be negative")


def make_document(rng: Random, shape: DocumentShape) -> Document:
    """Two documents of one shape stand at the same positions and may share names, but say different things."""
    cycle = rng.sample(range(FIRST_NAME, FIRST_NAME + NUM_NAMES), shape.num_facts)
    successor = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    order = rng.sample(cycle, shape.num_facts)
    noisy = rng.sample(order, (shape.num_facts + 1) // 2)  # only half of the gaps, so facts also stand back to back
    noise: dict[int, list[int]] = {}
    for _ in range(shape.num_noise):
        noise.setdefault(rng.choice(noisy), []).append(rng.choice(NOISE))
    tokens: list[int] = []
    for name in order:
        tokens += [*noise.get(name, ()), name, successor[name], SEPARATOR]
    return Document(tuple(tokens), successor)


def expected_chain(document: Document, start: int, length: int) -> tuple[int, ...]:
    """The `length` names that a right answer to `? start` consists of."""
    chain = []
    for _ in range(length):
        start = document.successor[start]
        chain.append(start)
    return tuple(chain)


def make_question(document: Document, start: int, answer_len: int, context: tuple[int, ...] = ()) -> ChatTurn:
    """`context`, then the question for the names behind `start`; its answer is known."""
    answer = expected_chain(document, start, answer_len)
    return ChatTurn((*context, ASK, start), answer_len, stand_in=answer, expected=answer)


@dataclass(frozen=True, slots=True)
class RecallTraffic:
    """Shared documents are the prefixes, questions the suffixes, more questions the later turns."""

    num_documents: int
    conversations_per_document: int
    num_turns: int
    answer_len: int
    """Names per answer. More than num_facts - 1 go once round the cycle."""
    shape: DocumentShape

    def generate(self, seed: int) -> list[Conversation]:
        """num_documents * conversations_per_document conversations in shuffled order; every turn has its answer."""
        if min(self.num_documents, self.conversations_per_document, self.num_turns, self.answer_len) < 1:
            raise ValueError("documents, conversations per document, turns and answer length must be at least 1")
        rng = Random(f"recall {seed}")
        documents = [make_document(rng, self.shape) for _ in range(self.num_documents)]
        conversations = [
            self._conversation(rng, document) for document in documents for _ in range(self.conversations_per_document)
        ]
        rng.shuffle(conversations)
        return conversations

    def _conversation(self, rng: Random, document: Document) -> Conversation:
        turns: list[ChatTurn] = []
        for start in rng.choices(list(document.successor), k=self.num_turns):
            turns.append(make_question(document, start, self.answer_len, () if turns else document.tokens))
        return Conversation(tuple(turns))
