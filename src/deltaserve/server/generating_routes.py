"""The generating endpoints: admit, read, validate, answer with one JSON body or a stream of events."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.server.api_errors import NOT_OURS, ApiError, from_failure
from deltaserve.server.body_fields import Model
from deltaserve.server.chat import ChatBody, chat_job
from deltaserve.server.completions import CompletionBody, completion_job
from deltaserve.server.formats import Body, ChatFormat, CompletionFormat, OpenAiFormat
from deltaserve.server.front import Front
from deltaserve.server.generate import GenerateBody, GenerateFormat, generate_job
from deltaserve.server.jobs import Asker, Job, Streaming
from deltaserve.server.observe import JobRecord
from deltaserve.server.read import THREAD_BYTES, Caller, caller_of, deadline_s
from deltaserve.server.replies import DONE, EventStream, EventWriter, event, json_reply, race, until_gone
from deltaserve.server.stream import Runner
from deltaserve.server.text.sample_text import TextPiece, join
from deltaserve.server.text.text_codec import TextCodec

_log = logging.getLogger("deltaserve.server")
Format = OpenAiFormat | GenerateFormat


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Model]):
    """What sets one endpoint apart: its fields, its job, its answer's form."""

    body: type[Model]
    job: Callable[[Model, Asker], Job]
    format: Callable[[TextCodec, Job, Model], Format]
    prompt_fields: tuple[str, ...]
    """Fields that are not needed any more when the job is made."""

    async def serve(self, front: Front, request: Request) -> Response:
        """One generating request. Everything that can be refused is refused before the engine hears of it."""
        caller = caller_of(request)
        front.health.admit()
        with ExitStack() as held:
            place = held.enter_context(front.admission.place(caller.namespace))
            job, form = await self._read(front, request, caller)
            front.admission.book(place, len(job.samples), job.prompt_len)
            record = JobRecord(front.recorder, job, caller, lambda: front.admission.start(place))
            if job.streaming is Streaming.WHOLE:
                return json_reply(await race(whole_answer(front.runner, record, form), until_gone(request.receive)))
            return EventStream(
                partial(stream_answer, front.runner, record, form),
                front.settings.stream_times,
                on_cut=front.metrics.streams_cut.inc,
                on_end=held.pop_all().close,  # the stream still has to be made
            )

    async def _read(self, front: Front, request: Request, caller: Caller) -> tuple[Job, Format]:
        deadline = deadline_s(request, front.settings)
        async with front.read(request, self.body) as fields:
            asker = Asker(caller.namespace, deadline, front.limits(), front.text, front.settings, front.unknown_fields)
            is_large = int(request.headers.get("content-length", THREAD_BYTES)) >= THREAD_BYTES
            job = await front.threads.run_if(is_large, partial(self.job, fields, asker))
            kept = fields.model_copy(update=dict.fromkeys(self.prompt_fields))
            return job, self.format(front.text, job, kept)


COMPLETIONS = Dialect(CompletionBody, completion_job, CompletionFormat, ("prompt",))
CHAT = Dialect(ChatBody, chat_job, ChatFormat, ("messages", "chat_template_kwargs"))
GENERATE = Dialect(GenerateBody, generate_job, GenerateFormat, ("text", "input_ids", "sampling_params"))


@contextmanager
def recorded(record: JobRecord) -> Iterator[None]:
    """Writes down how a job ended. Failures leave it as ApiError; their details are in the log."""
    outcome = "client_gone"
    try:
        yield
        outcome = "ok"
    except NOT_OURS:
        raise
    except BaseException as error:
        answer = as_api_error(record.job, error)
        outcome = answer.code
        raise answer from error
    finally:
        record.end(outcome)


async def whole_answer(runner: Runner, record: JobRecord, form: Format) -> Body:
    """The JSON body of a job that is not streamed. Raises ApiError."""
    parts: dict[int, list[TextPiece]] = {sample.index: [] for sample in record.job.samples}

    async def keep(piece: TextPiece) -> None:
        parts[piece.index].append(piece)

    with recorded(record):
        await runner.run(record.job, record.piece, keep)
    return form.whole({index: join(pieces) for index, pieces in parts.items()}, record.counts)


async def stream_answer(runner: Runner, record: JobRecord, form: Format, writer: EventWriter) -> None:
    """Writes all events of a job. A failure before the head is out raises ApiError; later it is the last event."""
    started: set[int] = set()

    async def emit(piece: TextPiece) -> None:
        chunk = form.chunk(piece, record.counts, is_first=piece.index not in started)
        started.add(piece.index)
        if chunk is not None:
            await writer.write(event(chunk))

    try:
        with recorded(record):
            await runner.run(record.job, record.piece, emit)
            last = form.last_chunk(record.counts)
        await writer.write(DONE if last is None else event(last) + DONE)
    except ApiError as answer:
        if not writer.has_started:
            raise
        await writer.write(event(answer.body()) + DONE)


def as_api_error(job: Job, error: BaseException) -> ApiError:
    """What the client is told about a failure; the details go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailed):
        _log.warning("request %r failed: %s: %s", job.id, error.reason.value, error.message)
        return from_failure(error)
    _log.error("request %r met a bug", job.id, exc_info=error)
    return from_failure(RequestFailed(FailReason.INTERNAL, str(error)))
