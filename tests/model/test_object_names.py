"""Names of members: a listed one is itself however it is spelled, and what is drawn is valid."""

import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from deltaserve.model.answer_grammars import AnswerGrammars, GrammarError
from deltaserve.model.object_names import with_exact_names
from deltaserve.server.structured_output import json_grammar, lark_grammar
from tests.model.drawn_texts import allows, byte_grammars, drawn_open_schema, drawn_text, names_in, spellings

INT = {"type": "integer"}
OPEN: dict[str, dict[str, Any]] = {
    "absent": {"properties": {"a": INT}},
    "true": {"properties": {"a": INT}, "additionalProperties": True},
    "annotated": {"properties": {"a": INT}, "additionalProperties": {"description": "anything"}},
    "by a schema": {"properties": {"a": INT}, "additionalProperties": {"type": "string"}},
    "required": {"properties": {"a": INT}, "required": ["a"]},
    "referred to": {"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": INT}}}},
    "by an anchor": {"$ref": "#o", "$defs": {"o": {"$anchor": "o", "properties": {"a": INT}}}},
    "through what is replaced": {
        "properties": {"a": INT, "b": {"$ref": "#/additionalProperties"}},
        "additionalProperties": {"description": "any"},
    },
    "together": {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]},
    "together by schemas": {
        "allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}, "additionalProperties": {"maxLength": 3}}]
    },
    "one of": {"oneOf": [{"properties": {"a": INT}, "required": ["a"]}]},
    "beside a pattern": {"properties": {"a": INT}, "patternProperties": {"^b": INT}},
    "by a pattern": {"patternProperties": {"^a": INT}},
    "beside a closed one with a pattern": {
        "properties": {"a": INT},
        "anyOf": [{}, {"patternProperties": {"^a": {}}, "additionalProperties": False}],
    },
}
GRAMMARS = byte_grammars()


@pytest.mark.parametrize("name", OPEN)
def test_a_listed_name_spelled_with_escapes_is_no_other_name(name: str) -> None:
    schema = {"type": "object", **OPEN[name]}
    for grammar in (json_grammar(schema, "schema", ""), lark_grammar(f"start: %json {json.dumps(schema)}")):
        matcher = GRAMMARS.matcher(grammar)
        assert allows(matcher, '{"a":1}')
        for text in (r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', '{"a":"x"}'):
            assert not allows(matcher, text), text


@pytest.mark.parametrize("key", ["\n", "\x01", "\x7f", "\x80", 'q"\\/', "größe", "🦊", "a\tb", "", " "])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"": {"type": ["integer", "string"]}}, "additionalProperties": False},
    ],
)
def test_any_listed_name_has_the_value_of_its_schema(key: str, others: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {key: INT}, **others}
    matcher = GRAMMARS.matcher(json_grammar(schema, "schema", ""))
    texts = [f"{spelling}:{value}" for spelling in spellings(key) for value in ("1", '"x"')]
    allowed = [text for text in texts if allows(matcher, f"{{{text}}}")]
    assert allowed and all(text.endswith(":1") for text in allowed)


def test_other_names_may_be_any() -> None:
    """Control characters among them; what is no control character is spelled as itself."""
    matcher = GRAMMARS.matcher(json_grammar({"type": "object", "properties": {"a": INT}}, "schema", ""))
    for name in ("b", "aa", "", "é", "🦊", r"\n", r"\u000a", r"\u001b", r"\"", r"\\"):
        assert allows(matcher, f'{{"a":1,"{name}":"\\u001b"}}'), name


def test_what_lists_no_names_or_allows_no_others_stays_as_it_is() -> None:
    for schema in (
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}, "required": ["a"]},
        {"type": "object", "properties": {"a": INT}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^a": INT}, "additionalProperties": False},
        {"const": {"properties": {"a": 1}}},
    ):
        grammar = json_grammar(dict(schema), "schema")
        assert with_exact_names(grammar) is grammar


@pytest.mark.parametrize(
    "odd",
    [
        *({"x-guidance": 5}, {"x-guidance": {"json_allowed_escapes": 5}}, {"$ref": 5}, {"properties": 5}),
        *({"required": 5}, {"allOf": 5}, {"patternProperties": 5}, {"$ref": "#/a%zz"}, {"anyOf": {}}),
    ],
)
def test_what_is_no_schema_is_refused_and_nothing_else_happens(odd: dict[str, Any]) -> None:
    schema = {"properties": {"a": INT}, "additionalProperties": INT, "minProperties": 2, "required": ["a"], **odd}
    with pytest.raises(GrammarError):
        GRAMMARS.matcher(lark_grammar(f"start: %json {json.dumps(schema)}"))


def test_the_options_of_a_schema_in_lark_stay() -> None:
    options = {"whitespace_flexible": False, "json_allow_general_unicode_escapes": True}
    for others in ({}, {"additionalProperties": {"type": "string"}}):
        schema = {"type": "object", "properties": {"a": INT}, **others, "x-guidance": options}
        matcher = GRAMMARS.matcher(lark_grammar(f"start: %json {json.dumps(schema)}"))
        assert allows(matcher, '{"a":1,"b":"x"}')
        for text in (r'{"\u0061":"x"}', '{"a": 1}'):
            assert not allows(matcher, text)


def test_schemas_in_lark_are_replaced_where_they_stand() -> None:
    lark = 'start: "é" %json {"properties": {"a": {}}} | %json\n {"type": "null"} | "%json {" end\nend: "x"'
    new = json.loads(with_exact_names(lark_grammar(lark)))["grammars"][0]["lark_grammar"]
    assert re.sub(r', "patternProperties": \{"": \{\}\}, "additionalProperties": false', "", new) == lark
    assert new != lark


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 300, 100)], ids=str)
def test_what_is_drawn_by_open_schemas_is_valid(seeds: range) -> None:
    grammars, num_followed, num_ended = byte_grammars(), 0, 0
    for seed in seeds:
        schema, draw = drawn_open_schema(seed), Random(seed)
        if (matcher := followed(grammars, schema)) is None:
            continue
        num_followed += 1
        lures = [spelling for name in {*names_in(schema)} for spelling in spellings(name)]
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for _ in range(4):
            text = drawn_text(matcher.deep_copy(), draw, sorted(lures))
            if text is not None:
                num_ended += 1
                assert validator.is_valid(json.loads(with_usual_times(text))), (seed, schema, text)
    assert num_followed > 0.7 * len(seeds) and num_ended > num_followed


def with_usual_times(text: str) -> str:
    """What the grammars of formats allow in any minute and in any year."""
    return re.sub(r"(\d\d:\d\d):60", r"\1:59", text).replace("-02-29", "-02-28")


def followed(grammars: AnswerGrammars, schema: dict[str, Any]) -> Any:
    """None: it is refused, as what drawn schemas ask for together may be."""
    try:
        return grammars.matcher(json_grammar(schema, "schema", ""))
    except GrammarError as error:
        assert "allOf" in schema or "patternProperties" in json.dumps(schema), error
        return None
