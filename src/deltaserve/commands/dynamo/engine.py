"""Dynamo's contract of an engine, answered by a server. The one module that imports Dynamo.

The contract is version 1.6's, which its own documentation calls one that may change.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from types import FrameType
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.llm.exceptions import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    HttpError,
    InvalidArgument,
    Unknown,
)

from deltaserve.commands.dynamo.asked_server import AskedServer, HttpRefusal, ServerAway
from deltaserve.commands.dynamo.open_answers import OpenAnswers
from deltaserve.commands.dynamo.translation import (
    BrokenStream,
    Chunks,
    Fault,
    Json,
    NotSupported,
    ServerFacts,
    body_of,
    fault_of,
)
from deltaserve.commands.dynamo.worker_options import WorkerEnded, WorkerOptions
from deltaserve.core.errors import one_line

_TOO_MANY = 429


class ServerEngine(LLMEngine):  # type: ignore[misc]
    """A server, seen as an engine: prefill and decode are its own affair."""

    def __init__(self, server: AskedServer, facts: ServerFacts, options: WorkerOptions) -> None:
        self.gone: str | None = None
        """Why the server is taken for lost, once it is."""
        self._server, self._facts, self._options = server, facts, options
        self._watch: asyncio.Task[None] | None = None
        self._answers = OpenAnswers[Json]()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Raises WorkerEnded: options are read by `deltaserve dynamo`, and Dynamo's own launcher has no server."""
        raise WorkerEnded("this engine stands for a running server: start it by `deltaserve dynamo --base-url URL`")

    async def start(self, worker_id: int) -> EngineConfig:
        """What Dynamo registers."""
        self._watch = asyncio.create_task(self._end_without_server())
        return EngineConfig(
            model=str(self._options.model_path),
            served_model_name=self._facts.model,
            llm=LlmRegistration(
                context_length=self._facts.context_len, kv_cache_block_size=self._options.kv_block_size
            ),
        )

    async def generate(self, request: Json, context: Any) -> AsyncIterator[Json]:
        """Dynamo's chunks, up to `abort`."""
        try:
            async for chunk in self._answers.read(context.id(), self._chunks(request)):
                yield chunk
        except NotSupported as error:
            raise InvalidArgument(str(error)) from error
        except HttpRefusal as error:
            raise _told(error) from error
        except ServerAway as error:
            raise CannotConnect(str(error)) from error
        except BrokenStream as error:
            raise Disconnected(str(error)) from error

    async def abort(self, context: Any) -> None:
        """Nobody waits for the answer: the request ends at the server, too. Dynamo may drop the iterator much later."""
        await self._answers.end(context.id())

    async def _chunks(self, request: Json) -> AsyncGenerator[Json, None]:
        body = body_of(request, self._facts)
        chunks = Chunks(tells_alternatives=bool(body.get("logprobs")))
        async with aclosing(self._server.stream(body)) as events:
            async for event in events:
                for chunk in chunks.of(event):
                    yield chunk
        if not chunks.is_over:
            raise BrokenStream("the server's answer ended without its end")

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where the cache says what it holds."""
        return [ZmqSource(endpoint=endpoint) for endpoint in self._options.kv_events]

    async def cleanup(self) -> None:
        """Let what is inside end, then leave the server."""
        if self._watch is not None:
            self._watch.cancel()
        if self.gone is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.grace_s):
                    await self._answers.wait_idle()
        await self._server.close()

    async def _end_without_server(self) -> None:
        """Dynamo must not send requests to nobody: its worker ends as by a signal, which takes it off the list."""
        self.gone = await self._server.until_gone()
        os.kill(os.getpid(), signal.SIGTERM)


def _told(error: HttpRefusal) -> Exception:
    text = str(error)
    fault = fault_of(error.status)
    told: Exception = HttpError(_TOO_MANY, text) if fault is Fault.BUSY else _RAISED[fault](text)
    return told


_RAISED = {
    Fault.INVALID: InvalidArgument,
    Fault.LATE: ConnectionTimeout,
    Fault.AWAY: CannotConnect,
    Fault.FAILED: Unknown,
}


async def serve(server: AskedServer, facts: ServerFacts, options: WorkerOptions) -> str | None:
    """Be Dynamo's worker until a stop signal (None), or until the server is gone: why it is taken for that.

    Raises WorkerEnded.
    """
    engine = ServerEngine(server, facts, options)
    config = WorkerConfig(
        namespace=options.namespace,
        component=options.component,
        model_name=str(options.model_path),
        served_model_name=facts.model,
        discovery_backend=options.discovery_backend,
        request_plane=options.request_plane,
        event_plane=options.event_plane,
        custom_jinja_template=options.chat_template,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        enable_kv_routing=bool(options.kv_events),
    )
    _leave_signals_to_dynamo()
    try:
        await Worker(engine, config).run()
    except Exception as error:  # the runtime, which is Rust's, raises what it likes
        raise WorkerEnded(f"Dynamo's worker ended: {one_line(error)}") from error
    return engine.gone


def _leave_signals_to_dynamo() -> None:
    """Its runtime hears of stop signals beside the handlers that it finds, and drains; a second one ends at once.

    To be called before the runtime is there: a handler that is set later takes its place.
    """
    stops = []

    def count(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        if len(stops) > 1:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, count)
