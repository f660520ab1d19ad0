"""Reading a request: who sent it, headers that matter, a body bounded alone and together with all others, JSON."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from deltaserve.core.ids import Namespace
from deltaserve.server.admission import Bodies, Held, ValueRoom
from deltaserve.server.api_errors import ApiError, ClientGone, body_too_large, excerpt, invalid
from deltaserve.server.heap import LARGE_BYTES, HeapTrim
from deltaserve.server.settings import ServerSettings

DEADLINE_HEADER = "x-deadline-seconds"
THREAD_BYTES = 16 * 1024
"""Bodies above this are handled in a thread, so that the event loop goes on serving."""

MAX_CONTAINERS = 200_000
"""Arrays and objects of one body; brackets inside its texts count as well. Eight megabytes of empty arrays keep the
interpreter busy for seconds: the garbage collector walks through them again and again."""

ID_CHARACTERS = "A-Za-z0-9_.:-"
"""Characters of a request's id that its client chose, in brackets of a pattern: it is written to logs and into
paths."""

_VALUE_BYTES, _OBJECT_BYTES = 100, 1000
"""What a value takes in memory, roughly: a short text 64 bytes and 8 in its array; a message as it is read and checked
a kilobyte and more."""

MAX_DEPTH = 100
"""Arrays and objects of one body that stand in each other: what reads them by recursion does not fail with these."""

SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""Narrower than float(): no signs, no underscores, no words."""

_HEX = "[0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rf"\\u[dD][89abAB]{_HEX}\\u[dD][c-fC-F]{_HEX}|(?P<half>\\u[dD][89a-fA-F]{_HEX})|\\.".encode(), re.DOTALL
)
"""Pairs go first, so that what is found of one by itself is a half."""

Result = TypeVar("Result")

CALLER = "deltaserve.caller"
"""Where the edge puts it in a request's scope."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One request's sender, and when it was read."""

    request_id: str
    """Id in the X-Request-Id of the answer: the client's own, or one made here."""
    namespace: Namespace
    received: float
    """When the request was read, in `time.monotonic()` seconds."""
    trace: str | None = None
    """The client's `traceparent`; None: it sent none, or not one."""


def new_request_id() -> str:
    """Id of a request whose client gave none."""
    return "req-" + secrets.token_hex(12)


def caller_of(request: Request) -> Caller:
    """The caller the edge found. Only valid inside an app that it wraps."""
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


class TextThreads:
    """Threads for what would stall the event loop: reading JSON, rendering templates, tokenizing.

    Their own and few: the loop's default threads, which look up names, do not wait behind long prompts.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "text")

    def run(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run_if(self, is_large: bool, work: Callable[[], Result]) -> Result:
        """Run `work` here, or in a thread when it is large enough to stall the event loop."""
        return await self.run(work) if is_large else work()


@dataclass(frozen=True, slots=True)
class Reading:
    """What bodies are read with, and what bounds them."""

    bodies: Bodies
    values: ValueRoom
    threads: TextThreads
    trim: HeapTrim

    @asynccontextmanager
    async def object_of(self, request: Request) -> AsyncIterator[dict[str, object]]:
        """The JSON object a request carries; its memory counts until this is left. Raises ApiError 400, 408, 413, 415,
        429, or ClientGone."""
        _check_content(request)
        with self.bodies.one(caller_of(request).namespace) as held:
            body = await _read_body(request, self.bodies, held)
            if len(body) <= THREAD_BYTES:
                yield parse_object(body)
                return
            num_bytes = values_bytes(body)
            try:
                async with self.values.taken(num_bytes):
                    yield await self.threads.run(partial(parse_object, body))
            finally:
                if num_bytes > LARGE_BYTES:
                    self.trim.soon()


def values_bytes(body: bytes) -> int:
    """What the values of a JSON text take in memory, roughly; commas inside of its texts count as well."""
    num_values, num_objects = body.count(b",") + body.count(b"["), body.count(b"{")
    return len(body) + _VALUE_BYTES * num_values + _OBJECT_BYTES * num_objects


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object that a body is. Raises ApiError 400 `invalid_json`: also for NaN, for
    numbers no float holds, and for half a surrogate pair, which the parser calls truncated."""
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers > MAX_CONTAINERS:
        raise ApiError(400, "invalid_json", f"the body has more than {MAX_CONTAINERS} arrays and objects")
    if not body.strip():
        raise ApiError(400, "invalid_json", "the body is empty: a JSON object is expected")
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", _half_pair(body) or f"the body is not JSON ({_reason(error)})") from error
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    if num_containers > MAX_DEPTH and _is_too_deep(value):
        raise ApiError(400, "invalid_json", f"arrays and objects stand in each other more than {MAX_DEPTH} deep")
    return value


def _reason(error: Exception) -> str:
    return str(error).removeprefix("JSON is malformed: ")[:100]


def _is_too_deep(value: object) -> bool:
    """Whether more than `MAX_DEPTH` arrays and objects stand in each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _half_pair(body: bytes) -> str | None:
    """What to say of the first escape that is half a surrogate pair; None: there is none."""
    half = next((found for found in _ESCAPE.finditer(body) if found["half"]), None)
    if half is None:
        return None
    escape = half[0].decode("ascii")
    return f"the body holds {escape} at byte {half.start()}, half a surrogate pair: that is no character"


def deadline_s(request: Request, settings: ServerSettings) -> float:
    """Seconds this request may take: the client's header, clamped, or the default."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return settings.default_deadline_s
    value = float(text) if SECONDS.fullmatch(text) else 0.0
    if not value > 0:
        raise invalid(DEADLINE_HEADER, "the deadline header must be a number of seconds above 0")
    return min(value, settings.max_deadline_s)


def _check_content(request: Request) -> None:
    given = request.headers.get("content-type")
    kind, *params = (given or "").lower().split(";")
    charsets = [
        value.strip().strip('"') for name, _, value in (p.partition("=") for p in params) if name.strip() == "charset"
    ]
    if kind.strip() != "application/json" or not {"utf-8", "utf8"}.issuperset(charsets):
        found = "there is no Content-Type header" if given is None else f"the Content-Type header is {excerpt(given)}"
        raise ApiError(415, "unsupported_media_type", f"{found}: send `Content-Type: application/json`, in UTF-8")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        found = f"the Content-Encoding header is {excerpt(encoding)}"
        raise ApiError(415, "unsupported_media_type", f"{found}: send the body as it is, and no such header")


async def _read_body(request: Request, bodies: Bodies, held: Held) -> bytes:
    limits = bodies.settings.http
    most = limits.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise body_too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                if held.num_bytes + len(part) > most:
                    raise body_too_large(most)
                bodies.grow(held, len(part))
                body += part
    except TimeoutError as error:
        headers = {"Connection": "close"}
        raise ApiError(408, "request_timeout", "the body did not arrive in time", headers=headers) from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)
