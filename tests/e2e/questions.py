"""Questions about documents, of the micro-model that answers them all rightly: every token of an answer is looked up in
the document's KV."""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from tests.e2e.server import ROOT, Api

RECALL_MODEL = ROOT / "models" / "recall-micro"
NUM_FACTS = 64
"""Three tokens each."""


@dataclass(frozen=True, slots=True)
class AskedDocument:
    """A document with a question behind it, and the right answer."""

    prompt: list[int]
    answer: list[int]


def ask_about(num_documents: int, num_questions: int, answer_len: int, seed: int) -> list[AskedDocument]:
    """`num_questions` about each document, in an order of their own."""
    shape = DocumentShape(NUM_FACTS)
    traffic = RecallTraffic(num_documents, num_questions, num_turns=1, answer_len=answer_len, shape=shape)
    turns = [conversation.turns[0] for conversation in traffic.generate(seed)]
    return [AskedDocument(list(turn.tokens), list(turn.expected or ())) for turn in turns]


def answers_to(server: Api, asked: Sequence[AskedDocument]) -> list[list[int]]:
    """One after the other."""
    return [server.complete(one.prompt, len(one.answer)).tokens for one in asked]
