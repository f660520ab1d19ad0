"""Anthropic's messages: blocks, their events in order, counts of tokens, and errors in Anthropic's shape."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from deltaserve.control.front.client import Limits
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.agents import ANSWERS, CONVERSATION, MESSAGES, MESSAGES_TOOL, TEXT, THOUGHT, agents_codec, saying
from tests.server.agents import named_events as events
from tests.server.conftest import MODEL, served
from tests.server.oracle import LIMITS, OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
BODY: dict[str, Any] = {
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [MESSAGES_TOOL],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
COUNT = f"{MESSAGES}/count_tokens"


@pytest.fixture(scope="module")
def agents(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return agents_codec(model_folder, tmp_path_factory.mktemp("agents"))


BLOCKS: Mapping[str, list[tuple[str, object]]] = {
    "text": [("text", TEXT)],
    "nothing": [],
    "thought and text": [("thinking", THOUGHT), ("text", TEXT)],
    "a call": [("tool_use", {"city": "Oslo"})],
    "thought, text, two calls": [
        ("thinking", THOUGHT),
        ("text", TEXT),
        ("tool_use", {"city": "Oslo"}),
        ("tool_use", {"city": "Rom"}),
    ],
}


def _said(block: Mapping[str, Any]) -> tuple[str, object]:
    kind = block["type"]
    said = block["input" if kind == "tool_use" else kind]
    return kind, said.strip() if isinstance(said, str) else said


def _put_together(told: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The content as a client makes it of events."""
    content: list[dict[str, Any]] = []
    arguments = ""
    for name, body in told:
        if name == "content_block_start":
            assert body["index"] == len(content)
            content.append(dict(body["content_block"]))
            arguments = ""
        elif name == "content_block_delta":
            assert body["index"] == len(content) - 1
            delta = body["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                content[-1][field] += delta[field]
        elif name == "content_block_stop" and arguments:
            content[-1]["input"] = json.loads(arguments)
    return content


@pytest.mark.parametrize("answer", ANSWERS)
async def test_blocks_of_an_answer(agents: TextCodec, answer: str) -> None:
    engine = OracleEngine(answer=saying(agents, ANSWERS[answer]))
    async with served(agents, engine, SETTINGS) as case:
        whole = (await case.client.post(MESSAGES, json=BODY)).json()
        told = events((await case.client.post(MESSAGES, json=BODY | {"stream": True})).text)
    assert [_said(block) for block in whole["content"]] == BLOCKS[answer]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use" if "call" in answer else "end_turn", None)
    fields = {"text": {"text"}, "thinking": {"thinking", "signature"}, "tool_use": {"id", "name", "input"}}
    assert all(block.keys() - {"type"} == fields[block["type"]] for block in whole["content"]), "strict clients"
    streamed = _put_together(told)
    assert [_said(block) for block in streamed] == BLOCKS[answer]
    assert [block.get("text") for block in streamed] == [block.get("text") for block in whole["content"]]
    names = [name for name, _ in groupby(name for name, _ in told)]
    inner = ["content_block_start", "content_block_delta", "content_block_stop"] * len(BLOCKS[answer])
    assert names == ["message_start", *inner, "message_delta", "message_stop"]
    assert told[0][1]["message"]["content"] == []
    assert told[-2][1]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert told[-2][1]["usage"] == whole["usage"]


async def test_thinking_is_signed(agents: TextCodec) -> None:
    """A library that finds no signature drops the thinking: the model would lose its thoughts between its calls."""
    engine = OracleEngine(answer=saying(agents, ANSWERS["thought, text, two calls"]))
    async with served(agents, engine, SETTINGS) as case:
        whole = (await case.client.post(MESSAGES, json=BODY)).json()
        told = events((await case.client.post(MESSAGES, json=BODY | {"stream": True})).text)
    assert whole["content"][0]["signature"] == whole["id"]
    deltas = [body for name, body in told if name == "content_block_delta" and body["index"] == 0]
    assert [body["delta"]["type"] for body in deltas][-2:] == ["thinking_delta", "signature_delta"]
    assert deltas[-1]["delta"]["signature"] == told[0][1]["message"]["id"]
    assert sum("signature" in body.get("delta", ()) for _, body in told) == 1
    assert _put_together(told)[0]["signature"] == told[0][1]["message"]["id"]


async def test_arguments_too_deep_to_be_read_are_told_as_they_are(agents: TextCodec) -> None:
    arguments = '{"deep": ' + "[" * 1100 + "]" * 1100 + "}"
    said = '<tool_call>{"name": "find", "arguments": ' + arguments + "}</tool_call>"
    limits = Limits(max_context_len=4096, max_prompt_len=1024, vocab_size=LIMITS.vocab_size)
    engine = OracleEngine(answer=saying(agents, said), limits_now=limits)
    async with served(agents, engine, SETTINGS) as case:
        answer = await case.client.post(MESSAGES, json=BODY | {"max_tokens": 3000})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][-1]["input"] == {"INVALID_JSON": arguments}


async def test_cached_tokens_are_counted_apart(agents: TextCodec) -> None:
    engine = OracleEngine(answer=saying(agents, TEXT))
    async with served(agents, engine, SETTINGS) as case:
        usage = (await case.client.post(MESSAGES, json=BODY)).json()["usage"]
        told = events((await case.client.post(MESSAGES, json=BODY | {"stream": True})).text)
        counted = (await case.client.post(COUNT, json={k: v for k, v in BODY.items() if k != "max_tokens"})).json()
    prompt = len(engine.opened[0].prompt) // 4
    assert usage["cache_read_input_tokens"] == prompt * 3 // 4
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert counted == {"input_tokens": prompt}
    start = told[0][1]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (prompt - prompt * 3 // 4, prompt * 3 // 4)


async def test_a_long_conversation_is_counted_although_nothing_could_follow(agents: TextCodec) -> None:
    async with served(agents, OracleEngine(), SETTINGS) as case:
        body = {"messages": [{"role": "user", "content": "x" * 450}]}
        assert (await case.client.post(COUNT, json=body)).json()["input_tokens"] > 450
        assert (await case.client.post(MESSAGES, json=body | {"max_tokens": 9})).status_code == 400
        full = (await case.client.post(COUNT, json=dict(CONVERSATION[MESSAGES]))).json()
        assert full["input_tokens"] > 200


@pytest.mark.parametrize(
    ("fields", "answer", "ending"),
    [
        ({"max_tokens": 4}, TEXT, ("max_tokens", None)),
        ({"stop_sequences": [" warm", "zz"]}, TEXT, ("stop_sequence", " warm")),
        ({"max_tokens": 40}, ANSWERS["a call"], ("max_tokens", None)),
    ],
)
async def test_why_a_message_ended(
    agents: TextCodec, fields: dict[str, Any], answer: str, ending: tuple[str, str | None]
) -> None:
    async with served(agents, OracleEngine(answer=saying(agents, answer)), SETTINGS) as case:
        whole = (await case.client.post(MESSAGES, json=BODY | fields)).json()
        told = events((await case.client.post(MESSAGES, json=BODY | fields | {"stream": True})).text)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending
    assert told[-2][1]["delta"] == {"stop_reason": ending[0], "stop_sequence": ending[1]}


@pytest.mark.parametrize(
    ("thinking", "is_off"),
    [
        (None, True),
        ({"type": "disabled"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, False),
        ({"type": "adaptive"}, False),
    ],
)
async def test_thinking_is_the_templates_switch(agents: TextCodec, thinking: object, is_off: bool) -> None:
    engine = OracleEngine(answer=saying(agents, TEXT))
    async with served(agents, engine, SETTINGS) as case:
        await case.client.post(MESSAGES, json=BODY | {"thinking": thinking})
    ids = engine.opened[0].prompt
    prompt = agents.decode([int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)])
    assert prompt.endswith("</think>\n\n") is is_off


@pytest.mark.parametrize(
    ("choice", "status", "param"),
    [
        ({"type": "auto"}, 200, ""),
        ({"type": "auto", "disable_parallel_tool_use": True}, 200, ""),
        ({"type": "none"}, 200, ""),
        ({"type": "any"}, 200, ""),
        ({"type": "tool", "name": "find"}, 200, ""),
        ({"type": "tool"}, 400, "tool_choice.name"),
        ({"type": "tool", "name": "other"}, 400, "tool_choice"),
        ({"type": "sometimes"}, 400, "tool_choice.type"),
    ],
)
async def test_choices_of_tools(agents: TextCodec, choice: object, status: int, param: str) -> None:
    async with served(agents, OracleEngine(answer=saying(agents, ANSWERS["a call"])), SETTINGS) as case:
        reply = await case.client.post(MESSAGES, json=BODY | {"tool_choice": choice})
        assert reply.status_code == status, reply.text
        assert status == 200 or reply.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize("fail_after", [0, 2])
async def test_failures(agents: TextCodec, fail_after: int) -> None:
    failure = RequestFailed(FailReason.COMPUTE_FAILED, "a step failed")
    engine = OracleEngine(answer=saying(agents, TEXT), failure=failure, fail_after=fail_after)
    async with served(agents, engine, SETTINGS) as case:
        whole = await case.client.post(MESSAGES, json=BODY)
        assert (whole.status_code, whole.json()["type"], whole.json()["error"]["type"]) == (500, "error", "api_error")
        reply = await case.client.post(MESSAGES, json=BODY | {"stream": True})
    if fail_after:
        name, body = events(reply.text)[-1]
        assert (name, body["error"]["type"]) == ("error", "api_error")
    else:
        assert reply.json() == whole.json()


@pytest.mark.parametrize(("rules", "status"), [({"type": "object"}, 200), ({"type": "object", "not": {}}, 400)])
async def test_the_form_of_the_text(codec: TextCodec, rules: dict[str, Any], status: int) -> None:
    engine = OracleEngine()
    asked = {"output_config": {"format": {"type": "json_schema", "schema": rules}}}
    async with served(codec, engine, SETTINGS) as case:
        reply = await case.client.post(MESSAGES, json={"max_tokens": 5, "messages": BODY["messages"]} | asked)
    assert reply.status_code == status
    if status == 200:
        assert engine.opened[0].sampling.grammar is not None
    else:
        assert reply.json()["error"]["message"].startswith("output_config.format cannot be followed: ")


KEY = ApiKey("u" * 32, Namespace("acme"))


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_refusals_of_the_edge_have_anthropics_shape(agents: TextCodec, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with served(agents, OracleEngine(), ServerSettings(MODEL, api_keys=(KEY,))) as case:
        refused = await case.client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        headers = {"x-api-key": KEY.secret, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        assert (await case.client.post(path, json=body, headers=headers)).status_code == 200
        assert (await case.client.get(path, headers=headers)).json()["error"]["type"] == "invalid_request_error"
