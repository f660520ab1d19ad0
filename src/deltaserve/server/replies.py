"""JSON responses."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from deltaserve.server.api_errors import ApiError


def json_reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as application/json."""
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def error_reply(error: ApiError) -> Response:
    """An error in OpenAI's shape, with its headers."""
    return json_reply(error.body(), error.status, error.headers)
