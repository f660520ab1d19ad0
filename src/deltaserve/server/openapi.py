"""GET /openapi.json: the API described by the very models that read its requests."""

from collections.abc import Iterable, Sequence
from functools import cache

from pydantic.json_schema import models_json_schema

from deltaserve import __version__
from deltaserve.server.api_errors import FAIL_STATUS, ErrorShape, Json
from deltaserve.server.read import DEADLINE_HEADER, SECONDS
from deltaserve.server.routes import Access, HttpRoute

_ERRORS = frozenset({401, 403, 404, 414, 421, 431, 500, 503})
_BODY_ERRORS = frozenset({400, 408, 413, 415, 429})
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_SECONDS: Json = {"type": "string", "pattern": f"^{SECONDS.pattern}$"}
_DEADLINE: Json = {"name": DEADLINE_HEADER, "in": "header", "required": False, "schema": _SECONDS}


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
            "schemas": {**schemas["$defs"], **{route.errors.name: route.errors.schema for route in routes}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: HttpRoute) -> Json:
    content: Json = {"application/json": {"schema": {"type": route.answer}}}
    errors, parameters = _ERRORS, list[Json]()
    operation: Json = {"summary": route.summary, "parameters": parameters}
    if "{name" in route.path:
        parameters.append(_NAME)
    if route.body is not None:
        errors |= _BODY_ERRORS
        given = {"application/json": {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": given}
    if route.generates:
        errors |= {status for status, _ in FAIL_STATUS.values()}
        content["text/event-stream"] = {"schema": {}}  # its events are those of the dialect
        parameters.append(_DEADLINE)
    responses: Json = {"200": {"description": route.summary, "content": content}, **_errors(errors, route.errors)}
    if route.access is Access.PROBE:
        responses["503"] = {"description": "Not so, and why", "content": content}
    return {**operation, "responses": responses}


def _errors(statuses: Iterable[int], shape: ErrorShape) -> Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.name}"}}}
    return {str(status): {"description": shape.description, "content": content} for status in sorted(statuses)}
