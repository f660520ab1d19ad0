"""What is known of a route beside its code: who may call it, what is said about it, how its errors are written."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.server.api_errors import OPENAI_ERRORS, ErrorShape
from deltaserve.server.front import Front

ID_HEADERS = (b"x-request-id",)


class Access(Enum):
    """What a caller needs where keys are in use."""

    KEY = "key"
    PAGE = "page"
    """No key: the same on every server. A browser cannot send a key with the address it opens."""
    PROBE = "probe"
    """No key, any name of the host, a connection beyond the limit: it tells its state only, and starts no work."""


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
    access: Access = Access.KEY
    answer: Literal["object", "array"] = "object"
    """What its JSON is."""
    errors: ErrorShape = OPENAI_ERRORS
    id_headers: tuple[bytes, ...] = ID_HEADERS
    """Headers by which its answers name the request."""
    generates: bool = False
    """Whether it is a dialect's: it may answer with events, fail as the engine does, and takes a deadline."""
