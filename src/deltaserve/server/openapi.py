"""GET /openapi.json: the API described by the very models that read its requests."""

from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deltaserve import __version__
from deltaserve.server.api_errors import FAIL_STATUS
from deltaserve.server.chat import ChatBody
from deltaserve.server.completions import CompletionBody
from deltaserve.server.generate import GenerateBody
from deltaserve.server.info_routes import DetokenizeBody, TokenizeBody

Json = dict[str, object]

BODIES: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue a prompt"),
    "/v1/chat/completions": (ChatBody, "Continue a conversation"),
    "/generate": (GenerateBody, "Continue a prompt, in SGLang's dialect"),
    "/tokenize": (TokenizeBody, "Ids of a prompt or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
}
READS: Mapping[str, str] = {
    "/v1/models": "The model served",
    "/v1/models/": "The model served",
    "/v1/models/{name}": "The model, by its name",
    "/v1/loads": "Requests that run and that wait",
    "/model_info": "Vocabulary, context length, version",
    "/get_model_info": "Vocabulary, context length, version",
    "/version": "Version of this server",
    "/health": "Ready for requests, or why not",
    "/readyz": "Ready for requests, or why not",
    "/ping": "Ready for requests, or why not",
    "/health_generate": "One token is generated",
    "/livez": "Alive",
    "/openapi.json": "This document",
}
STREAMING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
_READ_ERRORS = {401, 403, 404, 414, 431, 500, 503}
_BODY_ERRORS = _READ_ERRORS | {400, 408, 413, 415, 429}
_REASON = "An error in OpenAI's shape"


@cache
def document() -> Json:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(model, "validation") for model, _ in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Json] = {path: {"post": _post(path, *row)} for path, row in BODIES.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in READS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "deltaserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _error_schema()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, model: type[BaseModel], summary: str) -> Json:
    good: Json = {"application/json": {"schema": {"type": "object"}}}
    errors = _BODY_ERRORS
    deadline: list[Json] = []
    if path in STREAMING:
        good["text/event-stream"] = {"schema": {}}  # `data:` events; their JSON is that of the dialect
        errors = errors | {status for status, _ in FAIL_STATUS.values()}
        schema: Json = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"}
        deadline = [{"name": "x-deadline-seconds", "in": "header", "required": False, "schema": schema}]
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {
        "summary": summary,
        "parameters": deadline,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "Done", "content": good}, **_errors(errors)},
    }


def _get(path: str, summary: str) -> Json:
    named: list[Json] = []
    if "{name}" in path:
        named = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    content = {"application/json": {"schema": {"type": "object"}}}
    responses: Json = {"200": {"description": summary, "content": content}, **_errors(_READ_ERRORS)}
    if path in ("/health", "/readyz", "/ping"):
        responses["503"] = {"description": "Not ready, and why", "content": content}
    return {"summary": summary, "parameters": named, "responses": responses}


def _errors(statuses: set[int]) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _REASON, "content": content} for status in sorted(statuses)}


def _error_schema() -> Json:
    text: Json = {"type": "string"}
    fields: Json = {"message": text, "type": text, "code": text, "param": {"type": ["string", "null"]}}
    error = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"], "additionalProperties": False}
