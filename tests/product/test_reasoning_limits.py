"""Reasoning of a bounded length: the same answers however they are computed, and what follows reasoning is as asked.

A model without sense draws at temperature 1, so it reasons to the limit. One undisturbed worker says what is right.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.ids import Role
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams
from deltaserve.server.structured_output import json_grammar
from deltaserve.server.text.answers.answer_choice import FORMATS
from deltaserve.server.text.answers.answer_grammar import AnswerShape, Calls, answer_grammar
from deltaserve.server.text.answers.answer_reader import PromptEnd
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.sim.process import Answer
from tests.compute.executor.world import random_tokens
from tests.fixtures.tiny_tokenizer import EOS_ID, SPECIALS
from tests.product.in_process import DECODE, UNIFIED, Pages, Product, Setup, member_name

MAX_TOKENS = 100
SEEDS = (1, 2)
LIMITS = (0, 1, 20)
THINK_END = SPECIALS.index("</think>") + 256
PLAIN = Setup(rounding=Rounding.OF_POSITION, context_len=320, max_running=16, num_contexts=16)
ROW: Mapping[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Wanted:
    """What follows reasoning."""

    calls: Calls
    content: str | None

    def check(self, text: str) -> None:
        if self.content is not None:
            assert json.loads(text)["s"] in "ab"
        elif self.calls is Calls.MUST:
            assert text.startswith("<tool_call>") and '"name": "f"' in text
            assert text.endswith("</tool_call>")


WANTED: Mapping[str, Wanted] = {
    "any text": Wanted(Calls.NONE, None),
    "JSON": Wanted(Calls.NONE, json_grammar(dict(ROW), "schema", "")),
    "a call": Wanted(Calls.MUST, None),
}
CASES = [(limit, name) for limit in LIMITS for name in WANTED]


def grammar_of(codec: TextCodec, limit: int, wanted: Wanted) -> str:
    hermes = FORMATS["hermes"]
    shape = AnswerShape(
        calls=wanted.calls,
        tools={"f": ROW},
        several=False,
        content=wanted.content,
        prompt_end=PromptEnd.INSIDE,
        most_reasoning=limit,
    )
    found = answer_grammar(shape, hermes, hermes, codec.marker_tokens)
    assert found is not None
    return found


def asked(product: Product, codec: TextCodec) -> list[Answer]:
    answers = []
    for number, (limit, name) in enumerate(CASES):
        grammar = grammar_of(codec, limit, WANTED[name])
        for seed in SEEDS:
            params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, stop_token_ids=(EOS_ID,), grammar=grammar)
            answers.append(product.ask(random_tokens(20 + number, number), params))
    return answers


def replaced(**changes: Any) -> Setup:
    return dataclasses.replace(PLAIN, **changes)


@pytest.fixture(scope="module")
def codec(tiny_models: Path) -> TextCodec:
    return TextCodec.load(tiny_models / "llama")


@pytest.fixture(scope="module")
def right(tiny_models: Path, codec: TextCodec) -> Sequence[tuple[int, ...]]:
    product = Product(tiny_models / "llama", 1, 1, setup=replaced(is_unified=True))
    answers = asked(product, codec)
    product.run_until(answers)
    num_at_limit = 0
    for answer, (limit, name) in zip(answers, [case for case in CASES for _ in SEEDS], strict=True):
        assert answer.error is None
        num_reasoning = answer.tokens.index(THINK_END)
        assert num_reasoning <= limit
        num_at_limit += num_reasoning == limit
        assert answer.tokens[num_reasoning + 1 :], "the answer goes on"
        if answer.finish == "stop":
            ids = answer.tokens[num_reasoning + 1 : -1]
            WANTED[name].check(codec.decode(ids).strip("\n"))
    assert num_at_limit > len(answers) // 2
    assert sum(answer.finish == "stop" for answer in answers) > len(answers) // 2
    product.close()
    return [tuple(answer.tokens) for answer in answers]


def check(product: Product, answers: Sequence[Answer], right: Sequence[tuple[int, ...]]) -> None:
    assert [answer.error for answer in answers] == [None] * len(right)
    assert [tuple(answer.tokens) for answer in answers] == list(right)
    product.close()


SETUPS: Mapping[str, tuple[Setup, Pages]] = {
    "prefill and decode": (PLAIN, Pages()),
    "rows that give their memory back": (replaced(num_contexts=1), Pages(4)),
    "guesses, prefill and decode": (replaced(drafting=(Role.DECODE,), guesses="NGRAM"), Pages()),
    "guesses, unified": (replaced(is_unified=True, drafting=(Role.UNIFIED,), guesses="NGRAM"), Pages()),
}


@pytest.mark.parametrize("name", SETUPS)
def test_reasoning_ends_at_its_limit_however_it_is_computed(
    name: str, tiny_models: Path, codec: TextCodec, right: Sequence[tuple[int, ...]]
) -> None:
    setup, pages = SETUPS[name]
    product = Product(tiny_models / "llama", 1, 1, pages, setup=setup)
    answers = asked(product, codec)
    product.run_until(answers)
    scheduler = product.worker(UNIFIED if setup.is_unified else DECODE).instance.parts.scheduler
    assert pages == Pages() or scheduler.running.num_retractions
    assert not setup.drafting or scheduler.steps.speculation.totals.num_verified
    check(product, answers, right)


def test_a_decode_worker_that_dies_while_its_requests_reason(
    tiny_models: Path, codec: TextCodec, right: Sequence[tuple[int, ...]]
) -> None:
    product = Product(tiny_models / "llama", 1, 1, setup=replaced(num_decode=2))
    answers = asked(product, codec)
    product.kill_in_the_middle(member_name(0), most=20)
    product.run_until(answers)
    check(product, answers, right)
