"""Server-sent events: framing, a bounded buffer before a slow reader, prompt notice of a lost client."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deltaserve.server.errors import ClientGone

DONE = b"data: [DONE]\n\n"
ABORT_EXTENSION = "deltaserve.abort"
"""ASGI extension of our HTTP protocol: drops the connection without flushing what the reader did not take."""

Result = TypeVar("Result")


def event(body: Mapping[str, object]) -> bytes:
    """One `data:` event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class SlowReader(Exception):
    """The client took too little for too long."""


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_gone(work: Coroutine[object, object, Result], receive: Receive) -> Result:
    """The result of `work`, or ClientGone: then `work` was cancelled and has ended."""
    task, watch = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, watch)


async def _end(*tasks: asyncio.Task[Result]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How far a reader may fall behind."""

    buffer_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Told about the end of a stream."""

    on_cut: Callable[[], None]
    """The reader was too slow."""
    on_end: Callable[[], None]
    """It is over, well or not; called exactly once."""


class EventStream(Response):
    """Sends `first` and then every event of `rest`. Always closes `rest`, whatever happens.

    Raises ClientGone when the client leaves, SlowReader when it reads too slowly (the connection is cut).
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], limits: StreamLimits, ends: StreamEnds) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._limits = limits
        self._ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as an ASGI application."""
        try:
            await self._serve(scope, receive, send)
        finally:
            self._ends.on_end()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        buffer = _Buffer(self._limits)
        async with aclosing(self._rest):
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            buffer.put(self._first)
            tasks = {
                "fill": asyncio.create_task(_fill(self._rest, buffer)),
                "drain": asyncio.create_task(_drain(start, buffer, send)),
                "watch": asyncio.create_task(gone(receive)),
            }
            try:
                await self._wait(buffer, tasks)
            except SlowReader:
                self._ends.on_cut()
                await _abort(scope)
            finally:
                await _end(*tasks.values())

    async def _wait(self, buffer: "_Buffer", tasks: Mapping[str, asyncio.Task[None]]) -> None:
        """Until all is sent. A failed `fill` or `drain` raises at once."""
        drain, fill, watch = tasks["drain"], tasks["fill"], tasks["watch"]
        pending = {drain, fill, watch}
        while not drain.done():
            _, pending = await asyncio.wait(
                pending, timeout=self._limits.stall_s / 4, return_when=asyncio.FIRST_COMPLETED
            )
            if fill.done():
                fill.result()
            if watch.done() and not drain.done():
                raise ClientGone
            buffer.check_stall()
        drain.result()


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Buffer:
    """Bytes produced and not yet sent."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self.closed = False
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._taken_at: float | None = _now()
        """When what is on its way out began to be; at first that is the head of the answer."""

    def put(self, part: bytes) -> None:
        """Raises SlowReader when the reader is too far behind."""
        if self._parts and self._num_bytes + len(part) > self.limits.buffer_bytes:
            raise SlowReader
        self._parts.append(part)
        self._num_bytes += len(part)
        self._changed.set()

    def close(self) -> None:
        """Nothing follows."""
        self.closed = True
        self._changed.set()

    def check_stall(self) -> None:
        """Raises SlowReader when what was taken has not gone out for too long."""
        if self._taken_at is not None and _now() - self._taken_at > self.limits.stall_s:
            raise SlowReader

    async def take(self) -> bytes:
        """All that is waiting; b"" when nothing is and nothing follows. What was taken before has gone out."""
        self._taken_at = None
        while not self._parts and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        self._taken_at = _now()
        taken, self._parts, self._num_bytes = b"".join(self._parts), [], 0
        return taken


async def _fill(source: AsyncGenerator[bytes], buffer: _Buffer) -> None:
    async for part in source:
        buffer.put(part)
    buffer.close()


async def _drain(start: Message, buffer: _Buffer, send: Callable[[Message], Awaitable[None]]) -> None:
    await send(start)
    while data := await buffer.take():
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _abort(scope: Scope) -> None:
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
        await asyncio.sleep(0)
