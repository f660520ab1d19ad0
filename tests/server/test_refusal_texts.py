"""What a refusal says: the whole name of the place, once, and what would be taken in words that fit their number."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.agents import agents_codec
from tests.server.conftest import MODEL, served
from tests.server.corpus import CASES, CHAT
from tests.server.corpus_agents import AGENT_CASES, MESSAGES, RESPONSES
from tests.server.corpus_more import MORE_CASES
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SAID = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
BODIES: Mapping[str, Mapping[str, object]] = {
    CHAT: {"model": MODEL, "messages": [SAID], "max_tokens": 2},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 2},
    MESSAGES: {"model": MODEL, "messages": [SAID], "max_tokens": 2},
}
TEXTS: tuple[tuple[str, Mapping[str, object], str], ...] = (
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}]},
        'tools[0].type is "web_search", only "function" is supported: nothing is run here, offer a function in its '
        "place",
    ),
    (
        RESPONSES,
        {"tools": [{"type": "function", "name": "f"}, {"type": "mcp"}], "tool_choice": "required"},
        'tools[1].type is "mcp", only "function" is supported: nothing is run here, offer a function in its place',
    ),
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]},
        "'a b': a function's name has 1 to 128 characters a-z, A-Z, 0-9, _ and -",
    ),
    (RESPONSES, {"tools": [{"name": "f"}]}, 'tools[0].type is null, expected "function"'),
    (
        RESPONSES,
        {"input": [{"type": "item_reference"}]},
        'input[0].type is "item_reference": no response is kept here, send the item itself (with the Vercel AI SDK: '
        "providerOptions.openai.store = false, or provider.chat(model))",
    ),
    (
        RESPONSES,
        {"input": [{"type": "web_search_call"}]},
        'input[0].type is "web_search_call", only "message", "function_call", "function_call_output" and "reasoning" '
        "are supported",
    ),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema: arguments are an object, and the schema's type is 'array'",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"oneOf": [{}, {}]}}}},
        "text.format cannot be followed: oneOf constraints are not supported",
    ),
    (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content is required"),
    (RESPONSES, {"tool_choice": "sometimes"}, 'tool_choice is "sometimes", expected "none", "auto" or "required"'),
    (
        RESPONSES,
        {"tool_choice": {"type": "mcp"}},
        'tool_choice.type is "mcp", only "function" and "allowed_tools" are supported: nothing is run here, offer a '
        "function in its place",
    ),
    (
        RESPONSES,
        {"input": [SAID, {"type": "function_call_output", "call_id": "c", "output": ""}]},
        "input[1].call_id is 'c', and no call in the assistant's turn before it has this id",
    ),
    (MESSAGES, {"messages": [None]}, "messages[0] is null, expected an object"),
    (MESSAGES, {"messages": []}, "messages is empty"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens is 0, allowed is 1..512, the context's length"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        'messages[0].content[0].type is "image", only "text" and "tool_result" are supported',
    ),
    (MESSAGES, {"system": [{"type": "image"}]}, 'system[0].type is "image", only "text" is supported'),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        'tools[0].type is "web_search_20250305", only "custom" is supported',
    ),
    (
        RESPONSES,
        {"input": [SAID, CALL, {**CALL, "name": "g"}]},
        "input[2].call_id is 'c' again: results of calls in one turn could not be told apart",
    ),
    (
        RESPONSES,
        {"input": [SAID, CALL, OUTPUT, OUTPUT]},
        "input[3].call_id is 'c' again: this call has its result",
    ),
    (
        RESPONSES,
        {"input": [SAID, CALL, {**CALL, "call_id": "d"}, {**OUTPUT, "call_id": "d"}]},
        "input[1] has no result, and a later call of its turn has one: it could be taken for this one's",
    ),
    (
        MESSAGES,
        {"messages": [SAID, {"role": "assistant", "content": [USE, {**USE, "name": "g"}]}, SAID]},
        "messages[1].content[1].id is 'c' again: results of calls in one turn could not be told apart",
    ),
    (
        MESSAGES,
        {"messages": [SAID, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT, RESULT]}]},
        "messages[2].content[1].tool_use_id is 'c' again: this call has its result",
    ),
    (
        MESSAGES,
        {"messages": [SAID, {"role": "user", "content": [RESULT]}]},
        "messages[1].content[0].tool_use_id is 'c', and no call in the assistant's turn before it has this id",
    ),
    (MESSAGES, {"model": "x"}, "model: the model 'x' does not exist here; this server has 'tiny'"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type is \"web_search\", expected 'function'"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools is required"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
    (
        CHAT,
        {"messages": [SAID, {"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}, SAID]},
        "thinking and reasoning differ",
    ),
    (
        CHAT,
        {
            "messages": [
                SAID,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}], "reasoning": "b"},
                SAID,
            ]
        },
        "reasoning and content differ",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_object"}}, "allowed_token_ids": [1]},
        "text.format and allowed_token_ids both say what the answer must be: give one of them",
    ),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "allowed_token_ids": [1]},
        "output_config.format and allowed_token_ids both say what the answer must be: give one of them",
    ),
    (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs is not supported: a response has no place for them"),
    (MESSAGES, {"prompt_logprobs": 0}, "prompt_logprobs is not supported: an answer here has no place for them"),
    (MESSAGES, {"stop": ["a"]}, "stop is not supported: send stop_sequences"),
    (MESSAGES, {"bad_words": [""]}, "bad_words[0]: a word has 0 characters, allowed is 1..1024"),
)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_fields_of_sampling_count_on_every_route(codec: TextCodec, path: str) -> None:
    fields = {"allowed_token_ids": [65, 66], "min_p": 0.5, "frequency_penalty": 1.0, "logit_bias": {"65": 2.0}}
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as server:
        reply = await server.client.post(path, json={**BODIES[path], **fields})
        assert reply.status_code == 200, reply.text
        assert b"deltaserve_ignored_fields_total{" not in server.front.metrics.text()
    (asked,) = engine.opened
    assert (asked.sampling.min_p, asked.sampling.frequency_penalty) == (0.5, 1.0)
    assert (65, 2.0) in asked.sampling.logit_bias
    assert asked.sampling.grammar is not None


@pytest.mark.parametrize(("path", "fields", "text"), TEXTS)
async def test_a_refusal_reads_well(codec: TextCodec, path: str, fields: Mapping[str, object], text: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as server:
        reply = await server.client.post(path, json={**BODIES[path], **fields})
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"] == text


async def test_names_from_before_tools_are_refused_with_those_of_today(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as server:
        for name, value, way_out in (("functions", [{}], "tools"), ("function_call", "auto", "tool_choice")):
            reply = await server.client.post(CHAT, json={**BODIES[CHAT], name: value})
            assert reply.json()["error"]["message"] == f"{name} is not supported: send {way_out}"


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "function.parameters"), (RESPONSES, "parameters"), (MESSAGES, "input_schema")]
)
async def test_a_strict_function_that_cannot_be_followed_is_named_as_the_client_wrote_it(
    model_folder: Path, tmp_path: Path, path: str, field: str
) -> None:
    rules = {"type": "object", "not": {}}
    function = {"name": "f", "strict": True, field.rpartition(".")[2]: rules}
    kind = {} if path == MESSAGES else {"type": "function"}
    tool = {**kind, **({"function": function} if path == CHAT else function)}
    async with served(agents_codec(model_folder, tmp_path), OracleEngine(), ServerSettings(MODEL)) as server:
        reply = await server.client.post(path, json={**BODIES[path], "tools": [tool]})
    message = reply.json()["error"]["message"]
    assert message == f'tools[0].{field} of the tool f cannot be followed: not supported: the keyword "not"'


async def test_no_refusal_has_its_place_twice_nor_a_list_of_one_in_the_plural(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as server:
        for case in (*CASES, *MORE_CASES, *AGENT_CASES):
            reply = await server.client.request(case.method, case.path, content=case.body, headers=dict(case.headers))
            message = reply.json()["error"]["message"]
            assert not re.match(r"(\S+): \1\b", message), message
            assert not re.search(r"\bonly [^ ,]+ are\b", message), message
            param = case.param or ""
            short = re.sub(r".*[.\]]", "", param)
            assert not short or short == param or not message.startswith(f"{short} is "), message


async def test_a_method_is_refused_with_those_that_are_allowed(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as server:
        one = await server.client.get(CHAT)
        two = await server.client.post("/health")
    assert one.json()["error"]["message"] == "'GET' is not allowed on this route, only POST is"
    assert two.json()["error"]["message"] == "'POST' is not allowed on this route, only GET and HEAD are"
