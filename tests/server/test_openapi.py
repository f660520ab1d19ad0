"""The API's own description is true: requests made from it, right and wrong, get answers that it foretells."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deltaserve.server.app import PUBLIC, create_app
from deltaserve.server.openapi import document
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL
from tests.server.oracle import OracleEngine
from tests.server.test_tools import codec as codec_of_tools

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


LIMITS = settings(max_examples=10, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
MODES = [
    (route.path.replace(":path", ""), route.method, mode)
    for route in PUBLIC
    for mode in (GenerationMode if route.body else [GenerationMode.POSITIVE])  # else there is nothing to do wrong
]


@pytest.mark.parametrize(("path", "method", "mode"), MODES, ids=[f"{path}-{mode.value}" for path, _, mode in MODES])
def test_answers_are_as_described(codec: TextCodec, path: str, method: str, mode: GenerationMode) -> None:
    app = create_app(OracleEngine(), codec, ServerSettings(MODEL, allowed_hosts=("testserver",)))
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]

    @LIMITS
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


_NAME = {"type": "string", "pattern": "^[a-z_]{1,8}$"}
_TYPE = {"enum": ["string", "integer", "boolean", "array"]}
_RULES = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": {
            "type": "object",
            "propertyNames": _NAME,
            "additionalProperties": {"type": "object", "properties": {"type": _TYPE}, "required": ["type"]},
        },
    },
    "required": ["type"],
}
"""Schema of the schemas of objects."""


def _tools(kind: Mapping[str, object], rules: str) -> dict[str, object]:
    """Lists of one tool in some dialect."""
    properties = {**kind, "name": _NAME, "description": {"type": "string"}, rules: _RULES}
    item = {"type": "object", "properties": properties, "required": [*kind, "name", rules]}
    return {"type": "array", "items": item, "minItems": 1, "maxItems": 1}


_FUNCTION = {"type": {"const": "function"}}
_OUTPUT = {"type": {"const": "json_schema"}, "schema": _RULES}
_FORMAT = {"type": "object", "properties": {**_OUTPUT, "name": _NAME}, "required": ["type", "schema", "name"]}
DRAWN: Mapping[tuple[str, str], object] = {
    **{
        (path, field): None
        for path in ("/v1/completions", "/v1/chat/completions")
        for field in (
            *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "grammar", "n"),
        )
    },
    ("/v1/chat/completions", "tools"): None,
    ("/v1/chat/completions", "tool_choice"): None,
    ("/v1/responses", "text"): {"type": "object", "properties": {"format": _FORMAT}, "required": ["format"]},
    ("/v1/responses", "tools"): _tools(_FUNCTION, "parameters"),
    ("/v1/responses", "tool_choice"): None,
    ("/v1/responses", "reasoning"): None,
    **{
        (path, field): schema
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for field, schema in {
            "tools": _tools({}, "input_schema"),
            "tool_choice": None,
            "output_config": {"type": "object", "properties": {"format": _FORMAT}, "required": ["format"]},
            "thinking": None,
            "system": None,
        }.items()
    },
}
"""(route, field of its body) |-> what is drawn for it; None: whatever its description allows."""


@pytest.mark.parametrize(("path", "field"), DRAWN)
def test_answers_to_each_field_of_agents_are_as_described(path: str, field: str) -> None:
    """In a request that is right otherwise: of a whole body that is drawn nearly always something else is wrong."""
    app = create_app(OracleEngine(), codec_of_tools(), ServerSettings(MODEL, allowed_hosts=("testserver",)))
    described: Any = copy.deepcopy(document(PUBLIC))
    name = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = described["components"]["schemas"][name.rpartition("/")[2]]
    (example,) = body["examples"]
    fixed = {key: {"const": value} for key, value in example.items()}
    body["properties"] = fixed | {field: DRAWN[path, field] or body["properties"][field]}
    body["required"], body["additionalProperties"] = [*fixed, field], False
    schema = schemathesis.openapi.from_dict(described)
    schema.app = app
    statuses = set()

    @settings(LIMITS, derandomize=True, max_examples=20)
    @given(case=schema[path]["post"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    assert 200 in statuses, "something that is taken was drawn"


def test_every_public_route_is_described(codec: TextCodec) -> None:
    app = create_app(OracleEngine(), codec, ServerSettings(MODEL))
    others = {"/metrics", "/flush_cache", "/reset_prefix_cache", "/", "/docs", "/view"}
    served = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    described = document(PUBLIC)["paths"]
    assert isinstance(described, dict)
    assert {path for path in served if path not in others and not path.startswith("/admin/")} == described.keys()
