"""What a client is told when a request is not served: one error type, one table from engine reasons to statuses."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deltaserve.core.errors import ENDS_THE_CALLER, DeadlineTooShort, FailReason, RequestFailed

MAX_MESSAGE_CHARS = 400
CONTEXT_EXCEEDED = "context_length_exceeded"
"""Code of an error of a prompt that does not fit, alone or with its answer."""
Json = dict[str, object]
"""A JSON object of an answer."""
CLIENT_CLOSED = 499
"""Status in logs and counters of a request whose client went away; nobody receives it."""


@dataclass(eq=False)
class ApiError(Exception):
    """Why a request is not served. `message` must not echo more than 80 characters of the request."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def rename(self, param: str) -> None:
        """Name the field as the client did, in the message as well where it begins with the field."""
        former, self.param = self.param, param
        rest = self.message.removeprefix(former or "")
        if former and rest != self.message and rest[:1] in (" ", ":"):
            self.message = param + rest

    def body(self) -> Json:
        """The error in OpenAI's shape: `{"error": {...}}`, JSON-ready."""
        return {
            "error": {
                "message": self.message[:MAX_MESSAGE_CHARS],
                "type": error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(eq=False, kw_only=True)
class AnswerTooLong(ApiError):
    """A prompt fits, but not with the answer that is asked for. Counts are of tokens."""

    prompt_len: int
    asked_len: int
    context_len: int


@dataclass(frozen=True, eq=False, slots=True)
class ErrorShape:
    """How a dialect writes an error, and how the API's description says so."""

    name: str
    """Name of its schema; no two shapes share one."""
    description: str
    schema: Json
    body: Callable[[ApiError], Json]


_TEXT: Json = {"type": "string"}
_FIELDS: Json = {"message": _TEXT, "type": _TEXT, "code": _TEXT, "param": {"type": ["string", "null"]}}


def closed_object(**fields: object) -> Json:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


OPENAI_ERRORS = ErrorShape(
    "Error", "An error in OpenAI's shape", closed_object(error=closed_object(**_FIELDS)), ApiError.body
)

NOT_OURS = (asyncio.CancelledError, *ENDS_THE_CALLER)
"""What ends a handler from outside. Any other BaseException is a failure of the handler: a panic of a library in Rust
is no Exception, and says no more about the next request than one."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    421: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """The `type` of an error with this status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


FAIL_STATUS: Mapping[FailReason, tuple[int, str]] = {
    FailReason.CANCELLED: (503, "cancelled"),
    FailReason.DEADLINE: (504, "deadline_exceeded"),
    FailReason.TRANSFER_FAILED: (502, "transfer_failed"),
    FailReason.PEER_LOST: (502, "transfer_failed"),
    FailReason.PEER_FENCED: (502, "transfer_failed"),
    FailReason.INCOMPATIBLE: (503, "not_ready"),
    FailReason.ROOM_IN_USE: (409, "room_in_use"),
    FailReason.BAD_EXTENT: (502, "transfer_failed"),
    FailReason.TOO_LONG: (400, CONTEXT_EXCEEDED),
    FailReason.OVERLOADED: (429, "overloaded"),
    FailReason.DRAINING: (503, "not_ready"),
    FailReason.NO_PEER: (503, "not_ready"),
    FailReason.NUMERICAL: (500, "numerical_error"),
    FailReason.COMPUTE_FAILED: (500, "compute_failed"),
    FailReason.GRAMMAR_FAILED: (400, "grammar_failed"),
    FailReason.INTERNAL: (500, "internal_error"),
}


_FUTILE = {"x-should-retry": "false"}
_FUTILE_CODES = frozenset({"deadline_exceeded", "numerical_error"})
"""Codes of 5xx answers that a repeated request would get again after the same time; OpenAI's libraries do repeat."""


def retry_after() -> dict[str, str]:
    """1 to 5 seconds, drawn anew each time so that refused clients do not come back together."""
    return {"Retry-After": str(1 + secrets.randbelow(5))}


def from_failure(failure: RequestFailed) -> ApiError:
    """The engine's reason as an HTTP answer. The engine's own words stay in the log: they may name workers."""
    status, code = FAIL_STATUS[failure.reason]
    headers = retry_after() if status in (429, 503) else _FUTILE if code in _FUTILE_CODES else {}
    message = failure.message if isinstance(failure, DeadlineTooShort) else _public(failure.reason, code)
    return ApiError(status, code, message, headers=headers)


def _public(reason: FailReason, code: str) -> str:
    return _STOPPING if reason is FailReason.DRAINING else _PUBLIC[code]


_STOPPING = "the server is stopping, or the worker that had this request is: send it again"


_PUBLIC = {
    "cancelled": "the request was cancelled by the server",
    "deadline_exceeded": "the request's deadline passed before its answer was complete",
    "transfer_failed": "a worker or the transfer between workers failed, and so did the retry",
    "not_ready": "no worker can take this request now",
    "room_in_use": "the request's internal id is in use; send it again",
    CONTEXT_EXCEEDED: "prompt and max_tokens do not fit the memory of a worker",
    "overloaded": "the server is at its limit; try again later",
    "numerical_error": "the model produced a value that is not a number",
    "compute_failed": "a step of the model could not be computed; see the server's log",
    "grammar_failed": "the request's grammar needs more time or memory than one may take, or allows nothing further",
    "internal_error": "the server failed; see its log for this request id",
}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one field."""
    return ApiError(400, code, message, param)


def missing(param: str) -> ApiError:
    """A 400 about a field that must be there."""
    return invalid(param, f"{param} is required", "missing_required_parameter")


def unsupported(param: str, message: str | None = None) -> ApiError:
    """400 for something known that this server does not do."""
    return ApiError(400, "unsupported", message or f"{param} is not supported by this server", param)


def body_too_large(most: int) -> ApiError:
    """413 for a body that has, or announces, more than `most` bytes."""
    return ApiError(413, "body_too_large", f"the body is larger than {most} bytes")


def chunks_too_small(num_bytes: int) -> ApiError:
    """400 for a body of which only so many bytes came among many more that frame them."""
    message = f"the body's chunks are too small: {num_bytes} bytes so far, and many times as many around them"
    return ApiError(400, "invalid_request", f"{message}; send it with Content-Length, or in chunks of a kilobyte")


def not_ready(reason: str) -> ApiError:
    """503: nothing admitted now would be served."""
    return ApiError(503, "not_ready", f"not ready: {reason}", headers=retry_after())


def excerpt(value: object) -> str:
    """A client's value, quoted, for an error message: 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
