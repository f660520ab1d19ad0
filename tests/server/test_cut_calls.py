"""What the three dialects of chats tell of an answer that `max_tokens` cuts within a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.agents import (
    CALLS,
    CHAT,
    CHAT_TOOLS,
    FUNCTION,
    MESSAGES,
    MESSAGES_TOOL,
    RESPONSES,
    TEXT,
    agents_codec,
    named_events,
    prompts_of,
    saying,
)
from tests.server.conftest import MODEL, num_ignored, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
ARGUMENTS = '{"city": "Oslo"}'


@pytest.fixture(scope="module")
def agents(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return agents_codec(model_folder, tmp_path_factory.mktemp("agents"))


def _check(content: str, calls: list[tuple[str, str]]) -> None:
    assert TEXT.startswith(content.strip().removesuffix("<").strip())
    assert len(calls) <= 1
    for name, arguments in calls:
        assert name == "find"
        assert ARGUMENTS.startswith(arguments)


async def test_nothing_of_a_call_is_content(agents: TextCodec) -> None:
    num_tokens = len(agents.encode(f"{TEXT}\n{CALLS}", add_special_tokens=False))
    engine = OracleEngine(answer=saying(agents, f"{TEXT}\n{CALLS}"))
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    async with served(agents, engine, ServerSettings(MODEL)) as case:
        for most in range(1, num_tokens, max(1, num_tokens // 20)):
            body = {**talk, **CHAT_TOOLS, "max_tokens": most}
            (choice,) = (await case.client.post(CHAT, json=body)).json()["choices"]
            message = choice["message"]
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
            _check(message["content"] or "", calls)
            assert choice["finish_reason"] == "length"
            text = (await case.client.post(CHAT, json=body | {"stream": True})).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            deltas = [each["delta"] for event in events for each in event["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
            parts = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
            assert "".join(part.get("arguments", "") for part in parts) == "".join(each for _, each in calls)

            tools = [{"type": "function", **FUNCTION}]
            asked = {"input": "hi", "tools": tools, "max_output_tokens": most}
            whole = (await case.client.post(RESPONSES, json=asked)).json()
            assert whole["status"] == "incomplete"
            said = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")
            told = [(i["name"], i["arguments"]) for i in whole["output"] if i["type"] == "function_call"]
            assert (said, told) == (message["content"] or "", calls)
            streamed = named_events((await case.client.post(RESPONSES, json=asked | {"stream": True})).text)
            assert [item["type"] for item in streamed[-1][1]["response"]["output"]] == [
                item["type"] for item in whole["output"]
            ]

            answer = {**talk, "tools": [MESSAGES_TOOL], "max_tokens": most}
            blocks = (await case.client.post(MESSAGES, json=answer)).json()
            assert blocks["stop_reason"] == "max_tokens"
            assert "".join(b["text"] for b in blocks["content"] if b["type"] == "text") == (message["content"] or "")
            assert len([b for b in blocks["content"] if b["type"] == "tool_use"]) == len(calls)


@pytest.mark.parametrize("said", [CALLS.removesuffix('"}}\n</tool_call>'), CALLS.replace('{"city": "Oslo"}', '"[1]"')])
async def test_a_call_without_an_object_of_arguments_goes_back_into_the_conversation(
    agents: TextCodec, said: str
) -> None:
    """In the same words in each dialect, and counted."""
    num_tokens = len(agents.encode(said, add_special_tokens=False))
    engine = OracleEngine(answer=saying(agents, said))
    asked = {"role": "user", "content": "hi"}
    async with served(agents, engine, ServerSettings(MODEL)) as case:
        body = {"messages": [asked], **CHAT_TOOLS, "max_tokens": num_tokens}
        message = (await case.client.post(CHAT, json=body)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        told = {"role": "tool", "tool_call_id": call["id"], "content": "failed"}
        reply = await case.client.post(CHAT, json={**body, "messages": [asked, message, told]})
        assert reply.status_code == 200, reply.text

        asks = {"input": [asked], "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": num_tokens}
        output = (await case.client.post(RESPONSES, json=asks)).json()["output"]
        item = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "failed"}
        reply = await case.client.post(RESPONSES, json={**asks, "input": [asked, *output, item]})
        assert reply.status_code == 200, reply.text
        assert num_ignored(case) == 2

        talk = {
            "messages": [asked],
            "tools": [MESSAGES_TOOL],
            "max_tokens": num_tokens,
            "thinking": {"type": "adaptive"},
        }
        content = (await case.client.post(MESSAGES, json=talk)).json()["content"]
        assert content[-1]["input"] == {"INVALID_JSON": call["function"]["arguments"]}
        turns = [asked, {"role": "assistant", "content": content}]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "failed"}
        turns.append({"role": "user", "content": [result]})
        reply = await case.client.post(MESSAGES, json=talk | {"messages": turns})
        assert reply.status_code == 200, reply.text
    one, other, third = prompts_of(agents, engine.opened)[1::2]
    assert one == other == third and "INVALID_JSON" in one
