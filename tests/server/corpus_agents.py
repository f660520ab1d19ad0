"""Bad requests to /v1/responses and /v1/messages, and what each must get. Data only; test_corpus.py sends them."""

import json
import zlib
from collections.abc import Iterator, Mapping

from tests.server.corpus import MODEL, Bad, Case

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
_BLOCK = "messages[0].content[0].type"
_V, _U, _C, _M = "invalid_value", "unsupported", "context_length_exceeded", "missing_required_parameter"


def response(fields: Mapping[str, object]) -> bytes:
    """A good responses body with `fields` put over it."""
    return json.dumps({"model": MODEL, "input": "hi", "max_output_tokens": 5} | dict(fields)).encode()


def message(fields: Mapping[str, object]) -> bytes:
    """A good messages body with `fields` put over it."""
    base = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    return json.dumps(base | dict(fields)).encode()


_USER = {"role": "user", "content": "x"}
_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _said(*parts: object) -> list[object]:
    return [{"role": "user", "content": list(parts)}]


BOTH: list[Bad] = [
    ("model", "gpt-4", "model_not_found", None),
    ("model", 7, _V, None),
    ("temperature", 2.1, _V, None),
    ("temperature", "1", _V, None),
    ("top_p", -1, _V, None),
    ("top_k", 1.5, _V, None),
    ("seed", "x", _V, None),
    ("stream", "yes", _V, None),
    ("metadata", "x", _V, None),
    ("cache_salt", "", _V, None),
    ("tools", {}, _V, None),
    ("tools", [7], _V, "tools[0]"),
    ("kv_transfer_params", {"a": 1}, "unknown_parameter", None),
    ("bootstrap_room", 5, "unknown_parameter", None),
]
"""Fields that both have."""

RESPONSES_ONLY: list[Bad] = [
    ("input", 7, _V, None),
    ("input", None, _V, None),
    ("input", [], _V, None),
    ("input", [7], _V, "input[0]"),
    ("input", [{}], _V, "input[0].type"),
    ("input", [{"role": "user"}], _M, "input[0].content"),
    ("input", [{"role": "tool", "content": "x"}], _V, "input[0].role"),
    ("input", [{"role": "user", "content": 7}], _V, "input[0].content"),
    ("input", [_USER, {"type": "item_reference", "id": "x"}], _U, "input[1].type"),
    ("input", [_USER, {"type": "web_search_call"}], _U, "input[1].type"),
    ("input", _said({"type": "input_image", "image_url": "http://x/"}), _U, "input[0]"),
    ("input", _said({"type": "input_file", "file_id": "x"}), _U, "input[0]"),
    ("input", _said({"type": "input_text", "text": 7}), _V, "input[0]"),
    ("input", [{"type": "function_call", "call_id": "c", "name": "f"}], _M, "input[0].arguments"),
    ("input", [{"type": "function_call_output", "call_id": "c", "output": "x"}], _V, "input[0].call_id"),
    ("input", [_USER, _CALL, {"type": "function_call_output", "output": "x"}], _M, "input[2].call_id"),
    ("input", [_USER, {"type": "reasoning", "encrypted_content": "x"}], _U, "input[1].encrypted_content"),
    ("input", [_USER, {"type": "reasoning", "content": [{"text": 7}]}], _V, "input[1].content[0].text"),
    ("input", "x" * 600, _C, None),
    ("input", "x" * 1_000_000, _C, None),
    ("instructions", 7, _V, None),
    ("max_output_tokens", 0, _V, None),
    ("max_output_tokens", 2**40, _V, None),
    ("max_output_tokens", "5", _V, None),
    ("previous_response_id", "resp_1", _U, None),
    ("conversation", "conv_1", _U, None),
    ("context_management", [{"type": "compaction"}], _U, None),
    ("input", [{**_USER, "type": ""}], _U, "input[0].type"),
    ("input", [{**_USER, "type": 0}], _V, "input[0].type"),
    ("background", True, _U, None),
    ("background", "yes", _V, None),
    ("prompt", {"id": "pmpt_1"}, _U, None),
    ("moderation", {"model": "x"}, _U, None),
    ("truncation", "auto", _U, None),
    ("truncation", 7, _V, None),
    ("stream_options", {"include_obfuscation": True}, _U, "stream_options.include_obfuscation"),
    ("store", "yes", _V, None),
    ("reasoning", {"effort": 7}, _V, "reasoning.effort"),
    ("text", {"format": {"type": "grammar"}}, _V, "text.format.type"),
    ("include", "x", _V, None),
    ("top_logprobs", 21, _V, None),
    ("tools", [{"type": "web_search"}], _U, "tools[0].type"),
    ("tools", [{"type": "mcp", "server_url": "http://x/"}], _U, "tools[0].type"),
    ("tools", [{"type": "web_search"}, {**_TOOL, "name": "a b"}], _V, "tools[1].name"),
    ("tools", [{"type": "mcp"}, _TOOL, _TOOL], _V, "tools[2].name"),
    ("tools", [{"type": "mcp"}, {**_TOOL, "parameters": {"type": "array"}}], _V, "tools[1].parameters"),
    ("tools", [{"type": "function"}], _M, "tools[0].name"),
    ("tools", [{"type": "web_search"}, {"type": 7}], _V, "tools[1].type"),
    ("tools", [{**_TOOL, "name": "a b"}], _V, "tools[0].name"),
    ("tools", [_TOOL, _TOOL], _V, "tools[1].name"),
    ("tools", [{**_TOOL, "parameters": "x"}], _V, "tools[0].parameters"),
    ("tools", [_TOOL], _U, "tools"),
    ("tool_choice", "required", _V, None),
    ("tool_choice", "sometimes", _V, None),
    ("tool_choice", {"type": "web_search"}, _U, "tool_choice.type"),
    ("tool_choice", {"type": "function"}, _M, "tool_choice.name"),
]

MESSAGES_ONLY: list[Bad] = [
    ("max_tokens", 0, _V, None),
    ("max_tokens", None, _V, None),
    ("max_tokens", 2**40, _V, None),
    ("messages", [], _V, None),
    ("messages", "x", _V, None),
    ("messages", [7], _V, "messages[0]"),
    ("messages", _said(), _V, "messages[0].content"),
    ("messages", [_USER, *_said()], _V, "messages[1].content"),
    ("messages", [{"role": "assistant", "content": []}], _V, None),
    ("messages", [{"role": "user"}], _M, "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], _V, "messages[0].role"),
    (
        "messages",
        [_USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}],
        _V,
        "messages",
    ),
    ("messages", _said({"text": "x"}), _V, _BLOCK),
    ("messages", _said({"type": "text"}), _M, "messages[0].content[0].text"),
    ("messages", _said({"type": "image", "source": {"type": "url", "url": "http://x/"}}), _U, _BLOCK),
    ("messages", _said({"type": "document"}), _U, _BLOCK),
    ("messages", _said({"type": "tool_use", "id": "c", "name": "f", "input": {}}), _U, _BLOCK),
    ("messages", _said({"type": "tool_result", "content": "x"}), _M, "messages[0].content[0].tool_use_id"),
    (
        "messages",
        _said({"type": "tool_result", "tool_use_id": "c", "content": "x"}),
        _V,
        "messages[0].content[0].tool_use_id",
    ),
    ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}], _V, None),
    ("messages", _said({"type": "redacted_thinking", "data": "x"}), _U, _BLOCK),
    ("messages", [{"role": "user", "content": "x" * 600}], _C, None),
    ("system", 7, _V, None),
    ("system", [{"type": "image"}], _U, "system[0].type"),
    ("stop_sequences", "x", _V, None),
    ("stop_sequences", [""], _V, None),
    ("thinking", {"type": "on"}, _V, "thinking.type"),
    ("thinking", {"type": "enabled", "budget_tokens": 0}, _V, "thinking.budget_tokens"),
    ("metadata", {"user_id": 7}, _V, "metadata.user_id"),
    ("mcp_servers", [{"url": "http://x/"}], _U, None),
    ("container", "x", _U, None),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, _U, "context_management.edits[0].type"),
    (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]},
        _U,
        "context_management.edits[1].type",
    ),
    ("context_management", {"edits": [{}]}, _V, "context_management.edits[0].type"),
    ("context_management", {"edits": "all"}, _V, "context_management.edits"),
    ("context_management", {"compact": True}, _U, None),
    ("output_format", {"type": "json_schema", "schema": {"type": "object"}}, _U, None),
    ("output_config", {"format": {"type": "grammar"}}, _V, "output_config.format.type"),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}], _U, "tools[0].type"),
    ("tools", [{"name": "f"}], _M, "tools[0].input_schema"),
    ("tools", [{"name": "a b", "input_schema": {}}], _V, "tools[0].name"),
    ("tools", [{"name": "f", "input_schema": {"type": "object"}}], _U, "tools"),
    ("tool_choice", {"type": "any"}, _V, "tool_choice"),
    ("tool_choice", {"type": "tool"}, _M, "tool_choice.name"),
    ("tool_choice", "auto", _V, None),
]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 30 else f"{text[:20]}...{zlib.crc32(text.encode()):x}"


COUNTED = (
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "mcp_servers",
    "container",
    "context_management",
    "output_config",
)
"""Fields that a count of tokens has as well."""


def counts() -> Iterator[Case]:
    """What a message cannot be has no tokens to count either; only how long it is does not matter."""
    for name, value, code, param in BOTH + MESSAGES_ONLY:
        if name in COUNTED and code != _C:
            status = 404 if code == "model_not_found" else 400
            yield Case(f"{COUNT}_{name}={_short(value)}", COUNT, message({name: value}), status, code, param or name)


def no_json() -> Iterator[Case]:
    """Bodies that are not the JSON we accept."""
    for path, good in ((RESPONSES, response({})), (MESSAGES, message({})), (COUNT, message({}))):
        bodies = {
            "empty": b"",
            "truncated": good[:-5],
            "two": good + good,
            "array": b"[" + good + b"]",
            "bad_utf8": good.replace(b"hi", b"\xff"),
            "surrogate": good.replace(b"hi", b"\xed\xa0\x80"),
            "utf16": good.decode().encode("utf-16"),
            "nan": good[:-1] + b', "temperature": NaN}',
            "deep": good[:-1] + b', "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        }
        for name, body in bodies.items():
            yield Case(f"{path}_{name}", path, body, 400, "invalid_json")
        yield Case(f"{path}_get", path, b"", 405, "method_not_allowed", None, "GET", {})
        yield Case(f"{path}_plain", path, good, 415, "unsupported_media_type", None, "POST", {"content-type": "text/x"})


def grammars() -> Iterator[Case]:
    """Schemas that cannot be followed, in the place that each dialect has for one, and fields of other dialects."""
    for keyword, value in {
        "not": {}, "if": {}, "contains": {}, "uniqueItems": True, "propertyNames": {}, "dependentRequired": {},
        "unevaluatedProperties": False, "$ref": "http://127.0.0.1/x", "type": "strin", "pattern": "(?=a)b",
    }.items():  # fmt: skip
        schema = {"type": "string"} | {keyword: value}
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        output = {"format": {"type": "json_schema", "schema": schema}}
        code, place = "unsupported_grammar", "output_config.format"
        yield Case(f"{RESPONSES}_{keyword}", RESPONSES, response({"text": text}), 400, code, "text.format")
        yield Case(f"{MESSAGES}_{keyword}", MESSAGES, message({"output_config": output}), 400, code, place)
    for name, given in {
        "response_format": {"type": "json_object"}, "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"],
        "guided_grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}, "ebnf": 'root ::= "a"',
    }.items():  # fmt: skip
        for path, body in ((RESPONSES, response), (MESSAGES, message), (COUNT, message)):
            yield Case(f"{path}_{name}", path, body({name: given}), 400, _U, name)


def agent_cases() -> Iterator[Case]:
    """Good JSON with one bad field."""
    for path, body, bad in ((RESPONSES, response, RESPONSES_ONLY), (MESSAGES, message, MESSAGES_ONLY)):
        for name, value, code, param in BOTH + bad:
            status = 404 if code == "model_not_found" else 400
            yield Case(f"{path}_{name}={_short(value)}", path, body({name: value}), status, code, param or name)
    yield Case("no_input", RESPONSES, b"{}", 400, _M, "input")
    yield Case("no_max_tokens", MESSAGES, b'{"messages": [{"role": "user", "content": "x"}]}', 400, _M, "max_tokens")
    yield Case("count_no_messages", COUNT, b"{}", 400, _M, "messages")
    yield Case("count_image", COUNT, message({"messages": _said({"type": "image"})}), 400, _U, _BLOCK)
    yield Case("messages_not_json", MESSAGES, b"hello", 400, "invalid_json")
    yield Case("responses_get", f"{RESPONSES}/resp_1", b"", 404, "not_found", None, "GET", {})
    yield Case("embeddings", "/v1/embeddings", b'{"input": "x"}', 404, "not_found")


AGENT_CASES = [*agent_cases(), *counts(), *no_json(), *grammars()]
