"""GET /openapi.json: the API described by the very models that read its requests."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from deltaserve import __version__
from deltaserve.server.api_errors import FAIL_STATUS
from deltaserve.server.front import Front

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A method of a path: who serves it, and what is said about it."""

    method: Literal["GET", "POST"]
    path: str
    """Path as starlette writes it."""
    serve: Callable[[Front, Request], Awaitable[Response]]
    summary: str
    body: type[BaseModel] | None = None
    """Model of a POST's body; None: it has none, or none that is described."""


_ERRORS = frozenset({401, 403, 404, 414, 421, 431, 500, 503})
_BODY_ERRORS = frozenset({400, 408, 413, 415, 429})
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_SECONDS: Json = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"}
_DEADLINE: Json = {"name": "x-deadline-seconds", "in": "header", "required": False, "schema": _SECONDS}


@cache
def document(routes: Sequence[HttpRoute]) -> Json:
    """The OpenAPI 3.1 document of these routes."""
    bodies = [route.body for route in routes if route.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "deltaserve", "version": __version__},
        "paths": {e.path.replace(":path", ""): {e.method.lower(): _operation(e)} for e in routes},
        "components": {
            "schemas": {**schemas["$defs"], "Error": _error_schema()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: HttpRoute) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    errors, parameters = _ERRORS, list[Json]()
    operation: Json = {"summary": route.summary, "parameters": parameters}
    if "{name" in route.path:
        parameters.append(_NAME)
    if route.body is not None:
        errors |= _BODY_ERRORS
        given = {"application/json": {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": given}
    if route.body is not None and "stream" in route.body.model_fields:
        errors |= {status for status, _ in FAIL_STATUS.values()}
        content["text/event-stream"] = {"schema": {}}  # `data:` events; their JSON is that of the dialect
        parameters.append(_DEADLINE)
    responses: Json = {"200": {"description": route.summary, "content": content}, **_errors(errors)}
    if route.path in ("/health", "/readyz", "/ping"):
        responses["503"] = {"description": "Not ready, and why", "content": content}
    return {**operation, "responses": responses}


def _errors(statuses: Iterable[int]) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": "An error in OpenAI's shape", "content": content} for status in sorted(statuses)
    }


def _error_schema() -> Json:
    text: Json = {"type": "string"}
    fields: Json = {"message": text, "type": text, "code": text, "param": {"type": ["string", "null"]}}
    error = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"], "additionalProperties": False}
