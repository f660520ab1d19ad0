"""The generating endpoints: admit, read, validate, answer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.server.answers import stream_answer, whole_answer
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
from deltaserve.server.sse import EventStream, race, until_gone
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
    streams = False
    try:
        job = await _read_job(front, request, dialect, caller)
        front.admission.book(place, len(job.samples), job.prompt_len)
        record = front.recorder.start(job, caller, lambda: front.admission.start(place))
        form = dialect.format(front.text, job.options)
        streams = job.options.streaming is not Streaming.WHOLE
        if not streams:
            body = await race(whole_answer(front.runner, job, record, form), until_gone(request.receive))
            return json_reply(body)
        return EventStream(
            partial(stream_answer, front.runner, job, record, form),
            front.settings.stream_times,
            on_cut=front.metrics.streams_cut.inc,
            on_end=lambda: front.admission.leave(place),
        )
    finally:
        # A stream still has to be made: it gives its place back at its end.
        if not streams:
            front.admission.leave(place)


async def _read_job(front: Front, request: Request, dialect: Dialect[Body], caller: Caller) -> Job:
    settings = front.settings
    deadline = deadline_s(request, settings)
    raw = await read_object(request, front.bodies)
    body = parse(dialect.body, raw, front.ignore_field)
    asker = Asker(caller.namespace, deadline, front.limits(), front.text, settings, front.ignore_field)
    is_large = int(request.headers.get("content-length", THREAD_BYTES)) >= THREAD_BYTES
    return await in_thread_if(is_large, lambda: dialect.job(body, asker))
