"""The generating endpoints: admit, read, validate, answer."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.server.admission import Admitted
from deltaserve.server.answers import event_answer, whole_answer
from deltaserve.server.caller import Caller, caller_of
from deltaserve.server.chat import ChatBody, chat_job
from deltaserve.server.completions import CompletionBody, completion_job
from deltaserve.server.compose import Asker
from deltaserve.server.fields import parse
from deltaserve.server.formats import ChatChoices, CompletionChoices, Format, OpenAiFormat
from deltaserve.server.front import Front
from deltaserve.server.generate import GenerateBody, GenerateFormat, generate_job
from deltaserve.server.jobs import Job, OutputOptions, Streaming
from deltaserve.server.read import THREAD_BYTES, deadline_s, in_thread_if, read_object
from deltaserve.server.replies import json_reply
from deltaserve.server.sse import EventStream, StreamEnds, StreamLimits, unless_gone
from deltaserve.server.text import TextCodec

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Body]):
    """What sets one endpoint apart: its fields, its job, its answer's form."""

    body: type[Body]
    job: Callable[[Body, Asker], Job]
    format: Callable[[TextCodec, OutputOptions], Format]


COMPLETIONS = Dialect(CompletionBody, completion_job, lambda *how: OpenAiFormat(CompletionChoices(*how)))
CHAT = Dialect(ChatBody, chat_job, lambda *how: OpenAiFormat(ChatChoices(*how)))
GENERATE = Dialect(GenerateBody, generate_job, GenerateFormat)


async def serve_dialect(front: Front, request: Request, dialect: Dialect[Body]) -> Response:
    """One generating request. Everything that can be refused is refused before the engine hears of it."""
    caller = caller_of(request)
    front.health.check()
    place = front.admission.enter(caller.namespace)
    answer: Response | None = None
    try:
        job = await _read_job(front, request, dialect, caller)
        front.admission.book(place, len(job.samples), job.prompt_len)
        answer = await _answer(front, request, job, dialect.format(front.text, job.options), caller, place)
        return answer
    finally:
        # A stream still has to be sent: its place is given back when its events are closed.
        if not isinstance(answer, EventStream):
            front.admission.leave(place)


async def _read_job(front: Front, request: Request, dialect: Dialect[Body], caller: Caller) -> Job:
    settings = front.settings
    deadline = deadline_s(request, settings)
    raw = await read_object(request, front.bodies)
    body = parse(dialect.body, raw, front.ignore_field)
    asker = Asker(caller.namespace, deadline, front.limits(), front.text, settings, front.ignore_field)
    is_large = int(request.headers.get("content-length", THREAD_BYTES)) >= THREAD_BYTES
    return await in_thread_if(is_large, lambda: dialect.job(body, asker))


async def _answer(front: Front, request: Request, job: Job, form: Format, caller: Caller, place: Admitted) -> Response:
    record = front.recorder.start(job, caller, lambda: front.admission.start(place))
    if job.options.streaming is Streaming.WHOLE:
        return json_reply(await unless_gone(whole_answer(front, job, record, form), request.receive))
    return await start_stream(front, request, event_answer(front, job, record, form), place)


async def start_stream(front: Front, request: Request, events: AsyncGenerator[bytes], place: Admitted) -> EventStream:
    """Wait for the first event, so that a failure before it still has a status of its own."""

    async def first_event() -> bytes:
        return await anext(events)

    try:
        first = await unless_gone(first_event(), request.receive)
    except BaseException:
        await events.aclose()
        raise
    settings = front.settings
    limits = StreamLimits(settings.stream_buffer_bytes, settings.stream_stall_s)
    return EventStream(
        first, events, limits, StreamEnds(front.metrics.streams_cut.inc, lambda: front.admission.leave(place))
    )
