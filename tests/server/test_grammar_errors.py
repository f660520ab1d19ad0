"""What a client is told of a grammar that cannot be followed: the fault, and the field where the client wrote it."""

import asyncio
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.server.api_errors import ApiError
from deltaserve.server.settings import ServerSettings
from deltaserve.server.structured_output import Constraint, GrammarCheck, json_grammar
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine
from tools.drawn_schemas import drawn_schema

pytestmark = pytest.mark.anyio

FAULTS: Mapping[str, str] = {
    "root ::= [a": "Unexpected end of input at line 1, 'root ::= [a' ^ ''",
    "root ::= [a\\": "it ends in a backslash",
    'root ::= "a\\': "it ends in a backslash",
    'root ::= "a" |\n  "b': "Unexpected end of input at line 2",
    'root ::= ("a"': "Expected ')' at line 1",
    'root ::= "\\q"': "Invalid escape sequence \\q at line 1",
    'root ::= "a"{2': "Expected ',' or '}' at line 1",
    "root ::= b": "Rule 'b' not found",
    'a ::= "a"': "No 'root' rule found",
    "root = 1": "Expected ::= at line 1",
    "root ::= " + "(" * 3000: "its groups stand in each other too deep",
}
"""A grammar in GBNF |-> what is wrong with it."""


@pytest.mark.parametrize("grammar", FAULTS, ids=lambda grammar: grammar[:20])
async def test_the_fault_of_a_grammar_is_told(codec: TextCodec, grammar: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post("/v1/completions", json={"prompt": "a", "ebnf": grammar})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["message"].startswith("ebnf cannot be followed: ")
        assert FAULTS[grammar] in error["message"]


SCHEMA = {"type": "object"}
BAD = {"type": "object", "not": {}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
_CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def _asked(schema: Mapping[str, object]) -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """Field of a schema, by the name that its dialect has for it |-> the path and body of a request with it."""
    json_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    text_format = {"type": "json_schema", "name": "a", "schema": schema}
    output = {"format": {"type": "json_schema", "schema": schema}}
    return {
        "guided_json": ("/v1/completions", {"prompt": "a", "guided_json": schema}),
        "structured_outputs.json": ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}),
        "response_format": ("/v1/chat/completions", {**_CHAT, "response_format": json_schema}),
        "sampling_params.json_schema": ("/generate", {"text": "a", "sampling_params": {"json_schema": schema}}),
        "text.format": ("/v1/responses", {"input": "a", "text": {"format": text_format}}),
        "output_config.format": ("/v1/messages", {**_CHAT, "output_config": output}),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", [BAD, ENDLESS], ids=["not", "endless"])
@pytest.mark.parametrize("field", _asked(SCHEMA))
async def test_a_schema_that_cannot_be_followed_is_named_as_the_client_named_it(
    codec: TextCodec, field: str, schema: Mapping[str, object], stream: bool
) -> None:
    path, body = _asked(schema)[field]
    body = {**body, "stream": stream}
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, json=body)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert error.get("param", field).startswith(field)
        assert error["message"].removeprefix(f"{field}: ").startswith(field)
        assert "cannot be followed" in error["message"]


@pytest.mark.parametrize("field", _asked(SCHEMA))
async def test_a_grammar_that_fails_later_is_named_as_well(codec: TextCodec, field: str) -> None:
    path, body = _asked(SCHEMA)[field]
    engine = OracleEngine(failure=RequestFailed(FailReason.GRAMMAR_FAILED, "decode-0: too many states"))
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, json=body)
        error = reply.json()["error"]
        assert reply.status_code == 400
        if path == "/v1/messages":
            assert error["message"].startswith(f"{field}: ")
        else:
            assert (error["code"], error["param"]) == ("grammar_failed", field)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"ebnf": "root ::= b"}, "sampling_params.ebnf cannot be followed: Rule 'b' not found"),
        ({"n": 999}, "sampling_params.n is 999, allowed is 1..128"),
        ({"temperature": "1"}, 'sampling_params.temperature is "1", expected a number'),
        ({"max_new_tokens": -1}, "sampling_params.max_new_tokens is -1, allowed is 0..512, the context's length"),
        ({"min_new_tokens": 9, "max_new_tokens": 2}, "sampling_params.min_new_tokens 9 is above max_tokens 2"),
        ({"allowed_token_ids": []}, "sampling_params.allowed_token_ids must be one or more ids in 0..271"),
    ],
)
async def test_a_message_about_a_sampling_param_begins_with_its_place(
    codec: TextCodec, inside: Mapping[str, object], message: str
) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post("/generate", json={"text": "a", "sampling_params": inside})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == message


UNSUPPORTED: Mapping[str, object] = {
    "not": {"type": "null"},
    "if": {"type": "null"},
    "contains": {"type": "null"},
    "minContains": 1,
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#x",
}
"""Keywords that cannot be followed wherever they stand."""


def schemas_in(schema: Any) -> Iterator[Any]:
    """It and all that are needed for a value of it."""
    yield schema
    for part in (*schema.get("properties", {}).values(), *schema.get("anyOf", ()), schema.get("items")):
        if part is not None:
            yield from schemas_in(part)


def fault_of(check: GrammarCheck, schema: Any) -> str:
    with pytest.raises(ApiError) as caught:
        asyncio.run(check.check(Constraint("guided_json", json_grammar(schema, "guided_json"))))
    assert caught.value.status == 400
    return caught.value.message.removeprefix("guided_json cannot be followed: ")


def test_a_keyword_is_named_wherever_it_stands_in_drawn_schemas(codec: TextCodec) -> None:
    check = GrammarCheck(codec)
    for seed in range(1000):
        draw, schema = Random(seed), drawn_schema(seed)
        keyword = draw.choice(list(UNSUPPORTED))
        draw.choice(list(schemas_in(schema)))[keyword] = UNSUPPORTED[keyword]
        assert fault_of(check, schema) == f'not supported: the keyword "{keyword}"', seed


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"$ref": "http://x/y"}, "$ref to another document: http://x/y"),
        ({"$ref": "#/$defs/no"}, "$ref to what is not there: /$defs/no"),
        ({"pattern": "(?=a)b"}, "pattern: look-around, including look-ahead and look-behind, is not supported"),
        ({"pattern": "\\b"}, "pattern: lookarounds not supported yet; WordUnicode in regex /\\b/"),
        ({"pattern": "["}, "pattern: unclosed character class"),
        ({"pattern": "a", "patternProperties": {"[ ]  [": {}}}, "patternProperties: unclosed character class"),
        ({"type": "string", "format": "iri"}, "Unknown format: iri"),
        ({"type": "object", "minProperties": 5}, "minProperties 5 is not supported here"),
        ({"type": "integer", "multipleOf": 123457}, "multipleOf is not supported for more than 100000 remainders"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "exclusiveMinimum 1 beside maximum 1.5 is not supported"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
    ],
)
def test_a_use_that_cannot_be_followed_is_named_by_its_keyword(
    codec: TextCodec, fields: Mapping[str, object], fault: str
) -> None:
    schema = {"type": "object", "properties": {"a": fields}, "required": ["a"]}
    assert fault_of(GrammarCheck(codec), schema).startswith(fault)
