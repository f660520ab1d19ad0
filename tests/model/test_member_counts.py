"""Least numbers of members: what is followed allows no object of fewer, what is not is refused, and nothing else."""

import json
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from deltaserve.model.answer_grammars import GrammarError
from deltaserve.model.grammar_schemas import GrammarSchema
from deltaserve.model.member_counts import loose_count
from deltaserve.server.structured_output import json_grammar, lark_grammar
from tests.model.drawn_texts import allows, byte_grammars

Schema = dict[str, Any]
GRAMMARS, BYTES = byte_grammars(), LLTokenizer("byte")
TWO: Schema = {"type": "object", "minProperties": 2}
REFUSED: tuple[Schema, ...] = (
    TWO,
    {"minProperties": 3, "required": ["a"]},
    {"type": ["string", "object"], "minProperties": 2},
    {"properties": {"p": {"items": TWO}}},
    {"properties": {"p": False}, "minProperties": 2},
    {"$ref": "#/$defs/d", "$defs": {"d": {"anyOf": [{"type": "null"}, TWO]}}},
    {"allOf": [TWO, {"required": ["a"]}, {"minProperties": 3}]},
    {**TWO, "anyOf": [{"required": ["a", "b"]}, {"title": "any"}]},
    {"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2},
    {"additionalProperties": {"prefixItems": [TWO]}},
    {"$ref": "#d", "$defs": {"d": {**TWO, "$anchor": "d"}}},
    {**TWO, "maxProperties": 2},
)
FOLLOWED: tuple[Schema, ...] = (
    {"type": "object", "minProperties": 1},
    {**TWO, "required": ["a"]},
    {**TWO, "required": ["a", "b"], "properties": {"a": {"const": 1}}},
    {"allOf": [TWO, {"required": ["a"]}]},
    {"$ref": "#/$defs/d", "required": ["a"], "$defs": {"d": TWO}},
    {"required": ["a"], "anyOf": [TWO, {"minProperties": 3, "required": ["b"]}]},
    {**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "oneOf": [{"required": ["c"]}]},
    {"allOf": [{"properties": {"p": TWO}}, {"properties": {"p": {"required": ["a"]}}}]},
    {**TWO, "enum": [{"a": 1, "b": 1}]},
    {"const": {"minProperties": 2}},
    {"type": "string", "minProperties": 2},
    {"anyOf": [{"type": "object"}, {**TWO, "additionalProperties": False}]},
    {"anyOf": [{"type": "object"}, {"minProperties": 3, "maxProperties": 2}]},
    {"type": "object", "$defs": {"unused": TWO}, "default": {"minProperties": 2}},
)


def matcher_of(schema: Schema) -> LLMatcher:
    return GRAMMARS.matcher(json_grammar(schema, "schema", ""))


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_a_number_that_one_name_could_come_to_is_refused_by_name(schema: Schema) -> None:
    for grammar in (json_grammar(schema, "schema"), lark_grammar(f"start: %json {json.dumps(schema)}")):
        with pytest.raises(GrammarError, match="minProperties"):
            GRAMMARS.matcher(grammar)


@pytest.mark.parametrize("schema", FOLLOWED, ids=str)
def test_a_number_that_required_names_come_to_is_followed(schema: Schema) -> None:
    assert not matcher_of(schema).is_error()


def test_too_many_alternatives_are_refused_at_once() -> None:
    many: list[Schema] = [{} for _ in range(5000)]
    for schema in ({**TWO, "anyOf": many, "oneOf": many}, {"allOf": [{"anyOf": many[:50]}] * 50, **TWO}):
        assert "minProperties" in str(loose_count(GrammarSchema(schema)))


def drawn_object(draw: Random, depth: int) -> Schema:
    some: list[Schema] = [
        {},
        {"required": draw.sample("ab", draw.randint(1, 2))},
        {"minProperties": draw.randint(1, 4)},
    ]
    some += [{"minProperties": draw.randint(1, 4)}, {"maxProperties": draw.randint(0, 4)}, {"type": "object"}]
    some += [{"properties": {name: {} for name in draw.sample("ab", draw.randint(1, 2))}}]
    some += [{"additionalProperties": draw.choice((False, {"type": "integer"}))}, {"$ref": "#/$defs/d"}]
    if depth:
        parts = [drawn_object(draw, depth - 1) for _ in range(draw.randint(1, 2))]
        some += [{draw.choice(("allOf", "anyOf")): parts}] * 3
    found: Schema = {}
    for each in draw.sample(some, draw.randint(1, 4)):
        found |= each
    return found


TEXTS = [
    "{" + ",".join(f'"{name}":1' for name in (*listed, *others)) + "}"
    for listed in ((), "a", "b", "ab", "ba")
    for others in ((), "z", "zz", "zzz", "zzzz", "zy", "zyz", "zyx", "zyxw")
]


@pytest.mark.parametrize("is_inner", [False, True])
def test_what_is_followed_allows_nothing_else(is_inner: bool) -> None:
    num_followed = num_loose = 0
    for seed in range(250):
        draw = Random(seed)
        schema = {**drawn_object(draw, 2), "$defs": {"d": drawn_object(draw, 0) | {"$ref": "#/$defs/e"}, "e": {}}}
        if is_inner:
            names = {"required": ["p"], "additionalProperties": False, "type": "object"}
            definitions = schema.pop("$defs")
            schema = {"$defs": definitions, "properties": {"p": schema}, **names}
        texts = [f'{{"p":{text}}}' if is_inner else text for text in TEXTS]
        told = loose_count(GrammarSchema(schema))
        if told is None:
            try:
                matcher = matcher_of(schema)
            except GrammarError:
                continue
            num_followed += 1
        else:
            matcher = loose_matcher(schema)
            if matcher.is_error():
                continue
            num_loose += 1
        is_valid = jsonschema_rs.Draft202012Validator(schema).is_valid
        wrong = [text for text in texts if not is_valid(json.loads(text)) and allows(matcher, text)]
        if told is None or "anyOf" not in json.dumps(schema):  # what one alternative allows wrongly another may allow
            assert bool(wrong) == (told is not None), (seed, schema, told, wrong)
    assert num_followed > 50 and num_loose > 15


def loose_matcher(schema: Schema) -> LLMatcher:
    """As llguidance follows it."""
    return LLMatcher(BYTES, json_grammar(schema, "schema", ""), log_level=0)
