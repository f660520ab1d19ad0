"""Answers on their way out: one JSON body, or server-sent events.

A stream has back-pressure from the socket to the engine, signs of life, and prompt notice of a lost client.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import NoReturn, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deltaserve.server.api_errors import OPENAI_ERRORS, ApiError, ClientGone, ErrorShape
from deltaserve.server.settings import StreamTimes

DONE = b"data: [DONE]\n\n"
ABORT_EXTENSION = "deltaserve.abort"
"""ASGI extension of our HTTP protocol: drops the connection without flushing what the reader did not take."""
SIGN_OF_LIFE = b"\n\n"
"""Two empty lines end no event and begin none. A comment (`: ping`) would say the same, but load generators (SGLang's
among them) take every line that is not empty for JSON."""

_SHORTEST_WAIT_S = 0.01
_LOOKS_LIKE_AN_END = {text.encode(): b"\\u%04x" % ord(text) for text in "\x85\u2028\u2029"}
"""Characters that end no line of a stream and may stand in JSON as they are, |-> their escapes."""

Result = TypeVar("Result")


def json_reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with `body` as application/json."""
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def error_reply(error: ApiError, shape: ErrorShape = OPENAI_ERRORS) -> Response:
    """An error, with its headers."""
    return json_reply(shape.body(error), error.status, error.headers)


def event(body: Mapping[str, object], name: str | None = None) -> bytes:
    """One server-sent event: a `data:` line, after an `event:` line if it has a name."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(body) + b"\n\n"


def on_one_line(data: bytes) -> bytes:
    """An event in which no client finds more lines than there are: many (httpx's `iter_lines`, whatever uses it) split
    text as Python's `splitlines`, and would cut the JSON in two at such a character."""
    for character, escape in _LOOKS_LIKE_AN_END.items():
        data = data.replace(character, escape)
    return data


class SlowReader(Exception):
    """The client took nothing for too long."""


async def until_gone(receive: Receive) -> NoReturn:
    """Raises ClientGone when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


async def race(work: Coroutine[object, object, Result], watch: Coroutine[object, object, NoReturn]) -> Result:
    """The result of `work`, or what `watch` raises: then `work` was cancelled and has ended."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(watch)
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else watcher.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventWriter:
    """The way out of one stream."""

    def __init__(self, start: Message, send: Send, times: StreamTimes) -> None:
        self.has_started = False
        self._is_over = False
        self._start = start
        self._send = send
        self._times = times
        self._turn = asyncio.Lock()
        self._last = _now()
        """When the connection last took something, or last had nothing to take."""

    async def write(self, data: bytes) -> None:
        """Returns when the connection has room again: whoever makes the next event waits for a slow reader."""
        data = on_one_line(data)
        async with self._turn:
            self._last = _now()
            if not self.has_started:
                self.has_started = True
                await self._send(self._start)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last = _now()

    async def end(self) -> None:
        """End the stream: nothing follows."""
        async with self._turn:
            self._last = _now()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """No sign of life is sent any more: it would begin an answer after which nothing comes."""
        self._is_over = True

    async def watch(self, receive: Receive) -> NoReturn:
        """Raises ClientGone when the client has left, SlowReader when it takes nothing; gives signs of life."""
        while True:
            try:
                async with asyncio.timeout(self._until_look()):
                    await until_gone(receive)
            except TimeoutError:
                await self._look()

    def _until_look(self) -> float:
        due_s = self._times.stall_s if self._turn.locked() else self._silence_s()
        return max(_SHORTEST_WAIT_S, min(self._last + due_s - _now(), self._times.stall_s / 4))

    def _silence_s(self) -> float:
        return self._times.silence_s if self.has_started else self._times.head_s

    async def _look(self) -> None:
        passed_s = _now() - self._last
        if self._turn.locked():
            if passed_s >= self._times.stall_s:
                raise SlowReader
        elif passed_s >= self._silence_s() and not self._is_over:
            try:
                async with asyncio.timeout(self._times.stall_s):
                    await self.write(SIGN_OF_LIFE)
            except TimeoutError:
                raise SlowReader from None


def _now() -> float:
    return asyncio.get_running_loop().time()


class EventStream(Response):
    """An answer that is made while it is sent: `make` writes all events. Raises what `make` raises, or ClientGone.

    A reader that takes nothing is cut. `on_end` is called exactly once, when all is over, well or not.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        make: Callable[[EventWriter], Awaitable[None]],
        times: StreamTimes,
        on_cut: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._make = make
        self._times = times
        self._on_cut = on_cut
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as an ASGI application."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        writer = EventWriter(start, send, self._times)
        try:
            await race(self._all(writer), writer.watch(receive))
        except SlowReader:
            self._on_cut()
            await _abort(scope)
        finally:
            self._on_end()

    async def _all(self, writer: EventWriter) -> None:
        try:
            await self._make(writer)
            await writer.end()
        finally:
            writer.close()


async def _abort(scope: Scope) -> None:
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
        await asyncio.sleep(0)
