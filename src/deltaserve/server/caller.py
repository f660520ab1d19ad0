"""Who sent a request: known to the edge, read by everything behind it."""

from dataclasses import dataclass

from starlette.requests import Request

from deltaserve.base.ids import Namespace

SCOPE_KEY = "deltaserve.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """One request's sender, and when it was read."""

    request_id: str
    """In the X-Request-Id of the answer: the client's own, or one made here."""
    namespace: Namespace
    received: float
    """`time.monotonic()` seconds."""


def caller_of(request: Request) -> Caller:
    """The caller the edge found. Only valid inside an app that it wraps."""
    caller = request.scope[SCOPE_KEY]
    assert isinstance(caller, Caller)
    return caller
