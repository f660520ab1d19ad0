"""More bad requests: sizes that must be refused before work is spent on them, look-alikes, grammars, keys."""

import json
from collections.abc import Iterator, Mapping

from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, Right
from tests.server.corpus import CHAT, COMPLETIONS, GENERATE, JSON, Case, chat, completion, generate

USER = ApiKey("u" * 32, Namespace("acme"))
ADMIN = ApiKey("a" * 40, Namespace("ops"), frozenset(Right))
_V, _U, _C, _M = "invalid_value", "unsupported", "context_length_exceeded", "missing_required_parameter"
_MANY = 100_000
_LONG = 6_000_000


def _call(arguments: str, name: str = "f") -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def large() -> Iterator[Case]:
    """What cannot fit is refused before it is rendered or cut into tokens."""
    user: dict[str, object] = {"role": "user", "content": "x"}
    conversations: Mapping[str, list[dict[str, object]]] = {
        "arguments": [{"role": "assistant", "tool_calls": [_call(json.dumps({"a": "x" * _LONG}))]}, user],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "x" * 1000}] * 3000}],
        "messages": [user] * 100_000,
        "empty_messages": [{"role": "user", "content": ""}] * 100_000,
        "control_tokens": [{"role": "user", "content": "<|im_end|>" * 300_000}],
        "heads_of_control_tokens": [{"role": "user", "content": "<"}] * 512,
        "system": [{"role": "system", "content": "x" * _LONG}, user],
        "calls": [{"role": "assistant", "tool_calls": [_call("{}") | {"id": f"c{k}"} for k in range(20_000)]}, user],
    }
    for name, messages in conversations.items():
        yield Case(f"large_chat_{name}", CHAT, chat({"messages": messages}), 400, _C, "messages")
        body = json.dumps({"messages": messages}).encode()
        yield Case(f"large_tokenize_{name}", "/tokenize", body, 400, _C, "messages")
    text = "x" * _LONG
    yield Case("large_tokenize_prompt", "/tokenize", json.dumps({"prompt": text}).encode(), 400, _C, "prompt")
    yield Case("large_prompts", COMPLETIONS, completion({"prompt": ["a"] * 100_000}), 400, _V, "prompt")
    yield Case("large_ids", COMPLETIONS, completion({"prompt": [1] * 1_000_000}), 400, _C, "prompt")
    yield Case(
        "large_ids_generate", GENERATE, json.dumps({"input_ids": [1] * 1_000_000}).encode(), 400, _C, "input_ids"
    )
    yield Case("large_text_generate", GENERATE, generate({"text": text}), 400, _C, "text")
    yield Case("large_stop", COMPLETIONS, completion({"stop": text}), 400, _V, "stop")
    yield Case("large_stops", COMPLETIONS, completion({"stop": ["a"] * 100_000}), 400, _V, "stop")
    yield Case("large_salt", COMPLETIONS, completion({"cache_salt": text}), 400, _V, "cache_salt")
    yield Case("large_user", CHAT, chat({"user": text}), 400, _V, "user")
    bias = {str(number): 1 for number in range(100_000)}
    yield Case("large_bias", COMPLETIONS, completion({"logit_bias": bias}), 400, _V, "logit_bias")
    yield Case("large_model_name", COMPLETIONS, completion({"model": text}), 404, "model_not_found", "model")
    yield Case("large_field_name", COMPLETIONS, completion({"_" + text: 1}), 400, "unknown_parameter", "_" + "x" * 79)
    yield Case("large_integer", COMPLETIONS, completion({"seed": 0})[:-2] + b"9" * _LONG + b"}", 400, "invalid_json")
    yield Case("large_spaces", COMPLETIONS, b" " * _LONG, 400, "invalid_json")
    yield Case("large_backslashes", COMPLETIONS, b'{"a": "' + b"\\" * _LONG + b'"', 400, "invalid_json")
    yield Case("large_open_string", COMPLETIONS, b'{"a": "' + text.encode(), 400, "invalid_json")
    yield Case("large_brackets_in_string", COMPLETIONS, b'{"a": "' + b"[" * _LONG, 400, "invalid_json")
    yield Case("large_commas", COMPLETIONS, b"[" + b"," * _LONG, 400, "invalid_json")


def grammars() -> Iterator[Case]:
    """Structured output is refused where the grammar cannot be followed, costs more than one may take, or is not the
    only one."""
    values: Mapping[str, object] = {
        "structural_tag": {"type": "x"},
        "functions": [{"name": "f", "parameters": {"type": "nothing"}}],
        "lora_request": {"name": "x"},
        "input_embeds": [[0.5]],
        "prompt_embeds": "AAAA",
        "video_data": ["http://127.0.0.1/"],
    }
    for name, value in values.items():
        yield Case(f"grammar_completions_{name}", COMPLETIONS, completion({name: value}), 400, _U, name)
        yield Case(f"grammar_chat_{name}", CHAT, chat({name: value}), 400, _U, name)
    for number, (fields, code, param) in enumerate(bad_grammars()):
        yield Case(f"structured_{number}_{param}", COMPLETIONS, completion(fields), 400, code, param)
        yield Case(f"structured_chat_{number}_{param}", CHAT, chat(fields), 400, code, param)
        if len(fields) == 1 and isinstance(fields.get("guided_json"), dict):
            body = generate({"sampling_params": {"json_schema": fields["guided_json"]}})
            yield Case(f"structured_generate_{number}", GENERATE, body, 400, code, "sampling_params.json_schema")


def bad_grammars() -> Iterator[tuple[Mapping[str, object], str, str]]:
    """(fields, code, param) of constraints that are refused."""
    unusable, nested, object_of = "unsupported_grammar", "structured_outputs.", "response_format.json_schema"
    chain = "".join(f"r{number} ::= r{number + 1}\n" for number in range(5000))
    slow = ("\n" * 60_000, f"{chain}root ::= r0")  # to tell apart, and to translate; its last rule is not there
    for keyword, value in {
        "not": {}, "if": {}, "contains": {}, "uniqueItems": True, "propertyNames": {}, "dependentRequired": {},
        "unevaluatedProperties": False, "$ref": "http://127.0.0.1/x", "type": "strin", "pattern": "(?=a)b",
        "x-guidance": {"lenient": True},
    }.items():  # fmt: skip
        code = _U if keyword == "x-guidance" else unusable
        yield {"guided_json": {"type": "string"} | {keyword: value}}, code, "guided_json"
    for schema in hostile_schemas():
        yield {"guided_json": schema}, unusable, "guided_json"
    for name in ("regex", "guided_regex"):
        for pattern in ("[", "a{0,1000}" * 40 + "(", "\\b", "*", "\\", "a\\", "a|\\", "\\\\\\"):
            yield {name: pattern}, unusable, name
        yield {name: "(a+)+$" * 30_000}, _V, name
    for name in ("ebnf", "grammar", "guided_grammar"):
        for grammar in (
            "root ::= root",
            "x",
            "((((",
            "root ::= " + "(" * 3000,
            'start: "a" b',
            "start: /(?=a)/",
            *slow,
        ):
            yield {name: grammar}, unusable, name
    for given in ("{", "[1]", "1", "null", "{" * 200):
        yield {"json_schema": given}, _V, "json_schema"
    yield {"guided_choice": ["x"] * 5000}, _V, "guided_choice"
    yield {"guided_choice": ["x", 1]}, _V, "guided_choice[1]"
    yield {"guided_choice": [f"{i}" * 100 for i in range(4000)]}, _V, "guided_choice"
    yield {"guided_json": {"enum": ["x" * 200_000]}}, _V, "guided_json"
    yield {"guided_json": {}, "regex": "a"}, _V, "guided_json"
    yield {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, _V, "response_format"
    yield {"guided_choice": []}, _V, "guided_choice"
    yield {"structured_outputs": {"choice": []}}, _V, nested + "choice"
    yield {"structured_outputs": {"regex": "a", "choice": ["a"]}}, _V, nested + "regex"
    yield {"structured_outputs": {"regexp": "a"}}, _V, nested + "regexp"
    yield {"structured_outputs": {"structural_tag": "{}"}}, _U, nested + "structural_tag"
    yield {"response_format": {"type": "structural_tag"}}, _U, "response_format"
    yield {"response_format": {"type": "json"}}, _V, "response_format.type"
    yield {"response_format": {}}, "missing_required_parameter", "response_format.type"
    yield {"response_format": {"type": "json_schema"}}, "missing_required_parameter", object_of + ".schema"
    yield {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, _V, object_of + ".schema"


def hostile_schemas() -> Iterator[object]:
    """Schemas that would cost much, or that nothing satisfies."""
    doubled = {
        f"x{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}, {"type": "null"}]}] * 2} for i in range(30)
    }
    ring = {f"x{i}": {"allOf": [{"$ref": f"#/$defs/x{(i + 1) % 9}"}, {"type": "object"}]} for i in range(9)}
    yield {"$ref": "#/$defs/x0", "$defs": doubled | {"x30": {"type": ["string", "null"]}}}
    yield {"$ref": "#"}
    yield {"$ref": "#/$defs/x0", "$defs": ring}
    yield {"type": "string", "minLength": 5, "maxLength": 3}
    yield {"enum": []}
    yield {"type": "integer", "multipleOf": 9_999_991}  # a state for each remainder: gigabytes
    yield {"allOf": [{"type": "integer", "multipleOf": number} for number in (997, 1009, 1013)]}
    yield {"type": "object", "properties": {f"{number}": {} for number in range(9000)}}


def urls() -> Iterator[Case]:
    """Nothing is ever fetched, wherever an address is written."""
    for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://x", ""):
        for kind in ("image_url", "video_url", "audio_url", "input_audio", "file"):
            content = [{"type": kind, kind: {"url": url}}]
            body = chat({"messages": [{"role": "user", "content": content}]})
            yield Case(f"url_{kind}_{url}", CHAT, body, 400, _U, "messages[0].content[0].type")


def look_alikes() -> Iterator[Case]:
    """Almost right: numbers of another kind, headers of another case, names in another place."""
    good = completion({})
    for value in ("5_0", "+5", "infinity", "Infinity", ".5", "5.", "5,6", "1e", "e5", "5 6", "True", "0.0", "0e9"):
        yield Case(
            f"seconds_{value}", COMPLETIONS, good, 400, _V, "x-deadline-seconds",
            headers=JSON | {"x-deadline-seconds": value},
        )  # fmt: skip
    for kind in (
        "application/json; CHARSET=utf-16", "application/json; charset=utf-8x", "text/json", "application/*",
        "application/json, text/plain", "json", "application/ json", "application/x-ndjson",
    ):  # fmt: skip
        headers = {"content-type": kind}
        yield Case(f"kind_{kind}", COMPLETIONS, good, 415, "unsupported_media_type", headers=headers)
    for encoding in ("br", "deflate", "identity, gzip", "x"):
        headers = JSON | {"content-encoding": encoding}
        yield Case(f"encoding_{encoding}", COMPLETIONS, good, 415, "unsupported_media_type", headers=headers)
    for path in (
        "//v1/completions",
        "/v1/completions;x",
        "/V1/completions",
        "/v1/completions%2f",
        "/v1%2Fcompletions/",
    ):
        yield Case(f"path_{path}", path, good, 404, "not_found")
    for path in (
        "/server_info/x",
        "/metrics/",
        "/admin",
        "/admin/",
        "/admin/requests/",
        "/admin/trees/x",
        "/view/x",
        "/.env",
        "/debug/pprof",
    ):
        yield Case(f"path_{path}", path, b"", 404, "not_found", method="GET", headers={})
    for method, path in (
        ("POST", "/metrics"),
        ("DELETE", "/admin/drain"),
        ("PUT", "/tokenize"),
        ("POST", "/v1/models"),
    ):
        yield Case(f"method_{method}_{path}", path, b"", 405, "method_not_allowed", method=method, headers={})
    yield Case("admin_from_browser", "/admin/drain", b"", 403, "forbidden", headers={"origin": "http://x.example"})
    for model in ("%00", "tiny%20", "%2e%2e/tiny", "TINY", "y" * 4000):
        path = f"/v1/models/{model}"
        yield Case(f"model_{model}"[:40], path, b"", 404, "model_not_found", "model", "GET", {})
    yield Case("tokenize_model", "/tokenize", b'{"prompt": "a", "model": "x"}', 404, "model_not_found", "model")
    yield Case("detokenize_model", "/detokenize", b'{"tokens": [1], "model": "x"}', 404, "model_not_found", "model")
    yield Case("tokenize_internal", "/tokenize", b'{"prompt": "a", "room": "x"}', 400, "unknown_parameter", "room")
    tokenize = b'{"messages": [{"role": "user"}]}'
    yield Case("tokenize_no_content", "/tokenize", tokenize, 400, _M, "messages[0].content")
    for token in ("1.0", "true", "null", "-1", "1e2", "[1]", str(10**19)):
        body = b'{"tokens": [' + token.encode() + b"]}"
        yield Case(f"detokenize_{token}", "/detokenize", body, 400, _V, "tokens[0]")


def inside_sampling_params() -> Iterator[Case]:
    """The native dialect names the field where the client wrote it."""
    values: Mapping[str, object] = {
        "top_p": -1, "top_k": -2, "min_p": 2, "seed": "x", "stop": "", "stop_token_ids": [272], "min_new_tokens": 6,
        "max_new_tokens": 1.5, "presence_penalty": 3, "frequency_penalty": -3, "repetition_penalty": 0, "n": 0,
        "logit_bias": {"999": 1}, "ignore_eos": "no", "skip_special_tokens": 1, "cache_salt": "", "user": 5,
    }  # fmt: skip
    for name, value in values.items():
        body = generate({"sampling_params": {"max_new_tokens": 5} | {name: value}})
        yield Case(f"generate_inside_{name}", GENERATE, body, 400, _V, f"sampling_params.{name}")
    body = generate({"sampling_params": {"ebnf": "x"}})
    yield Case("generate_inside_ebnf", GENERATE, body, 400, "unsupported_grammar", "sampling_params.ebnf")
    for name, value in {"model": "gpt-4", "stream": True, "prompt": "x"}.items():
        body = generate({"sampling_params": {name: value}})
        yield Case(f"generate_misplaced_{name}", GENERATE, body, 400, _U, f"sampling_params.{name}")
    for name in ("bootstrap_room", "page_table", "worker", "kv_transfer_params", "_x", "host", "namespace", "rooms"):
        body = generate({"sampling_params": {name: 1}})
        yield Case(f"generate_internal_{name}", GENERATE, body, 400, "unknown_parameter", f"sampling_params.{name}")


def keys() -> Iterator[Case]:
    """Sent to a server with keys: one for the API, one for the admin routes as well."""
    good, right = completion({}), f"Bearer {USER.secret}"
    wrong = {
        "none": None, "empty": "", "scheme": "Bearer", "space": "Bearer ", "basic": "Basic dTp1", "bare": USER.secret,
        "short": right[:-1], "long": right + "u", "other_case": right.upper(), "namespace": "Bearer acme",
        "two": f"{right}, {right}", "huge": "Bearer " + "u" * 9000, "null": "Bearer null", "digest": "Digest x=1",
    }  # fmt: skip
    for name, value in wrong.items():
        headers = JSON if value is None else JSON | {"authorization": value}
        yield Case(f"key_{name}", COMPLETIONS, good, 401, "invalid_api_key", headers=headers)
    other = {"api-key": USER.secret, "x-api-key": USER.secret[1:], "cookie": f"key={USER.secret}"}
    for name, value in other.items():
        yield Case(f"key_in_{name}", COMPLETIONS, good, 401, "invalid_api_key", headers=JSON | {name: value})
    query = f"{COMPLETIONS}?api_key={USER.secret}"
    yield Case("key_in_query", query, good, 401, "invalid_api_key")
    yield Case("key_not_for_paths", "/nothing", b"", 401, "invalid_api_key", method="GET", headers={})
    for path in ("/metrics", "/flush_cache", "/admin/requests/x"):
        headers = {"authorization": f"Bearer {ADMIN.secret}"}
        yield Case(f"admin_on_public_{path}", path, b"", 404, "not_found", method="GET", headers=headers)


def bad_items() -> Iterator[Case]:
    """Bodies with a hundred thousand mistakes: the first one is the answer, and nobody else waits for the others."""
    sevens: list[object] = [7] * _MANY
    for name, value in (("stop", sevens), ("stop_token_ids", [""] * _MANY)):
        yield Case(f"bad_items_{name}", COMPLETIONS, completion({name: value}), 400, _V, f"{name}[0]")
        params = {"text": "a", "sampling_params": {name: value}}
        yield Case(f"bad_items_g_{name}", GENERATE, json.dumps(params).encode(), 400, _V, f"sampling_params.{name}[0]")
    for name, messages, where, code in (
        ("messages", sevens, "messages[0]", _V),
        ("empty", [{}] * _MANY, "messages[0].role", _M),
        ("content", [{"role": "user", "content": sevens}], "messages[0].content[0]", _V),
        ("tool_calls", [{"role": "assistant", "tool_calls": sevens}], "messages[0].tool_calls[0]", _V),
    ):
        yield Case(f"bad_items_{name}", CHAT, chat({"messages": messages}), 400, code, where)
        body = json.dumps({"messages": messages}).encode()
        yield Case(f"bad_items_tokenize_{name}", "/tokenize", body, 400, code, where)
    lists: dict[str, object] = {f"k{i}": [] for i in range(_MANY)}
    for name, path, body in (
        ("logit_bias", COMPLETIONS, completion({"logit_bias": lists})),
        ("chat_template_kwargs", CHAT, chat({"chat_template_kwargs": lists})),
    ):
        yield Case(f"bad_items_{name}", path, body, 400, _V, name)
    yield Case("bad_items_prompt", COMPLETIONS, completion({"prompt": [[]] * _MANY}), 400, _V, "prompt")
    yield Case("unknown_fields", COMPLETIONS, completion({f"x{i}": 1 for i in range(_MANY)}), 400, "unknown_parameter")
    yield Case("empty_arrays", COMPLETIONS, completion({"prompt": [[]] * 6 * _MANY}), 400, "invalid_json")
    yield Case("empty_strings", COMPLETIONS, completion({"stop": [""] * 11 * _MANY}), 400, _V, "stop")


MORE_CASES = [*large(), *bad_items(), *grammars(), *urls(), *look_alikes(), *inside_sampling_params()]
KEY_CASES = [*keys()]
