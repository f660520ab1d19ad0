"""Answers in channels over HTTP: content and reasoning apart, streamed as whole."""

from collections.abc import Mapping

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.harmony import BOS, MARKERS, TEMPLATE, VOCAB, harmony_tokenizer, ids_of
from tests.server.conftest import MODEL, Served, events, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
URL = "/v1/chat/completions"
ANSWER = (
    "<|channel|>analysis<|message|>User greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
)
[RETURN] = ids_of("<|return|>")


def says(text: str) -> OracleEngine:
    return OracleEngine(answer=lambda generation: ids_of(text))


def codec() -> TextCodec:
    template = ChatTemplate(TEMPLATE, (BOS, *MARKERS), {"bos_token": BOS})
    return TextCodec(harmony_tokenizer(), VOCAB, [RETURN], template)


async def message_of(case: Served, **fields: object) -> dict[str, object]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    reply = await case.client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    assert isinstance(message, dict)
    return message


async def deltas_of(case: Served, **fields: object) -> list[dict[str, object]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    reply = await case.client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    return [part["choices"][0]["delta"] for part in events(reply.text)]  # type: ignore[index]


async def test_reasoning_stands_beside_the_content() -> None:
    async with served(codec(), says(ANSWER), SETTINGS) as case:
        message = await message_of(case)
        deltas = await deltas_of(case)
    assert message == {
        "role": "assistant",
        "content": "Hello!",
        "reasoning_content": "User greets.",
        "reasoning": "User greets.",
        "refusal": None,
    }
    for name in ("content", "reasoning_content"):
        assert "".join(str(delta.get(name, "")) for delta in deltas) == message[name]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    said = [name for delta in deltas[1:-1] for name in delta]
    assert said == ["reasoning_content", "reasoning"] * len("User greets.") + ["content"] * len("Hello!")


ASKED: Mapping[str, tuple[Mapping[str, object], str, str | None]] = {
    "as it came": ({"skip_special_tokens": False}, ANSWER.removesuffix("<|return|>"), None),
    "not apart": ({"separate_reasoning": False}, ANSWER.removesuffix("<|return|>"), None),
    "apart": ({"separate_reasoning": True}, "Hello!", "User greets."),
    "without reasoning": ({"include_reasoning": False}, "Hello!", None),
    "ended by a control token": ({"stop": ["<|end|>"]}, "", "User greets."),
}


@pytest.mark.parametrize("name", ASKED)
async def test_what_is_asked_of_reasoning(name: str) -> None:
    fields, content, reasoning = ASKED[name]
    async with served(codec(), says(ANSWER), SETTINGS) as case:
        message = await message_of(case, **fields)
        deltas = await deltas_of(case, **fields)
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert "".join(str(delta.get("content", "")) for delta in deltas) == content
    assert "".join(str(delta.get("reasoning_content", "")) for delta in deltas) == (reasoning or "")


async def test_a_call_that_nobody_asked_for_stays_visible() -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    async with served(codec(), says(f"{call}<|return|>"), SETTINGS) as case:
        assert (await message_of(case))["content"] == call


async def test_a_completion_is_the_text_of_its_tokens() -> None:
    async with served(codec(), says(ANSWER), SETTINGS) as case:
        reply = await case.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 99})
    assert reply.json()["choices"][0]["text"] == "analysisUser greets.assistantfinalHello!"


async def test_an_answer_can_be_sent_back() -> None:
    """What came as reasoning_content goes to the template as `thinking`, which it reads."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "I must look", "tool_calls": [call]},
    ]
    async with served(codec(), says(ANSWER), SETTINGS) as case:
        reply = await case.client.post("/tokenize", json={"model": MODEL, "messages": messages})
    assert codec().decode(reply.json()["tokens"]) == (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>analysis<|message|>I must look<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
    )
