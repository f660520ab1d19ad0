"""Bounds of numbers: what is followed allows no number that the schema excludes, what is not is refused."""

import json
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary, GrammarError
from deltaserve.model.grammar_schemas import GrammarSchema
from deltaserve.model.number_bounds import loose_bound
from deltaserve.server.structured_output import json_grammar
from tests.fixtures.tiny_tokenizer import byte_level

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
VALUES = (-2, -1.5, -1, -0.5, -0.001, 0, 0.001, 0.5, 1, 1.5, 2, 3)
TEXTS = [f"{sign}{text}" for sign in ("", "-") for text in ("0", "0.0", "0.001", "0.5", "1", "1.0", "1.5", "2", "3")]
BYTES = LLTokenizer("byte")


def grammar_of(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def loose_of(schema: dict[str, Any]) -> str | None:
    return loose_bound(GrammarSchema(schema))


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return not matcher.is_error() and matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def satisfies(value: float, schema: dict[str, Any]) -> bool:
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


@pytest.mark.parametrize(("low", "high"), [*product(LOWER, UPPER)])
def test_what_is_followed_allows_nothing_else(low: str, high: str) -> None:
    num_followed = num_loose = 0
    for least, most in product(VALUES, VALUES):
        schema = {"type": "number", low: least, high: most}
        if least >= most:
            continue
        wrong = [t for t in TEXTS if allows(grammar_of(schema), t) and not satisfies(float(t), schema)]
        if loose_of(schema) is None:
            assert not wrong, schema
            num_followed += 1
        else:
            assert wrong, schema  # nothing is refused without need
            num_loose += 1
    assert num_followed > 30
    assert bool(num_loose) == (low in LOWER[1:] or high in UPPER[1:])


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]},
        {"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 7}]},
        {"properties": {"x": {"items": {"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}}}},
    ],
)
def test_a_loose_bound_is_refused_wherever_it_stands(schema: dict[str, Any]) -> None:
    tokenizer = byte_level(("<|eos|>",)).to_str()
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer, 257, (256,)))
    lark = json.dumps({"grammars": [{"lark_grammar": f"start: %json {json.dumps(schema)}"}]})
    for grammar in (json_grammar(schema, "schema"), lark):
        with pytest.raises(GrammarError, match="exclusiveM"):
            grammars.matcher(grammar)


def test_bounds_of_different_numbers_are_no_matter_of_each_other() -> None:
    price, share = {"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}
    assert loose_of({"properties": {"price": price, "share": share}}) is None


def test_bounds_in_a_constant_are_none() -> None:
    assert loose_of({"const": {"exclusiveMinimum": 1, "maximum": 1.5}}) is None
