"""What coding agents and agent libraries send, each as its requests are: it is taken, and means what it meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.tokens import unpack_u32
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
    SYSTEM_FIRST,
    TEXT,
    agents_codec,
    prompts_of,
    saying,
)
from tests.server.conftest import MODEL, num_ignored, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
ASKED = {"role": "user", "content": "hi"}
COUNTED: dict[str, Any] = {"messages": [ASKED], "thinking": {"type": "adaptive"}}
MESSAGE: dict[str, Any] = {"max_tokens": 9, **COUNTED}
COUNT = f"{MESSAGES}/count_tokens"
TOKENIZE = "/tokenize"


@pytest.fixture(scope="module")
def system_first(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return agents_codec(model_folder, tmp_path_factory.mktemp("system_first"), SYSTEM_FIRST)


async def test_claude_codes_words_of_the_system_within_a_conversation(system_first: TextCodec) -> None:
    """They come among the turns, also between a call and its result."""
    engine = OracleEngine(answer=saying(system_first, TEXT))
    use = {"type": "tool_use", "id": "c1", "name": "find", "input": {"city": "Oslo"}}
    turns = [
        ASKED,
        {"role": "system", "content": "Be quick."},
        {"role": "assistant", "content": [use]},
        {"role": "system", "content": [{"type": "text", "text": "One tool only."}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7 C"}]},
    ]
    async with served(system_first, engine, SETTINGS) as case:
        for body in ({"messages": turns[:2]}, {"messages": turns}):
            reply = await case.client.post(
                MESSAGES, json=MESSAGE | {"system": "Be brief.", "tools": [MESSAGES_TOOL]} | body
            )
            assert reply.status_code == 200, reply.text
    first, second = prompts_of(system_first, engine.opened)
    assert "user\nhi\n\nBe quick.<|im_end|>" in first
    assert "tool\n7 C\n\nOne tool only.<|im_end|>" in second
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n"))


async def test_codex_instructions_and_a_developers_item(system_first: TextCodec) -> None:
    engine = OracleEngine(answer=saying(system_first, TEXT))
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be quick."}]}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    async with served(system_first, engine, SETTINGS) as case:
        body = {"instructions": "Be brief.", "input": [developer, user], "max_output_tokens": 9, "store": False}
        reply = await case.client.post(RESPONSES, json=body)
        assert reply.status_code == 200, reply.text
    (prompt,) = prompts_of(system_first, engine.opened)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nBe quick.<|im_end|>")


BILLING = "x-anthropic-billing-header: cc_version=2.1.154.a1b; cc_entrypoint=cli; cch={};"
HEADED: dict[str, tuple[Any, Any]] = {
    "a block": (
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "Be brief."}],
    ),
    "a line of a block": ([{"type": "text", "text": BILLING + "\nBe brief."}], "Be brief."),
    "a line of a text": (BILLING + "\n\nBe brief.", "Be brief."),
    "a block alone": ([{"type": "text", "text": BILLING}], None),
    "a text alone": (BILLING, None),
}


@pytest.mark.parametrize("name", HEADED)
async def test_claude_codes_billing_header_is_no_part_of_the_prompt(system_first: TextCodec, name: str) -> None:
    """It differs with every request: no page of the prompt would be found again."""
    system, plain = HEADED[name]
    headed = [json.loads(json.dumps(system).replace("cch={}", f"cch={number}")) for number in ("36ee5", "0b2f1")]
    engine = OracleEngine(answer=saying(system_first, TEXT))
    async with served(system_first, engine, SETTINGS) as case:
        for each in (plain, *headed):
            reply = await case.client.post(MESSAGES, json=MESSAGE | {"system": each})
            assert reply.status_code == 200, reply.text
        counts = [(await case.client.post(COUNT, json=COUNTED | {"system": each})).json() for each in (plain, *headed)]
        assert num_ignored(case) == 4
    first, second, third = prompts_of(system_first, engine.opened)
    assert first == second == third
    assert counts == [{"input_tokens": len(engine.opened[0].prompt) // 4}] * 3


async def test_what_only_quotes_the_billing_header_stays(system_first: TextCodec) -> None:
    engine = OracleEngine(answer=saying(system_first, TEXT))
    async with served(system_first, engine, SETTINGS) as case:
        reply = await case.client.post(MESSAGES, json=MESSAGE | {"system": f"Explain\n{BILLING}"})
        assert reply.status_code == 200 and num_ignored(case) == 0
    (prompt,) = prompts_of(system_first, engine.opened)
    assert BILLING in prompt


_CLEAR = {"type": "clear_thinking_20251015"}
EDITS: dict[str, tuple[object, int]] = {
    "none": ({"edits": []}, 0),
    "nothing": ({}, 0),
    "all thinking is kept": ({"edits": [{**_CLEAR, "keep": "all"}]}, 0),
    "all thinking is kept, as an object": ({"edits": [{**_CLEAR, "keep": {"type": "all"}}]}, 0),
    "that of a turn is kept": ({"edits": [{**_CLEAR, "keep": {"type": "thinking_turns", "value": 1}}]}, 1),
    "as many turns as by default": ({"edits": [_CLEAR]}, 1),
}


@pytest.mark.parametrize("name", EDITS)
async def test_a_context_that_is_not_edited_is_taken(system_first: TextCodec, name: str) -> None:
    asked, num = EDITS[name]
    async with served(system_first, OracleEngine(answer=saying(system_first, TEXT)), SETTINGS) as case:
        reply = await case.client.post(MESSAGES, json=MESSAGE | {"context_management": asked})
        assert reply.status_code == 200, reply.text
        assert num_ignored(case) == num
        assert (await case.client.post(COUNT, json=COUNTED | {"context_management": asked})).status_code == 200


LONG = {"role": "user", "content": "word " * 200}
OVERFLOWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a message": (MESSAGES, {"messages": [LONG], "max_tokens": 9}, "prompt is too long: "),
    "a message and its answer": (
        MESSAGES,
        {"messages": [ASKED], "max_tokens": 510},
        "input length and `max_tokens` exceed context limit: ",
    ),
    "a message before it is tokenized": (
        MESSAGES,
        {"messages": [{**LONG, "content": "x" * 9999}], "max_tokens": 9},
        "prompt is too long: ",
    ),
    "a count": (COUNT, {"messages": [{**LONG, "content": "x" * 9999}]}, "prompt is too long: "),
    "a chat": (CHAT, {"messages": [LONG]}, "this model's maximum context length is 512 tokens: "),
    "a response": (RESPONSES, {"input": [LONG]}, "this model's maximum context length is 512 tokens: "),
    "a completion": (
        "/v1/completions",
        {"prompt": "x" * 9999, "max_tokens": 1},
        "this model's maximum context length is 512 tokens: ",
    ),
}


@pytest.mark.parametrize("name", OVERFLOWS)
async def test_agents_recognise_that_a_prompt_is_too_long(system_first: TextCodec, name: str) -> None:
    """They go by the text: Claude Code compacts a conversation only where it begins so, LiteLLM looks for phrases."""
    path, body, start = OVERFLOWS[name]
    async with served(system_first, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith(start) and "context length is 512" in error["message"]
    assert error.get("code") in (None, "context_length_exceeded")


@pytest.mark.parametrize("size", [65, 128])
async def test_names_of_tools_are_as_long_as_those_of_mcp_servers(system_first: TextCodec, size: int) -> None:
    name = "mcp__" + "f" * (size - 5)
    said = CALLS.replace('"find"', f'"{name}"')
    async with served(system_first, OracleEngine(answer=saying(system_first, said)), SETTINGS) as case:
        tools = [{**MESSAGES_TOOL, "name": name}]
        reply = await case.client.post(MESSAGES, json=MESSAGE | {"tools": tools, "max_tokens": 180})
        assert reply.status_code == 200, reply.text
        assert [block["name"] for block in reply.json()["content"]] == [name]
        forced = {"tool_choice": {"type": "tool", "name": name}, "tools": tools, "max_tokens": 180}
        reply = await case.client.post(MESSAGES, json=MESSAGE | forced)
        assert reply.status_code == 200, reply.text


_FORM = {"type": "json_schema", "schema": {"type": "object"}}
FORCED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    CHAT: (
        {"messages": [ASKED], **CHAT_TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    ),
    RESPONSES: (
        {"input": [ASKED], "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        {"text": {"format": {**_FORM, "name": "x"}}},
    ),
    MESSAGES: (
        MESSAGE | {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 90},
        {"output_config": {"format": _FORM}},
    ),
}


@pytest.mark.parametrize("path", FORCED)
async def test_a_call_that_is_asked_for_comes_before_the_form_of_a_text(system_first: TextCodec, path: str) -> None:
    """openai-agents sends both: the form is that of the answer behind the calls."""
    body, form = FORCED[path]
    engine = OracleEngine(answer=saying(system_first, CALLS))
    async with served(system_first, engine, SETTINGS) as case:
        for fields in ({}, form):
            reply = await case.client.post(path, json=body | fields)
            assert reply.status_code == 200, reply.text
        assert num_ignored(case) == 1
    plain, both = (generation.sampling.grammar for generation in engine.opened)
    assert plain is not None and plain == both


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "function", **FUNCTION},
    {"type": "image_generation", "output_format": "png"},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
]
HOSTED_CHOICES: dict[str, tuple[object, list[dict[str, Any]], int]] = {
    "none said": (None, HOSTED, 3),
    "auto": ("auto", HOSTED, 3),
    "none": ("none", HOSTED, 3),
    "none, of none": ("none", HOSTED[:1], 1),
    "a function": ({"type": "function", "name": "find"}, HOSTED, 3),
    "functions": (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]},
        HOSTED,
        3,
    ),
}


@pytest.mark.parametrize("name", HOSTED_CHOICES)
async def test_codex_tools_that_are_no_functions_are_left_out(system_first: TextCodec, name: str) -> None:
    choice, tools, num = HOSTED_CHOICES[name]
    engine = OracleEngine(answer=saying(system_first, CALLS))
    body = {"input": [ASKED], "tool_choice": choice}
    async with served(system_first, engine, SETTINGS) as case:
        for each in (tools, [tool for tool in tools if tool == HOSTED[1]]):
            reply = await case.client.post(RESPONSES, json=body | {"tools": each})
            assert reply.status_code == 200, reply.text
        assert num_ignored(case) == num
    one, other = engine.opened
    assert (one.prompt, one.sampling.grammar) == (other.prompt, other.sampling.grammar)


async def test_a_strict_function_behind_a_hosted_tool_is_named_by_its_place(system_first: TextCodec) -> None:
    strict = {"type": "function", **FUNCTION, "strict": True, "parameters": {"type": "object", "not": {}}}
    async with served(system_first, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(RESPONSES, json={"input": [ASKED], "tools": [HOSTED[0], strict]})
    error = reply.json()["error"]
    assert error["param"] == "tools[1].parameters" and error["message"].startswith("tools[1].parameters of the tool")


NOTHING_THOUGHT = "<think>\n\n</think>\n\n"
"""What the template writes where nothing is to be thought."""
SWITCHED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "Qwen's API, on": (CHAT, {"enable_thinking": True}, True),
    "Qwen's API, off": (CHAT, {"enable_thinking": False}, False),
    "Qwen's API, nothing said": (CHAT, {"enable_thinking": None}, True),
    "Anthropic, on": (MESSAGES, {"thinking": None, "chat_template_kwargs": {"enable_thinking": True}}, True),
    "Anthropic, off": (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}, False),
    "Anthropic, nothing said": (MESSAGES, {"thinking": None, "chat_template_kwargs": {}}, False),
}


@pytest.mark.parametrize("name", SWITCHED)
async def test_switches_of_the_template(system_first: TextCodec, name: str) -> None:
    path, fields, thinks = SWITCHED[name]
    engine = OracleEngine(answer=saying(system_first, TEXT))
    async with served(system_first, engine, SETTINGS) as case:
        reply = await case.client.post(path, json=MESSAGE | {"thinking": None} | fields)
        assert reply.status_code == 200, reply.text
        assert num_ignored(case) == 0
        if path == MESSAGES:
            counted = (await case.client.post(COUNT, json=COUNTED | fields)).json()
            assert counted == {"input_tokens": len(engine.opened[0].prompt) // 4}
    (prompt,) = prompts_of(system_first, engine.opened)
    assert prompt.endswith(NOTHING_THOUGHT) is not thinks


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen's API": (
        CHAT,
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    "Qwen's API, an effort": (CHAT, {"enable_thinking": False, "reasoning_effort": "low"}, "enable_thinking"),
    "Qwen's API, no switch": (CHAT, {"enable_thinking": "yes"}, "enable_thinking"),
    "Anthropic": (
        MESSAGES,
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        "thinking.type",
    ),
    "Anthropic's limit": (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_tokens": 3}, "chat_template_kwargs": {"thinking_budget": 4}},
        "chat_template_kwargs.thinking_budget",
    ),
    "a reserved name": (MESSAGES, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    "a reserved name in a count": (COUNT, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    "a reserved name in /tokenize": (TOKENIZE, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    "two ends in /tokenize": (
        TOKENIZE,
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    "tools of a text": (TOKENIZE, {"messages": None, "prompt": "a", **CHAT_TOOLS}, "tools"),
    "an option of a text": (
        TOKENIZE,
        {"messages": None, "prompt": "a", "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs",
    ),
    "a text that is gone on with": (
        TOKENIZE,
        {"messages": None, "prompt": "a", "continue_final_message": True},
        "continue_final_message",
    ),
    "a tool without a name": (
        TOKENIZE,
        {"tools": [{"type": "function", "function": {"description": "x"}}]},
        "tools[0].function.name",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_what_the_template_cannot_be_told(system_first: TextCodec, name: str) -> None:
    path, fields, param = CONTRADICTIONS[name]
    body = {"messages": [ASKED]} | ({} if path in (COUNT, TOKENIZE) else {"max_tokens": 9})
    async with served(system_first, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(path, json=body | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert (error.get("param") or error["message"].split(":")[0].split(" ")[0]) == param, error


TOKENIZED: dict[str, dict[str, Any]] = {
    "tools": CHAT_TOOLS,
    "no tools": {"tools": []},
    "an option": {"chat_template_kwargs": {"enable_thinking": False}},
    "no answer's beginning": {"add_generation_prompt": False},
    "an answer's beginning": {"add_generation_prompt": True},
    "all": {**CHAT_TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False},
    "an answer that is gone on with": {
        "messages": [ASKED, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


@pytest.mark.parametrize("name", TOKENIZED)
async def test_tokenize_takes_what_a_chat_takes(system_first: TextCodec, name: str) -> None:
    body = {"messages": [ASKED]} | TOKENIZED[name]
    engine = OracleEngine(answer=saying(system_first, TEXT))
    async with served(system_first, engine, SETTINGS) as case:
        told = await case.client.post(TOKENIZE, json=body)
        assert told.status_code == 200, told.text
        assert (await case.client.post(CHAT, json=body)).status_code == 200
        assert num_ignored(case) == 0
    assert told.json()["tokens"] == [*unpack_u32(engine.opened[0].prompt)]


async def test_redacted_thinking_is_skipped(system_first: TextCodec) -> None:
    """Nobody but Anthropic can read it."""
    engine = OracleEngine(answer=saying(system_first, TEXT))
    redacted = {"type": "redacted_thinking", "data": "x"}
    told = {"type": "text", "text": "It is warm."}
    async with served(system_first, engine, SETTINGS) as case:
        for said in ([told], [redacted, told, redacted]):
            turns = [ASKED, {"role": "assistant", "content": said}, ASKED]
            reply = await case.client.post(MESSAGES, json=MESSAGE | {"messages": turns})
            assert reply.status_code == 200, reply.text
        assert num_ignored(case) == 2
    one, other = engine.opened
    assert one.prompt == other.prompt


async def test_answers_in_anthropics_dialect_have_its_name_of_the_requests_id(system_first: TextCodec) -> None:
    async with served(system_first, OracleEngine(answer=saying(system_first, TEXT)), SETTINGS) as case:
        replies = [
            await case.client.post(MESSAGES, json=MESSAGE),
            await case.client.post(MESSAGES, json=MESSAGE | {"stream": True}),
            await case.client.post(MESSAGES, json={}),
            await case.client.get(MESSAGES),
            await case.client.post(COUNT, json=COUNTED),
        ]
        other = await case.client.post(CHAT, json=MESSAGE | {"thinking": None})
    assert [reply.status_code for reply in replies] == [200, 200, 400, 405, 200]
    for reply in replies:
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert other.status_code == 200 and "request-id" not in other.headers
