"""Schemas that only values without an end would satisfy are refused before a token is drawn; all others are not."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary, GrammarError
from deltaserve.server.structured_output import json_grammar, lark_grammar
from tests.fixtures.tiny_tokenizer import byte_level
from tools.drawn_schemas import drawn_schema

SELF: Mapping[str, Any] = {"$ref": "#"}
NEEDS: Mapping[str, Any] = {"properties": {"a": SELF}, "required": ["a"]}
ENDLESS: Mapping[str, Mapping[str, Any]] = {
    "a member": {"type": "object", **NEEDS},
    "no others": {"type": "object", "additionalProperties": False, **NEEDS},
    "an item": {"type": "array", "minItems": 1, "items": SELF},
    "a first item": {"type": "array", "minItems": 1, "prefixItems": [SELF]},
    "any member": {"type": "object", "minProperties": 1, "additionalProperties": SELF},
    "an unlisted member": {"type": "object", "required": ["a"], "additionalProperties": SELF},
    "both ways": {
        "anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "minItems": 1, "items": SELF}],
        "$defs": {"a": {"type": "object", "properties": {"b": SELF}, "required": ["b"]}},
    },
    "a ring": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/a"}},
        },
    },
    "a type beside": {"type": "object", "allOf": [NEEDS]},
    "either type": {"type": ["object", "array"], "minItems": 1, "items": SELF, **NEEDS},
}
ENDING: Mapping[str, Mapping[str, Any]] = {
    "a member that may be": {"type": "object", "properties": {"a": SELF}},
    "no item": {"type": "array", "items": SELF},
    "another type": {"type": ["object", "null"], **NEEDS},
    "any type": {**NEEDS},
    "another way": {"anyOf": [{"type": "object", **NEEDS}, {"type": "string"}]},
    "a list": {"type": "object", "properties": {"a": {"type": "array", "items": SELF}}, "required": ["a"]},
    "a first item of its own": {"type": "array", "minItems": 1, "prefixItems": [{"type": "null"}], "items": SELF},
    "a pattern": {
        "type": "object",
        "minProperties": 1,
        "patternProperties": {"^x": {"type": "null"}},
        "additionalProperties": SELF,
    },
}


@pytest.fixture(scope="module")
def grammars() -> AnswerGrammars:
    tokenizer = byte_level(())
    return AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 320, (0,)))


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("lark", [False, True])
def test_what_nothing_finite_satisfies_is_refused(grammars: AnswerGrammars, name: str, lark: bool) -> None:
    text = json_grammar({**ENDLESS[name]}, "schema")
    if lark:
        text = lark_grammar(f"start: %json {json.dumps(ENDLESS[name])}")
    with pytest.raises(GrammarError, match="no text of finite length"):
        grammars.matcher(text)


@pytest.mark.parametrize("name", ENDING)
def test_what_may_end_is_followed(grammars: AnswerGrammars, name: str) -> None:
    grammars.matcher(json_grammar({**ENDING[name]}, "schema"))


def test_drawn_schemas_end(grammars: AnswerGrammars) -> None:
    for seed in range(200):
        grammars.matcher(json_grammar(drawn_schema(seed), "schema"))


def test_a_long_chain_is_looked_through_at_once(grammars: AnswerGrammars) -> None:
    """From its end on: once for each link, however many there are."""
    size = 1000
    links = {f"d{n}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(size)}
    chain: dict[str, object] = {"$ref": "#/$defs/d0", "$defs": {**links, f"d{size}": {"type": "null"}}}
    grammars.matcher(json_grammar(chain, "schema"))
