"""OpenAI's responses: items, their events in order, and what is refused by name."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.agents import ANSWERS, CALLS, CONVERSATION, FUNCTION, RESPONSES, TEXT, THOUGHT, agents_codec, saying
from tests.server.agents import named_events as events
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
TOOLS = [{"type": "function", **FUNCTION}]
BODY: dict[str, Any] = {"input": "hi", "tools": TOOLS, "max_output_tokens": 200}


@pytest.fixture(scope="module")
def agents(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return agents_codec(model_folder, tmp_path_factory.mktemp("agents"))


ITEMS: Mapping[str, list[tuple[str, str]]] = {
    "text": [("message", TEXT)],
    "nothing": [("message", "")],
    "thought and text": [("reasoning", THOUGHT), ("message", TEXT)],
    "a call": [("function_call", '{"city": "Oslo"}')],
    "thought, text, two calls": [
        ("reasoning", THOUGHT),
        ("message", TEXT),
        ("function_call", '{"city": "Oslo"}'),
        ("function_call", '{"city": "Rom"}'),
    ],
}


def _said(item: Mapping[str, Any]) -> tuple[str, str]:
    if item["type"] == "function_call":
        assert item["name"] == "find" and item["call_id"]
        return "function_call", item["arguments"]
    (part,) = item["content"]
    return item["type"], part["text"].strip()


def _without_ids(response: Mapping[str, Any]) -> Any:
    made = ("id", "call_id", "created_at")
    return json.loads(json.dumps(response), object_hook=lambda each: {k: v for k, v in each.items() if k not in made})


@pytest.mark.parametrize("answer", ANSWERS)
async def test_items_of_an_answer(agents: TextCodec, answer: str) -> None:
    engine = OracleEngine(answer=saying(agents, ANSWERS[answer]))
    async with served(agents, engine, SETTINGS) as case:
        whole = (await case.client.post(RESPONSES, json=BODY)).json()
        told = events((await case.client.post(RESPONSES, json=BODY | {"stream": True})).text)
    assert [_said(item) for item in whole["output"]] == ITEMS[answer]
    assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
    assert all(item["status"] == "completed" for item in whole["output"])
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])
    assert [body["sequence_number"] for _, body in told] == list(range(len(told)))
    name, last = told[-1]
    assert name == "response.completed"
    assert _without_ids(last["response"]) == _without_ids(whole)
    assert {body["response"]["id"] for _, body in told if "response" in body} == {last["response"]["id"]}


_OF_KIND = {
    "message": ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
    "reasoning": ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
    "function_call": ("function_call_arguments.delta", "function_call_arguments.done"),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_events_come_in_the_order_that_openais_clients_expect(agents: TextCodec, answer: str) -> None:
    engine = OracleEngine(answer=saying(agents, ANSWERS[answer]))
    async with served(agents, engine, SETTINGS) as case:
        told = events((await case.client.post(RESPONSES, json=BODY | {"stream": True})).text)
    expected = ["created", "in_progress"]
    for kind, text in ITEMS[answer]:
        inner = [name for name in _OF_KIND[kind] if text or not name.endswith("delta")]
        expected += ["output_item.added", *inner, "output_item.done"]
    names = [name for name, _ in groupby(name.removeprefix("response.") for name, _ in told)]
    assert names == [*expected, "completed"]
    for index, done in enumerate(body for name, body in told if name == "response.output_item.done"):
        item, own = done["item"], [body for _, body in told if body.get("output_index") == index]
        assert done["output_index"] == index
        assert {body["item_id"] for body in own if "item_id" in body} == {item["id"]}
        assert {body["item"]["id"] for body in own if "item" in body} == {item["id"]}
        deltas = "".join(body["delta"] for body in own if body["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


async def test_an_answer_that_is_cut_is_incomplete(agents: TextCodec) -> None:
    engine = OracleEngine(answer=saying(agents, TEXT))
    body = BODY | {"max_output_tokens": 5}
    async with served(agents, engine, SETTINGS) as case:
        whole = (await case.client.post(RESPONSES, json=body)).json()
        told = events((await case.client.post(RESPONSES, json=body | {"stream": True})).text)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == 5
    assert told[-1][0] == "response.incomplete"
    assert _without_ids(told[-1][1]["response"]) == _without_ids(whole)


async def test_counts(agents: TextCodec) -> None:
    engine = OracleEngine(answer=saying(agents, ANSWERS["thought and text"]))
    async with served(agents, engine, SETTINGS) as case:
        usage = (await case.client.post(RESPONSES, json=BODY)).json()["usage"]
    prompt = len(engine.opened[0].prompt) // 4
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (prompt, prompt * 3 // 4)
    assert usage["total_tokens"] == prompt + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("answer", ["text", "thought and text"])
@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_logprobs_of_the_text(agents: TextCodec, answer: str, asked: dict[str, Any]) -> None:
    engine = OracleEngine(answer=saying(agents, ANSWERS[answer]))
    body = BODY | asked
    async with served(agents, engine, SETTINGS) as case:
        whole = (await case.client.post(RESPONSES, json=body)).json()
        told = events((await case.client.post(RESPONSES, json=body | {"stream": True})).text)
    part = whole["output"][-1]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]).strip().startswith(TEXT)
    assert _without_ids(told[-1][1]["response"])["output"][-1]["content"][0] == part
    assert len(part["logprobs"][0]["top_logprobs"]) == asked.get("top_logprobs", 0)
    streamed = [entry for name, body in told if name == "response.output_text.delta" for entry in body["logprobs"]]
    assert streamed == part["logprobs"], "those of the end, too, which has no text"


@pytest.mark.parametrize("interval", [1, 3, 1000])
@pytest.mark.parametrize("answer", ["a call", "thought, text, two calls", "text between calls"])
async def test_logprobs_of_the_text_hold_none_of_the_calls(agents: TextCodec, answer: str, interval: int) -> None:
    """A whole answer is one piece, a stream many: the content has the same ones in both."""
    said = {**ANSWERS, "text between calls": f"{TEXT}\n{CALLS}\nSo it is.\n{CALLS}"}[answer]
    engine = OracleEngine(answer=saying(agents, said))
    body = BODY | {"top_logprobs": 1}
    async with served(agents, engine, ServerSettings(MODEL, stream_interval=interval)) as case:
        whole = (await case.client.post(RESPONSES, json=body)).json()
        told = events((await case.client.post(RESPONSES, json=body | {"stream": True})).text)
    assert _without_ids(told[-1][1]["response"]) == _without_ids(whole)
    for item in whole["output"]:
        if item["type"] == "message":
            part = item["content"][0]
            tokens = "".join(entry["token"] for entry in part["logprobs"])
            assert part["text"].strip() in tokens
            assert "arguments" not in tokens
            assert "hm" not in tokens


async def test_an_answer_that_goes_on_behind_its_call_may_be_sent_back(agents: TextCodec) -> None:
    """As it came, with what the call returned: the text is of the turn that calls, wherever it stands."""
    engine = OracleEngine(answer=saying(agents, f"{CALLS}\n{TEXT}"))
    async with served(agents, engine, SETTINGS) as case:
        call, text = (await case.client.post(RESPONSES, json=BODY)).json()["output"]
        assert (call["type"], text["type"]) == ("function_call", "message")
        returned = {"type": "function_call_output", "call_id": call["call_id"], "output": "7 C"}
        for items in ([call, text], [text, call]):
            asked = [{"role": "user", "content": "hi"}, *items, returned]
            reply = await case.client.post(RESPONSES, json=BODY | {"input": asked})
            assert reply.status_code == 200, reply.text
    assert engine.opened[1].prompt == engine.opened[2].prompt


async def test_what_was_asked_for_is_told_again(agents: TextCodec) -> None:
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "store": True,
        "user": "me",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
    }
    async with served(agents, OracleEngine(), SETTINGS) as case:
        whole = (await case.client.post(RESPONSES, json=BODY | asked)).json()
    same = ("instructions", "metadata", "temperature", "top_p", "tool_choice", "parallel_tool_calls")
    assert {name: whole[name] for name in same} == {name: asked[name] for name in same}
    assert (whole["store"], whole["reasoning"]["effort"], whole["tools"]) == (False, "low", TOOLS)


CONVERSATIONS = list(CONVERSATION)


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_a_conversation_is_the_same_prompt_in_every_dialect(agents: TextCodec, path: str) -> None:
    """So a cache that one filled serves the others."""
    engine = OracleEngine(answer=saying(agents, TEXT))
    async with served(agents, engine, SETTINGS) as case:
        for each in (CONVERSATIONS[0], path):
            reply = await case.client.post(each, json=CONVERSATION[each])
            assert reply.status_code == 200, reply.text
    theirs, ours = (agents.decode(_tokens(generation.prompt)) for generation in engine.opened)
    assert ours == theirs
    assert [ours.count(text) for text in (THOUGHT, "I look.", "Oslo", "7 C", "20 C", "And?")] == [1, 1, 2, 1, 1, 1]


def _tokens(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


@pytest.mark.parametrize("fail_after", [0, 2])
async def test_failures(agents: TextCodec, fail_after: int) -> None:
    failure = RequestFailed(FailReason.COMPUTE_FAILED, "a step failed")
    engine = OracleEngine(answer=saying(agents, TEXT), failure=failure, fail_after=fail_after)
    async with served(agents, engine, SETTINGS) as case:
        assert (await case.client.post(RESPONSES, json=BODY)).status_code == 500
        reply = await case.client.post(RESPONSES, json=BODY | {"stream": True})
    if not fail_after:
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "compute_failed")
        return
    told = events(reply.text)
    assert [name for name, _ in told[:2]] == ["response.created", "response.in_progress"]
    name, body = told[-1]
    assert (name, body["response"]["status"], body["response"]["error"]["code"]) == (
        "response.failed",
        "failed",
        "server_error",
    )


_CHOICES = (
    ("none", 200),
    ("auto", 200),
    ("required", 200),
    ({"type": "function", "name": "find"}, 200),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]}, 200),
    ({"type": "function", "name": "other"}, 400),
    ({"type": "file_search"}, 400),
    ("sometimes", 400),
)


@pytest.mark.parametrize(("choice", "status"), _CHOICES)
async def test_choices_of_tools(agents: TextCodec, choice: object, status: int) -> None:
    async with served(agents, OracleEngine(answer=saying(agents, ANSWERS["a call"])), SETTINGS) as case:
        reply = await case.client.post(RESPONSES, json=BODY | {"tool_choice": choice})
        assert reply.status_code == status, reply.text
        assert status == 200 or reply.json()["error"]["param"].startswith("tool_choice")


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, None),
        ({"type": "json_schema", "name": "x", "schema": _SCHEMA, "strict": True}, None),
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object", "not": {}}}, "text.format"),
    ],
)
async def test_the_form_of_the_text(codec: TextCodec, wanted: dict[str, Any], param: str | None) -> None:
    engine = OracleEngine()
    body = {"input": "hi", "max_output_tokens": 5, "text": {"format": wanted}}
    async with served(codec, engine, SETTINGS) as case:
        reply = await case.client.post(RESPONSES, json=body)
    if param is not None:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        return
    assert reply.json()["text"]["format"]["type"] == wanted["type"]
    assert (engine.opened[0].sampling.grammar is None) is (wanted["type"] == "text")
