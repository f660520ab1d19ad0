"""Tools over HTTP: what the model is told, calls in whole answers and in streams, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.answers.answer_choice import Parsers
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.harmony import BOS, MARKERS, TEMPLATE, VOCAB, harmony_tokenizer
from tests.fixtures.tiny_tokenizer import byte_level
from tests.server.conftest import MODEL, Served, events, served
from tests.server.oracle import LIMITS, OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
URL = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}

SPECIALS = ("<|im_start|>", "<|im_end|>")
TURNS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALLS{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}{% endif %}"
)
HERMES = TURNS.replace(
    "CALLS",
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
)
XML = TURNS.replace(
    "CALLS",
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
LLAMA = (
    TURNS.replace("CALLS", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}')
    .replace("<think>", "")
    .replace("</think>", "")
)
NO_TOOLS = HERMES.replace("{% if tools %}", "{% if false %}")
NO_FORMAT = TURNS.replace("CALLS", "call {{ c.function.name }} with {{ c.function.arguments | tojson }}")


def codec(template: str = HERMES, parsers: Parsers | None = None) -> TextCodec:
    """A byte is a token."""
    return TextCodec(byte_level(SPECIALS), 270, [257], ChatTemplate(template, SPECIALS, {}), parsers=parsers)


def says(text: str) -> OracleEngine:
    return OracleEngine(
        answer=lambda generation: [*byte_level(SPECIALS).encode(text, add_special_tokens=False).ids, 257]
    )


async def ask(case: Served, **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, PING]} | fields
    reply = await case.client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert isinstance(answer, dict)
    return answer


async def stream(case: Served, **fields: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(message put together as OpenAI's libraries do, choices of the events)."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, PING], "stream": True}
    reply = await case.client.post(URL, json=body | fields)
    assert reply.status_code == 200, reply.text
    choices = [choice for part in events(reply.text) for choice in part["choices"]]  # type: ignore[attr-defined]
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert part.keys() == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {}), choices


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "\u4f60\\"",\n "days": 1e2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"
)
PINGS = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
Call = tuple[str, str]
ANSWERS: Mapping[str, tuple[str, str, str | None, str | None, list[Call]]] = {
    "a call alone": (HERMES, CALL, None, None, [("get_weather", '{"city":  "\u4f60\\"",\n "days": 1e2}')]),
    "text before": (HERMES, f"Let me look.\n{PINGS}", "Let me look.", None, [("ping", "{}")]),
    "two calls": (HERMES, f"{PINGS}\n{PINGS}", None, None, [("ping", "{}"), ("ping", "{}")]),
    "reasoning": (HERMES, f"<think>\nhm\n</think>\n\n{PINGS}", None, "hm", [("ping", "{}")]),
    "text": (HERMES, "Hello <tool_", "Hello <tool_", None, []),
    "no tool of the request": (HERMES, PINGS.replace("ping", "pong"), PINGS.replace("ping", "pong"), None, []),
    "values by their types": (XML, XML_CALL, None, None, [("get_weather", '{"city": "12", "days": 12}')]),
    "without markers": (LLAMA, '{"name": "ping", "parameters": {}}', None, None, [("ping", "{}")]),
    "JSON that is no call": (LLAMA, '{"name": "Bob"}', '{"name": "Bob"}', None, []),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_has_its_calls_and_a_stream_says_the_same(name: str) -> None:
    template, text, content, reasoning, calls = ANSWERS[name]
    async with served(codec(template), says(text), SETTINGS) as case:
        answer = await ask(case)
        streamed, choices = await stream(case)
    (choice,) = answer["choices"]
    message = choice["message"]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert found == calls
    assert (message["content"], message.get("reasoning_content"), message.get("reasoning")) == (
        content,
        reasoning,
        reasoning,
    )
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message.get("tool_calls", ()))
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
    assert (streamed["content"] or None) == content
    assert streamed.get("reasoning_content") == reasoning
    assert [
        (call["function"]["name"], call["function"]["arguments"]) for call in streamed.get("tool_calls", ())
    ] == calls


async def test_the_model_is_told_of_the_tools() -> None:
    async with served(codec(), says(""), SETTINGS) as case:
        await ask(case)
        await ask(case, tool_choice="none")
        await ask(case, tools=[])
    prompts = [codec().decode([*memoryview(each.prompt).cast("I")]) for each in case.engine.opened]
    assert json.dumps(WEATHER) in prompts[0]
    assert '"name": "ping", "parameters": {"type": "object", "properties": {}}' in prompts[0]
    assert prompts[1] == prompts[0], "a prompt that differs would be computed again"
    assert "get_weather" not in prompts[2]


async def test_the_server_tells_how_it_reads_answers() -> None:
    found = []
    for template in (HERMES, LLAMA, NO_TOOLS, NO_FORMAT):
        async with served(codec(template), says(""), SETTINGS) as case:
            info = (await case.client.get("/model_info")).json()
        found.append((info["shows_tools"], info["tool_call_parser"], info["reasoning_parser"] is not None))
    assert found == [
        (True, "hermes", True),
        (True, "llama3_json", False),
        (False, "hermes", True),
        (True, None, True),
    ]


async def test_calls_that_must_not_be_are_content() -> None:
    async with served(codec(), says(PINGS), SETTINGS) as case:
        for fields in ({"tool_choice": "none"}, {"tools": None}):
            (choice,) = (await ask(case, **fields))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (PINGS, "stop")
            assert "tool_calls" not in choice["message"]


async def test_a_call_cut_by_max_tokens_is_a_part_of_one() -> None:
    engine = OracleEngine(answer=lambda generation: [*CALL.encode()[: generation.sampling.max_tokens]])
    async with served(codec(), engine, SETTINGS) as case:
        (choice,) = (await ask(case, max_tokens=66))["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city":  "\u4f60\\"",\n "days": 1e2}'.startswith(call["function"]["arguments"])
    assert len(call["function"]["arguments"]) > 5


async def test_stop_strings_do_not_cut_calls() -> None:
    async with served(codec(), says(f"Say city.\n{CALL}"), SETTINGS) as case:
        (choice,) = (await ask(case, stop=['city":']))["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        (choice,) = (await ask(case, stop=["city"]))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Say ", "stop")


async def test_several_samples_have_calls_of_their_own() -> None:
    async with served(codec(), says(f"{PINGS}{PINGS}"), SETTINGS) as case:
        answer = await ask(case, n=2)
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


REFUSED: Mapping[str, tuple[str, dict[str, object], str, str]] = {
    "a template without tools": (NO_TOOLS, {}, "tools", "does not show tools"),
    "a format nobody knows": (NO_FORMAT, {}, "tools", "--tool-call-parser"),
    "old functions": (HERMES, {"functions": [{"name": "f"}]}, "functions", "not supported"),
    "an old choice": (HERMES, {"function_call": "auto"}, "function_call", "not supported"),
    "a call and a text of a pattern": (
        HERMES,
        {"tool_choice": "required", "guided_regex": "a+"},
        "guided_regex",
        "give one of them",
    ),
    "a call and a text by a regex": (
        HERMES,
        {"tool_choice": "required", "regex": "a+"},
        "regex",
        "give one of them",
    ),
    "a schema that cannot be followed": (
        HERMES,
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
        },
        "tools[0].function.parameters",
        'of the tool f cannot be followed: not supported: the keyword "not"',
    ),
    "a name that is no tool": (
        HERMES,
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "none of the tools",
    ),
}


UNUSABLE: Mapping[str, tuple[dict[str, Any], str]] = {
    "keywords": ({"if": {}, "not": {}}, "the keyword"),
    "inside": ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, '"uniqueItems"'),
    "a type": ({"properties": {"a": {"type": "banana"}}}, "banana"),
    "a format": ({"properties": {"a": {"type": "string", "format": "banana"}}}, "banana"),
    "a reference": ({"properties": {"a": {"$ref": "#/x"}}}, "/x"),
    "a pattern": ({"properties": {"a": {"type": "string", "pattern": "("}}}, "unclosed group"),
    "no text at all": ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "a"),
    "steps": ({"properties": {"a": {"multipleOf": 1.234567e-07}}}, "multipleOf"),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", UNUSABLE)
async def test_the_tool_whose_schema_cannot_be_followed_is_named(name: str, choice: str) -> None:
    """With what is at fault in it, and nothing of the grammar that is made of all tools."""
    parameters, words = UNUSABLE[name]
    strict = {"type": "function", "function": {"name": "get_it", "strict": True, "parameters": parameters}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, strict]}
    async with served(codec(HERMES), says(""), SETTINGS) as case:
        reply = await case.client.post(URL, json=body | {"tool_choice": choice})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert "the tool get_it" in error["message"] and words in error["message"]
        assert "start:" not in error["message"] and "<[" not in error["message"]


async def test_schemas_that_come_to_too_much_are_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * (1 << 18)]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
    engine = OracleEngine(limits_now=replace(LIMITS, max_context_len=1 << 20, max_prompt_len=1 << 20))
    async with served(codec(HERMES), engine, SETTINGS) as case:
        reply = await case.client.post(URL, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tool_choice")
    assert "makes a grammar of more than" in error["message"]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_done_is_refused(name: str) -> None:
    template, fields, param, words = REFUSED[name]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]} | fields
    async with served(codec(template), says(""), SETTINGS) as case:
        reply = await case.client.post(URL, json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert words in error["message"]
        asks_for_nothing = body | {"tool_choice": "none"}
        if template != HERMES:
            assert (await case.client.post(URL, json=asks_for_nothing)).status_code == 200


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
UNTYPED = [
    {"type": "function", "function": {"name": "a", "parameters": {"x-own": 1}}},
    {"type": "function", "function": {"name": "b", "strict": True, "parameters": {"properties": {}}}},
    {"type": "function", "function": {"name": "c", "parameters": {"type": ["object", "null"]}}},
    {"type": "function", "function": {"name": "d", "parameters": {"anyOf": [{"required": ["x"]}]}}},
]
"""Schemas by which arguments could be something else than an object."""
CONSTRAINED: Mapping[str, tuple[str, dict[str, object], list[str], list[str]]] = {
    "required": (
        HERMES,
        {"tool_choice": "required"},
        [PINGS.replace("ping", "get_weather"), f"{PINGS}\n{PINGS}"],
        ["Hello", PINGS.replace("ping", "pong"), CALL.replace("1e2", '"two"')],
    ),
    "named": (
        HERMES,
        {"tool_choice": {"type": "function", "function": {"name": "ping"}}},
        [PINGS, f"<think>\nhm\n</think>\n\n{PINGS}"],
        [CALL, "Hello"],
    ),
    "one at most": (HERMES, {"parallel_tool_calls": False}, [PINGS, "Hello"], [f"{PINGS}\n{PINGS}"]),
    "strict": (
        HERMES,
        {"tools": [STRICT]},
        ["Hello", PINGS.replace("ping", "get_weather")],
        [CALL.replace("1e2", '"two"')],
    ),
    "calls or JSON": (
        HERMES,
        {"response_format": {"type": "json_object"}},
        ['{"a": 1}', PINGS, '<think>hm</think>{"a": 1}'],
        ["Hello"],
    ),
    "JSON behind reasoning": (
        HERMES,
        {
            "response_format": {"type": "json_object"},
            "tools": None,
            "chat_template_kwargs": {"enable_thinking": True},
        },
        ['hm</think>{"a": 1}'],
        ['{"a": 1}', "hm</think>yes"],
    ),
    "arguments are an object whatever the schema says": (
        HERMES,
        {"tool_choice": "required", "tools": UNTYPED},
        [PINGS.replace("ping", name) for name in "abc"] + [PINGS.replace("ping", "d").replace("{}", '{"x": 1}')],
        [PINGS.replace("ping", name).replace("{}", other) for name in "abcd" for other in ("true", "null", "[]")],
    ),
    "without markers": (
        LLAMA,
        {"tool_choice": "required"},
        ['{"name": "ping", "parameters": {}}'],
        ["Hello", '{"name": "pong", "parameters": {}}'],
    ),
}


@pytest.mark.parametrize("name", CONSTRAINED)
async def test_an_answer_is_drawn_by_the_grammar_of_what_was_asked(name: str) -> None:
    template, fields, allowed, forbidden = CONSTRAINED[name]
    text = codec(template)
    grammars = AnswerGrammars(text.vocabulary)
    async with served(text, says(""), SETTINGS) as case:
        await ask(case, **fields)
    grammar = case.engine.opened[0].sampling.grammar
    assert grammar is not None

    def allows(answer: str) -> bool:
        tokens = [*text.encode(answer, add_special_tokens=False), 257]
        return bool(grammars.matcher(grammar).validate_tokens(tokens) == len(tokens))

    assert [answer for answer in allowed if not allows(answer)] == []
    assert [answer for answer in forbidden if allows(answer)] == []


async def test_calls_that_nobody_relies_on_are_not_constrained() -> None:
    async with served(codec(), says(""), SETTINGS) as case:
        await ask(case)
        await ask(case, tools=[STRICT], tool_choice="none")
    assert [each.sampling.grammar for each in case.engine.opened] == [None, None]


async def test_an_operator_names_the_format() -> None:
    named = codec(NO_FORMAT, Parsers(calls="hermes", reasoning="none"))
    async with served(named, says(f"<think>hm</think>{PINGS}"), SETTINGS) as case:
        (choice,) = (await ask(case))["choices"]
    assert choice["message"]["content"] == "<think>hm</think>"
    assert len(choice["message"]["tool_calls"]) == 1


async def test_an_id_is_one_that_the_template_takes_back() -> None:
    short = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}"
    short += "{{ raise_exception('ids of 9') }}{% endif %}{% endfor %}{% endfor %}" + HERMES
    async with served(codec(short), says(PINGS), SETTINGS) as case:
        (choice,) = (await ask(case))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


THOUGHT: Mapping[str, tuple[dict[str, object], str, str | None, str | None]] = {
    "by itself": ({}, "<think>\nhm\n</think>\n\nyes", "yes", "hm"),
    "switched on": ({"chat_template_kwargs": {"enable_thinking": True}}, "hm\n</think>\n\nyes", "yes", "hm"),
    "switched off": ({"chat_template_kwargs": {"enable_thinking": False}}, "yes </think>", "yes </think>", None),
    "no effort": ({"reasoning_effort": "none"}, "yes", "yes", None),
    "left in": ({"separate_reasoning": False}, "<think>hm</think>yes", "<think>hm</think>yes", None),
    "left out": ({"include_reasoning": False}, "<think>hm</think>yes", "yes", None),
    "at once": ({"stream_reasoning": False}, "<think>hm and hm</think>yes", "yes", "hm and hm"),
    "not ended": ({"chat_template_kwargs": {"enable_thinking": True}}, "hm", "", "hm"),
}


@pytest.mark.parametrize("name", THOUGHT)
async def test_reasoning_between_tags(name: str) -> None:
    fields, text, content, reasoning = THOUGHT[name]
    async with served(codec(), says(text), SETTINGS) as case:
        answer = await ask(case, **fields)
        streamed, choices = await stream(case, **fields)
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert (streamed.get("content"), streamed.get("reasoning_content")) == (content, reasoning)
    thoughts = [choice["delta"] for choice in choices if "reasoning_content" in choice["delta"]]
    assert len(thoughts) <= 1 or name != "at once"


@pytest.mark.parametrize(
    ("begun", "text", "content", "reasoning"),
    [
        ("<think>I th", "ink</think>yes", "yes", "ink"),
        ("<think>hm</think>", "yes", "yes", None),
        ("The <b>", "ink</b>", "ink</b>", None),
    ],
)
async def test_a_message_that_is_gone_on_with(begun: str, text: str, content: str, reasoning: str | None) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with served(codec(), says(text), SETTINGS) as case:
        (choice,) = (await ask(case, messages=messages, **fields))["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning_content")) == (content, reasoning)


async def test_tokens_of_reasoning_are_counted() -> None:
    text = "<think>hm</think>yes"
    async with served(codec(), says(text), SETTINGS) as case:
        usage = (await ask(case))["usage"]
        body = {"stream": True, "stream_options": {"include_usage": True}}
        reply = await case.client.post(URL, json={"messages": [{"role": "user", "content": "hi"}], **body})
        silent = (await ask(case, include_reasoning=False))["usage"]
        plain = (await ask(case, separate_reasoning=False, tools=None))["usage"]
    # Counted from where the marker is complete up to its end: nine bytes of text and markers, and the end's last.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("hm</think>") + 1}
    assert events(reply.text)[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]  # type: ignore[index]
    assert silent == usage
    assert "completion_tokens_details" not in plain


async def test_calls_in_channels() -> None:
    template = TEMPLATE.replace(
        "{% for m in messages %}", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}", 1
    )
    harmony = TextCodec(harmony_tokenizer(), VOCAB, [], ChatTemplate(template, (BOS, *MARKERS), {"bos_token": BOS}))
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    text = f"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant{call}"
    ids = harmony_tokenizer().encode(text, add_special_tokens=False).ids
    async with served(harmony, OracleEngine(answer=lambda generation: ids), SETTINGS) as case:
        (choice,) = (await ask(case))["choices"]
        streamed, _ = await stream(case)
        (plain,) = (await ask(case, tools=None))["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    ]
    assert [call["function"] for call in streamed["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
    assert plain["message"]["content"] == f"<|start|>assistant{call}"
