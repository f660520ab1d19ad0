"""Bad requests and what each must get. Data only; test_corpus.py sends them."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MODEL = "tiny"
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the answer it must get."""

    name: str
    path: str
    body: bytes
    status: int
    code: str
    param: str | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: dict(JSON))


def completion(fields: Mapping[str, object]) -> bytes:
    """A good completions body with `fields` put over it."""
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 5} | dict(fields)).encode()


def chat(fields: Mapping[str, object]) -> bytes:
    """A good chat body with `fields` put over it."""
    base = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    return json.dumps(base | dict(fields)).encode()


def generate(fields: Mapping[str, object]) -> bytes:
    """A good /generate body with `fields` put over it."""
    return json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 5}} | dict(fields)).encode()


def raw_json() -> Iterator[Case]:
    """Bodies that are not the JSON we accept."""
    good = completion({})
    bodies = {
        "empty": b"",
        "not_json": b"hello",
        "truncated": good[:-5],
        "two_objects": good + good,
        "array": b"[]",
        "string": b'"x"',
        "null": b"null",
        "bad_utf8": good.replace(b"hello", b"he\xffllo"),
        "overlong_utf8": good.replace(b"hello", b"\xc0\xaf"),
        "surrogate_utf8": good.replace(b"hello", b"\xed\xa0\x80"),
        "utf16": good.decode().encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + good,
        "nan": completion({"temperature": 1}).replace(b'"temperature": 1', b'"temperature": NaN'),
        "infinity": completion({"temperature": 1}).replace(b'"temperature": 1', b'"temperature": Infinity'),
        "minus_infinity": completion({"top_p": 1}).replace(b'"top_p": 1', b'"top_p": -Infinity'),
        "float_overflow": completion({"top_p": 1}).replace(b'"top_p": 1', b'"top_p": 1e999'),
        "depth_101": completion({"prompt": [[1]]}).replace(b"[[1]]", b"[" * 100 + b"1" + b"]" * 100),
        "depth_990_in_a_thread": completion({"prompt": [[1]]}).replace(b"[[1]]", b"[" * 988 + b"1" + b"]" * 988)
        + b" " * 20_000,
        "depth_100000": b"[" * 100_000,
        "depth_mixed": b'{"a":[' * 20_000 + b"1" + b"]}" * 20_000,
        "int_5000_digits": completion({"seed": 1}).replace(b'"seed": 1', b'"seed": -' + b"9" * 5000),
        "lone_high_surrogate": good.replace(b"hello", b"\\ud83d"),
        "lone_low_surrogate": good.replace(b"hello", b"\\ude00 x"),
        "surrogate_in_key": good[:-1] + b', "\\udead": 1}',
        "single_quotes": good.replace(b'"', b"'"),
        "trailing_comma": good[:-1] + b",}",
        "comment": b"/* x */" + good,
        "control_character": good.replace(b"hello", b"he\x01llo"),
        "bad_escape": good.replace(b"hello", b"\\x41"),
    }
    for name, body in bodies.items():
        yield Case(f"json_{name}", COMPLETIONS, body, 400, "invalid_json")


def transport() -> Iterator[Case]:
    """Paths, methods, headers, sizes."""
    good = completion({})
    yield Case("unknown_path", "/v1/nothing", good, 404, "not_found")
    yield Case("trailing_slash", "/v1/completions/", good, 404, "not_found")
    yield Case("docs_below", "/docs/x", b"", 404, "not_found", method="GET", headers={})
    yield Case("dot_dot", "/v1/../server_info/x", b"", 404, "not_found", method="GET", headers={})
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        yield Case(f"method_{method}", COMPLETIONS, b"", 405, "method_not_allowed", method=method, headers={})
    yield Case("post_to_health", "/health", b"", 405, "method_not_allowed", headers={})
    yield Case("get_to_drain", "/admin/drain", b"", 405, "method_not_allowed", method="GET", headers={})
    types = (
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
    )
    for kind in types:
        headers = {"content-type": kind} if kind else {}
        yield Case(f"type_{kind}", COMPLETIONS, good, 415, "unsupported_media_type", headers=headers)
    latin = {"content-type": "application/json; charset=latin-1"}
    yield Case("charset", COMPLETIONS, good, 415, "unsupported_media_type", headers=latin)
    yield Case("gzip", COMPLETIONS, good, 415, "unsupported_media_type", headers=JSON | {"content-encoding": "gzip"})
    large = completion({"prompt": "x" * (8 * 1024 * 1024)})
    yield Case("body_too_large", COMPLETIONS, large, 413, "body_too_large")
    yield Case("body_too_large_tokenize", "/tokenize", large, 413, "body_too_large")
    yield Case("uri_too_long", "/v1/models?x=" + "y" * 9000, b"", 414, "uri_too_long", method="GET", headers={})
    many = {f"x-{i}": "1" for i in range(101)}
    yield Case("too_many_headers", COMPLETIONS, good, 431, "headers_too_large", headers=JSON | many)
    yield Case("long_header", COMPLETIONS, good, 431, "headers_too_large", headers=JSON | {"x-long": "y" * 17_000})
    both = JSON | {"content-length": str(len(good)), "transfer-encoding": "chunked"}
    yield Case("length_and_chunked", COMPLETIONS, good, 400, "invalid_request", headers=both)
    for value in ("", "soon", "0", "-1", "nan", "-inf", "1s", "0x10"):
        headers = JSON | {"x-deadline-seconds": value}
        yield Case(f"deadline_{value}", COMPLETIONS, good, 400, "invalid_value", "x-deadline-seconds", headers=headers)


Bad = tuple[str, object, str, str | None]
"""(field, value, code, param; None: the field itself)"""

_V, _U, _C = "invalid_value", "unsupported", "context_length_exceeded"
_M = "missing_required_parameter"

SHARED: list[Bad] = [
    ("model", "gpt-4", "model_not_found", None),
    ("model", "", "model_not_found", None),
    ("model", 7, _V, None),
    ("model", "x" * 10_000, "model_not_found", None),
    *[("max_tokens", value, _V, None) for value in (0, -1, 1.5, 1.0, "5", True, 2**31, 2**63, 10**19, 513)],
    ("max_tokens", 511, _C, "prompt"),
    *[("n", value, _V, None) for value in (0, -1, 129, 10**6, 1.0, "1", True)],
    ("best_of", 5, _U, None),
    *[("temperature", value, _V, None) for value in (-0.1, 2.1, "1", True, 1e300)],
    *[("top_p", value, _V, None) for value in (-1, 1.1, "1")],
    *[("top_k", value, _V, None) for value in (-2, 1.5, 2**31, "3")],
    *[("min_p", value, _V, None) for value in (-0.1, 1.1)],
    *[("presence_penalty", value, _V, None) for value in (-2.1, 2.1, "0")],
    *[("frequency_penalty", value, _V, None) for value in (-2.1, 2.1)],
    *[("repetition_penalty", value, _V, None) for value in (0, -1, 2.5, 1e-39)],
    *[("seed", value, _V, None) for value in (2**63, 10**20, -(2**63) - 1, 1.5, "1", True)],
    ("logit_bias", {str(i % 272): 0 for i in range(272)} | {f"{i:04}": 0 for i in range(30)}, _V, None),
    *[("logit_bias", value, _V, None) for value in ({"272": 1}, {"-1": 1}, {"a": 1}, {"1": 101}, {"1": -100.5})],
    *[("logit_bias", value, _V, None) for value in ({"1": 1e300}, {"\u0661": 1}, {"1": 1, "01": 1}, {str(10**18): 1})],
    ("logit_bias", [1], _V, None),
    ("logit_bias", {"1": "x"}, _V, "logit_bias.1"),
    *[("stop", value, _V, None) for value in ("", "x" * 1025, ["a"] * 1025, ["a", ""], ["x" * 1000] * 17)],
    ("stop", 7, _V, None),
    ("stop", ["a", 7], _V, "stop[1]"),
    ("stop", {"a": "b"}, _V, None),
    ("stop_token_ids", [272], _V, None),
    ("stop_token_ids", [-1], _V, None),
    ("stop_token_ids", [1] * 1025, _V, None),
    ("stop_token_ids", [1.0], _V, "stop_token_ids[0]"),
    ("stop_token_ids", [True], _V, "stop_token_ids[0]"),
    ("min_tokens", -1, _V, None),
    ("min_tokens", 6, _V, None),
    ("ignore_eos", 1, _V, None),
    ("ignore_eos", "true", _V, None),
    ("stream", "yes", _V, None),
    ("stream", 1, _V, None),
    ("stream_options", {"include_usage": True}, _V, None),
    ("prompt_logprobs", 21, _V, None),
    ("prompt_logprobs", -1, _V, None),
    ("cache_salt", "", _V, None),
    ("cache_salt", "x" * 257, _V, None),
    ("cache_salt", 7, _V, None),
    ("user", "x" * 257, _V, None),
    ("user", 7, _V, None),
    ("metadata", "x", _V, None),
    ("store", "yes", _V, None),
    ("priority", "high", _V, None),
    ("rid", 7, _V, None),
    ("timings", "yes", _V, None),
    ("return_token_ids", 1, _V, None),
    *[
        (name, "2.2.2.2", "unknown_parameter", None)
        for name in (
            "bootstrap_host", "bootstrap_room", "bootstrap_port", "kv_transfer_params", "page", "pages",
            "page_table", "room", "attempt", "namespace", "tenant", "prefill_url", "host", "data_parallel_rank",
            "disagg_prefill_dp_rank", "worker_id", "_internal", "fake_kv",
        )
    ],
    ("bad_words", ["x", "y" * 1025], _V, "bad_words[1]"),
    ("bad_words", ["x" * 1000] * 5, _V, None),
    ("bad_words", [""], _V, "bad_words[0]"),
    ("allowed_token_ids", [], _V, None),
    ("allowed_token_ids", [1, 272], _V, None),
    ("allowed_token_ids", [-1], _V, None),
    ("allowed_token_ids", ["a"], _V, "allowed_token_ids[0]"),
    ("bad_words", ["x"] * 301, _V, None),
    ("bad_words", "x", _V, None),
    ("return_tokens_as_token_ids", 1, _V, None),
    *[
        (name, value, _U, None)
        for name, value in {
            "functions": [{}],
            "structural_tag": "{}",
            "image_data": ["x"],
            "audio": {"voice": "x"},
            "modalities": ["text", "audio"],
            "logits_processors": ["x"],
            "custom_logit_processor": "x",
            "lora_path": "x",
            "use_beam_search": True,
            "chat_template": "{{ 1 }}",
            "return_hidden_states": True,
        }.items()
    ],
]  # fmt: skip
"""Fields that mean the same in both OpenAI dialects."""

COMPLETION_ONLY: list[Bad] = [
    ("tools", [{"type": "function"}], _U, None),
    ("tool_choice", "required", _U, None),
    ("prompt", None, _V, None),
    ("prompt", "", _V, None),
    ("prompt", [], _V, None),
    ("prompt", [""], _V, "prompt[0]"),
    ("prompt", [[]], _V, "prompt[0]"),
    ("prompt", ["a", ""], _V, "prompt[1]"),
    ("prompt", 7, _V, None),
    ("prompt", {"a": 1}, _V, None),
    ("prompt", [1, "a"], _V, "prompt[1]"),
    ("prompt", ["a", 1], _V, "prompt[1]"),
    ("prompt", [-1], _V, "prompt[0]"),
    ("prompt", [1, 272], _V, "prompt[1]"),
    ("prompt", [1.0], _V, "prompt[0]"),
    ("prompt", [True], _V, "prompt[0]"),
    ("prompt", [1, None], _V, "prompt[1]"),
    ("prompt", [[1, 2**63]], _V, "prompt[0][1]"),
    ("prompt", [[1], [2, -5]], _V, "prompt[1][1]"),
    ("prompt", [[[1]]], _V, "prompt[0][0]"),
    ("prompt", ["a"] * 1025, _V, None),
    ("prompt", "x" * 401, _C, None),
    ("prompt", "x" * 600, _C, None),
    ("prompt", [1] * 512, _C, None),
    ("prompt", "x" * 1_000_000, _C, None),
    ("prompt", ["a", "x" * 1_000_000], _C, "prompt[1]"),
    ("logprobs", 21, _V, None),
    ("logprobs", -1, _V, None),
    ("logprobs", True, _V, None),
    ("logprobs", 10**6, _V, None),
    ("echo", "yes", _V, None),
    ("truncate_prompt_tokens", 0, _V, None),
    ("truncate_prompt_tokens", -2, _V, None),
    ("truncation_side", "right", _V, None),
    ("truncation_side", "middle", _V, None),
    ("truncate_prompt_tokens", 1.0, _V, None),
    ("suffix", "tail", _U, None),
]


def _user(content: object) -> list[object]:
    return [{"role": "user", "content": content}]


_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": fields}


TOOLS: list[Bad] = [
    ("tools", {"f": 1}, _V, None),
    ("tools", [7], _V, "tools[0]"),
    ("tools", [{"type": "function"}], _M, "tools[0].function"),
    ("tools", [{"type": "web_search"}], _V, "tools[0].type"),
    ("tools", [_function(description="x")], _M, "tools[0].function.name"),
    ("tools", [_function(name="a b")], _V, "tools[0].function.name"),
    ("tools", [_function(name="f" * 129)], _V, "tools[0].function.name"),
    ("tools", [_function(name="f"), _function(name="f")], _V, "tools[1].function.name"),
    ("tools", [_function(name="f", parameters=["x"])], _V, "tools[0].function.parameters"),
    ("tools", [_function(name="f", parameters={"type": "string"})], _V, "tools[0].function.parameters"),
    ("tools", [_function(name="f", description="x" * (1 << 20))], _V, None),
    ("tools", [_function(name=f"f{k}") for k in range(513)], _V, None),
    ("tool_choice", "required", _V, None),
    ("tool_choice", "maybe", _V, None),
    ("tool_choice", 7, _V, None),
    ("tool_choice", {"type": "function"}, _M, "tool_choice.function"),
    ("tool_choice", {"type": "allowed_tools"}, _M, "tool_choice.allowed_tools"),
    ("tool_choice", _function(name="f"), _V, None),
    ("parallel_tool_calls", "yes", _V, None),
]
"""Bad tools of chats."""

CHAT_ONLY: list[Bad] = [
    *TOOLS,
    ("messages", None, _V, None),
    ("messages", [], _V, None),
    ("messages", "hi", _V, None),
    ("messages", [7], _V, "messages[0]"),
    ("messages", [{"content": "hi"}], "missing_required_parameter", "messages[0].role"),
    ("messages", [{"role": "user"}], "missing_required_parameter", "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "missing_required_parameter", "messages[0].content"),
    ("messages", [{"role": "god", "content": "hi"}], _V, "messages[0].role"),
    ("messages", [{"role": "tool", "content": "hi", "tool_call_id": "c1"}], _V, "messages[0].tool_call_id"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "content": "x", "tool_call_id": "c2"}],
        _V,
        "messages[1].tool_call_id",
    ),
    (
        "messages",
        [
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "user", "content": "x"},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
        ],
        _V,
        "messages[2].tool_call_id",
    ),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [_CALL]}], _V, "messages[0].tool_calls"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [_CALL | {"function": {"name": "a b", "arguments": "{}"}}]}],
        _V,
        "messages[0].tool_calls[0].function.name",
    ),
    ("messages", [{"role": "user", "content": "x", "name": "a\nb"}], _V, "messages[0].name"),
    ("messages", [{"role": "assistant", "content": "x", "audio": {"id": "a"}}], _U, "messages[0].audio"),
    (
        "messages",
        _user([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),
        _U,
        "messages[0].content[0].type",
    ),
    ("messages", _user([{"type": "text", "text": "x"}, {"type": "input_audio"}]), _U, "messages[0].content[1].type"),
    ("messages", _user([{"type": "file", "file": {"file_id": "x"}}]), _U, "messages[0].content[0].type"),
    ("messages", _user([{"type": "text"}]), _V, "messages[0].content[0].text"),
    ("messages", _user([{"text": "x"}]), _U, "messages[0].content[0].type"),
    ("messages", _user(["x"]), _V, "messages[0].content[0]"),
    ("messages", _user(7), _V, "messages[0].content"),
    ("messages", _user("x" * 600), _C, None),
    ("messages", _user("x" * 1_000_000), _C, None),
    ("max_completion_tokens", 6, _V, "max_tokens"),
    ("logprobs", 3, _V, None),
    ("top_logprobs", 3, _V, None),
    ("top_logprobs", 21, _V, None),
    ("top_logprobs", 10**6, _V, None),
    ("echo", True, _U, None),
    ("chat_template_kwargs", {"messages": "x"}, _V, None),
    ("chat_template_kwargs", {"bos_token": "x"}, _V, None),
    ("chat_template_kwargs", {"__class__": "x"}, _V, None),
    ("chat_template_kwargs", {"a b": "x"}, _V, None),
    ("chat_template_kwargs", {f"k{i}": 1 for i in range(17)}, _V, None),
    ("continue_final_message", True, _V, "messages"),
    ("add_generation_prompt", "no", _V, None),
    ("truncate_prompt_tokens", 0, _V, None),
    ("truncate_prompt_tokens", -2, _V, None),
    ("truncation_side", "right", _V, None),
    ("truncation_side", "middle", _V, None),
    ("truncate_prompt_tokens", 1.0, _V, None),
]

GENERATE_ONLY: list[Bad] = [
    ("text", "", _V, None),
    ("text", 7, _V, None),
    ("text", [], _V, None),
    ("text", ["a", 7], _V, "text[1]"),
    ("text", ["a", ""], _V, "text[1]"),
    ("text", ["a"] * 1025, _V, None),
    ("text", ["a", "x" * 600], _C, None),
    ("input_ids", [[1]], _V, "text"),
    ("input_ids", [1], _V, "text"),
    *[("rid", value, _V, None) for value in (7, "a\nb", "a\x1b[31m", "a/b", "", "\u2028")],
    ("bootstrap_room", 5, "unknown_parameter", None),
    ("top_logprobs_num", 10**6, _V, None),
    ("image_data", "http://x/", _U, None),
    ("logprob_start_len", -2, _V, None),
    ("logprob_start_len", 5, _V, None),
    ("sampling_params", [1], _V, None),
    ("sampling_params", {"max_new_tokens": -1}, _V, "sampling_params.max_new_tokens"),
    ("sampling_params", {"temperature": -1}, _V, "sampling_params.temperature"),
    ("sampling_params", {"structural_tag": "a"}, _U, "sampling_params.structural_tag"),
    ("sampling_params", {"n": 0}, _V, "sampling_params.n"),
    ("sampling_params", [{}], _V, None),
    ("sampling_params", {"bootstrap_host": "x"}, "unknown_parameter", "sampling_params.bootstrap_host"),
]


def _status(code: str) -> int:
    return 404 if code == "model_not_found" else 400


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 30 else f"{text[:20]}...{zlib.crc32(text.encode()):x}"


def fields() -> Iterator[Case]:
    """Good JSON with one bad field."""
    for name, value, code, param in SHARED + COMPLETION_ONLY:
        case = f"completions_{name}={_short(value)}"
        yield Case(case, COMPLETIONS, completion({name: value}), _status(code), code, param or name)
    for name, value, code, param in SHARED + CHAT_ONLY:
        where = "messages" if code == _C else param or name
        yield Case(f"chat_{name}={_short(value)}", CHAT, chat({name: value}), _status(code), code, where)
    for name, value, code, param in GENERATE_ONLY:
        yield Case(f"generate_{name}={_short(value)}", GENERATE, generate({name: value}), 400, code, param or name)


def missing() -> Iterator[Case]:
    """Required fields left out, and the small endpoints."""
    code = "missing_required_parameter"
    yield Case("no_prompt", COMPLETIONS, b'{"model": "tiny"}', 400, code, "prompt")
    yield Case("no_messages", CHAT, b'{"model": "tiny"}', 400, code, "messages")
    yield Case("no_text", GENERATE, b"{}", 400, _V, "text")
    yield Case("no_tokens", "/detokenize", b"{}", 400, code, "tokens")
    yield Case("detokenize_range", "/detokenize", b'{"tokens": [1, 272]}', 400, _V, "tokens[1]")
    many = json.dumps({"tokens": [1] * 2049}).encode()
    yield Case("detokenize_more_than_the_context", "/detokenize", many, 400, _V, "tokens")
    yield Case("detokenize_type", "/detokenize", b'{"tokens": ["a"]}', 400, _V, "tokens[0]")
    yield Case("tokenize_nothing", "/tokenize", b"{}", 400, _V, "prompt")
    both = b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}'
    yield Case("tokenize_both", "/tokenize", both, 400, _V, "prompt")
    yield Case("tokenize_type", "/tokenize", b'{"prompt": 7}', 400, _V, "prompt")
    yield Case("unknown_model_get", "/v1/models/gpt-4", b"", 404, "model_not_found", "model", "GET", {})
    yield Case("unknown_past_request", "/admin/requests/x", b"", 404, "not_found", None, "GET", {})
    for options in ({"include_usage": "yes"}, {"include_usages": True}, {"include_obfuscation": 1}):
        body = completion({"stream": True, "stream_options": options})
        yield Case(f"stream_options_{options}", COMPLETIONS, body, 400, _V, f"stream_options.{next(iter(options))}")
    body = completion({"stream": True, "stream_options": {"include_obfuscation": True}})
    yield Case("obfuscation", COMPLETIONS, body, 400, _U, "stream_options.include_obfuscation")


CASES = [*raw_json(), *transport(), *fields(), *missing()]
