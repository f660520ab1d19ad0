"""How long a model reasons, over HTTP: every name that a limit has, and the grammar that it comes to."""

from collections.abc import Mapping
from typing import Any

import pytest

from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.harmony import BOS, MARKERS, TEMPLATE, VOCAB, harmony_tokenizer
from tests.fixtures.tiny_tokenizer import byte_level
from tests.server.agents import CHAT, MESSAGES, RESPONSES
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine
from tests.server.test_tools import HERMES, PING, PINGS, SPECIALS, codec

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
THINKS = (*SPECIALS, "<think>", "</think>")
USER = [{"role": "user", "content": "hi"}]
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 40},
    RESPONSES: {"input": USER, "max_output_tokens": 40},
    MESSAGES: {"messages": USER, "max_tokens": 40},
}


def thinking_codec() -> TextCodec:
    """Its markers of reasoning are tokens, and those of calls are text."""
    return TextCodec(byte_level(THINKS), 270, [257], ChatTemplate(HERMES, THINKS, {}))


FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vLLM": (CHAT, {"thinking_token_budget": 3}),
    "Qwen's API": (CHAT, {"thinking_budget": 3}),
    "SGLang": (CHAT, {"custom_params": {"thinking_budget": 3}}),
    "a template's": (CHAT, {"chat_template_kwargs": {"thinking_budget": 3}}),
    "OpenRouter": (CHAT, {"reasoning": {"max_tokens": 3, "effort": "low"}}),
    "Anthropic, in chat completions": (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 3}}),
    "two that agree": (CHAT, {"thinking_token_budget": 3, "reasoning": {"max_tokens": 3}}),
    "OpenRouter's responses": (RESPONSES, {"reasoning": {"max_tokens": 3}}),
    "Anthropic": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 3}}),
}


async def grammar_asked(url: str, fields: Mapping[str, Any], text: TextCodec) -> str | None:
    async with served(text, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(url, json={"model": MODEL, **BODIES[url], **fields})
        assert reply.status_code == 200, reply.text
        return case.engine.opened[0].sampling.grammar


def allowing(text: TextCodec, grammar: str | None, answer: str) -> bool:
    assert grammar is not None
    tokens = [*text.encode(answer, add_special_tokens=False), text.eos_ids[-1]]
    return bool(AnswerGrammars(text.vocabulary).matcher(grammar).validate_tokens(tokens) == len(tokens))


@pytest.mark.parametrize("name", FORMS)
async def test_a_limit_by_any_of_its_names(name: str) -> None:
    text = thinking_codec()
    url, fields = FORMS[name]
    grammar = await grammar_asked(url, fields, text)
    begin = "" if "enabled" in str(fields) else "<think>"
    assert allowing(text, grammar, f"{begin}abc</think>yes")
    assert allowing(text, grammar, f"{begin}</think>yes")
    assert not allowing(text, grammar, f"{begin}abcd</think>yes")


FREE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "none": (CHAT, {}),
    "less than none": (CHAT, {"thinking_budget": -1}),
    "as long as the answer": (CHAT, {"thinking_token_budget": 40}),
    "all of the answer but its last token": (CHAT, {"thinking_token_budget": 39}),
    "Anthropic's, as Claude Code has it": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 39}}),
    "no reasoning is wanted": (CHAT, {"thinking_budget": 3, "chat_template_kwargs": {"enable_thinking": False}}),
    "OpenRouter's switch": (CHAT, {"reasoning": {"enabled": False, "max_tokens": 3}}),
    "Anthropic's": (MESSAGES, {"thinking": {"type": "adaptive"}}),
    "Anthropic's, longer than the answer": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
}


@pytest.mark.parametrize("name", FREE)
async def test_what_limits_nothing_costs_nothing(name: str) -> None:
    url, fields = FREE[name]
    assert await grammar_asked(url, fields, thinking_codec()) is None


async def test_a_model_that_does_not_reason_keeps_to_any_limit() -> None:
    text = TextCodec(byte_level(THINKS), 270, [257])
    plain = TextCodec(text._tokenizer, 270, [257], ChatTemplate("{{ messages[0].content }}", THINKS, {}))
    assert await grammar_asked(CHAT, {"thinking_token_budget": 3}, plain) is None


WITH: Mapping[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "JSON": ({"response_format": {"type": "json_object"}}, ['{"a": 1}'], ["yes"]),
    "a call that must be": ({"tools": [PING], "tool_choice": "required"}, [PINGS], ["yes"]),
    "one call at most": (
        {"tools": [PING], "parallel_tool_calls": False},
        [PINGS, "yes"],
        [f"{PINGS}\n{PINGS}", PINGS.replace("ping", "pong")],
    ),
    "calls that may be": ({"tools": [PING]}, [PINGS, "yes", PINGS.replace("ping", "pong")], []),
}


@pytest.mark.parametrize("name", WITH)
async def test_a_limit_beside_what_follows_reasoning(name: str) -> None:
    fields, allowed, forbidden = WITH[name]
    text = thinking_codec()
    grammar = await grammar_asked(CHAT, {"thinking_token_budget": 3, **fields}, text)
    for answer in allowed:
        assert allowing(text, grammar, f"<think>abc</think>{answer}"), answer
        assert not allowing(text, grammar, f"<think>abcd</think>{answer}")
    for answer in forbidden:
        assert not allowing(text, grammar, f"<think>abc</think>{answer}"), answer


async def test_a_limit_in_channels() -> None:
    specials = (BOS, *MARKERS)
    tokenizer = harmony_tokenizer()
    end = tokenizer.token_to_id("<|return|>")
    assert end is not None
    text = TextCodec(tokenizer, VOCAB, [end], ChatTemplate(TEMPLATE, specials, {"bos_token": BOS}))
    grammar = await grammar_asked(CHAT, {"thinking_token_budget": 3}, text)
    answer = "<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert allowing(text, grammar, f"<|channel|>analysis<|message|>abc{answer}")
    assert not allowing(text, grammar, f"<|channel|>analysis<|message|>abcd{answer}")


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "two that differ": (CHAT, {"thinking_token_budget": 3, "thinking_budget": 4}, "thinking_budget"),
    "an effort of no API": (CHAT, {"reasoning_effort": "banana"}, "reasoning_effort"),
    "an effort inside": (CHAT, {"reasoning": {"effort": "LOW"}}, "reasoning.effort"),
    "an effort of a response": (RESPONSES, {"reasoning": {"effort": "banana"}}, "reasoning.effort"),
    "off by the template, an effort": (
        CHAT,
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    "on by the template, no effort": (
        CHAT,
        {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
        "reasoning_effort",
    ),
    "two switches of the template": (
        CHAT,
        {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
        "chat_template_kwargs.thinking",
    ),
    "Anthropic's, against the template": (
        CHAT,
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    "Anthropic's, against an effort": (
        CHAT,
        {"thinking": {"type": "disabled"}, "reasoning_effort": "low"},
        "thinking.type",
    ),
    "OpenRouter's, against itself": (CHAT, {"reasoning": {"enabled": False, "effort": "low"}}, "reasoning.enabled"),
    "OpenRouter's, against an effort": (
        CHAT,
        {"reasoning": {"enabled": True}, "reasoning_effort": "none"},
        "reasoning_effort",
    ),
    "two efforts": (CHAT, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    "another parameter of processors": (CHAT, {"custom_params": {"thinking_budget": 3, "x": 1}}, "custom_params.x"),
    "a text": (CHAT, {"thinking_token_budget": "3"}, "thinking_token_budget"),
    "below none": (CHAT, {"thinking_budget": -2}, "thinking_budget"),
    "inside, below none": (CHAT, {"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
    "in a completion": ("/v1/completions", {"prompt": "x", "thinking_token_budget": 3}, "thinking_token_budget"),
    "of a response": (RESPONSES, {"reasoning": {"max_tokens": "3"}}, "reasoning.max_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_a_limit_is_refused_by_name(name: str) -> None:
    url, fields, param = REFUSED[name]
    async with served(thinking_codec(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(url, json={"model": MODEL, **BODIES.get(url, {}), **fields})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param, reply.text
        assert (await case.client.post(CHAT, json={"model": MODEL, **BODIES[CHAT]})).status_code == 200


async def test_an_effort_that_is_none_is_answered_with_those_there_are() -> None:
    async with served(thinking_codec(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(CHAT, json={"model": MODEL, **BODIES[CHAT], "reasoning_effort": "banana"})
    assert all(f"'{word}'" in reply.text for word in ("none", "minimal", "low", "medium", "high", "xhigh", "max"))


AGREEING: Mapping[str, dict[str, Any]] = {
    "both off": {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
    "both on": {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "no say": {"thinking": {"type": "adaptive"}, "reasoning_effort": "none"},
    "empty": {"reasoning_effort": "", "chat_template_kwargs": {"enable_thinking": False}},
    "no switch": {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}},
    "a limit where nothing is thought": {"thinking_budget": 9, "reasoning_effort": "none"},
    "no time to think": {"thinking_budget": 0, "chat_template_kwargs": {"enable_thinking": True}},
}


@pytest.mark.parametrize("name", AGREEING)
async def test_switches_that_agree_are_taken(name: str) -> None:
    async with served(thinking_codec(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(CHAT, json={"model": MODEL, **BODIES[CHAT], **AGREEING[name]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHAT, {"thinking_token_budget": 3}, "thinking_token_budget"),
        (CHAT, {"reasoning": {"max_tokens": 3}}, "reasoning.max_tokens"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
    ],
)
async def test_a_marker_of_several_tokens_bounds_nothing(url: str, fields: dict[str, Any], param: str) -> None:
    """Where reasoning ends would be a guess, while the marker is spelled."""
    async with served(codec(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(url, json={"model": MODEL, **BODIES[url], **fields})
    assert reply.status_code == 400
    assert param in reply.text
    assert "is no token of its vocabulary" in reply.text


async def test_openrouters_switches() -> None:
    text = thinking_codec()
    async with served(text, OracleEngine(), SETTINGS) as case:
        for fields in ({"enabled": False}, {"effort": "none"}):
            await case.client.post(CHAT, json={"model": MODEL, **BODIES[CHAT], "reasoning": fields})
        await case.client.post(CHAT, json={"model": MODEL, **BODIES[CHAT], "thinking": {"type": "disabled"}})
        prompts = [text.decode(memoryview(each.prompt).cast("I")) for each in case.engine.opened]
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts)
