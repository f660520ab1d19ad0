"""What a dialect of the API is, and what all of them do: admit, read, validate, answer with one body or with events."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.core.errors import FailReason, RequestFailed, StateError
from deltaserve.core.ids import Role
from deltaserve.server.api_errors import NOT_OURS, OPENAI_ERRORS, ApiError, ErrorShape, Json, from_failure
from deltaserve.server.body_fields import Model, parse
from deltaserve.server.front import Front
from deltaserve.server.half import partner_words, prefill_body, take_places
from deltaserve.server.jobs import Asker, Job
from deltaserve.server.observe import JobRecord
from deltaserve.server.read import THREAD_BYTES, Caller, caller_of, deadline_s
from deltaserve.server.replies import DONE, EventStream, EventWriter, event, json_reply, race, until_gone
from deltaserve.server.routes import ID_HEADERS, HttpRoute
from deltaserve.server.stream import Runner
from deltaserve.server.text.sample_text import TextPiece, join
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Counted

_log = logging.getLogger("deltaserve.server")


class AnswerFormat(ABC):
    """One job's answer in the words of its dialect, made for that job: it may remember how far the answer is.

    What is not abstract is that of streams of `data:` events which end with [DONE].
    """

    @abstractmethod
    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json | list[Json]:
        """The body of a job that is not streamed; `pieces` holds every sample, complete."""

    @abstractmethod
    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        """Server-sent events that a piece of a streamed job becomes; empty where it would say nothing.

        `is_first`: the sample had no piece before.
        """

    def last_events(self, counted: Counted) -> bytes:
        """Server-sent events after the last piece of all samples."""
        return DONE

    def error_events(self, error: ApiError) -> bytes:
        """Server-sent events in place of the rest, where a stream that has begun fails."""
        return event(error.body()) + DONE


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Model]):
    """What sets one endpoint apart: its fields, its job, its answer."""

    path: str
    summary: str
    body: type[Model]
    job: Callable[[Model, Asker], Job]
    """Validates what needs the tokenizer or the limits. Raises ApiError."""
    answer: Callable[[TextCodec, Job, Model], AnswerFormat]
    prompt_fields: tuple[str, ...]
    """Fields that are not needed any more when the job is made."""
    errors: ErrorShape = OPENAI_ERRORS
    """Shape of the errors before an answer has begun."""
    beside: tuple[HttpRoute, ...] = ()
    """Routes of the dialect that generate nothing."""
    id_headers: tuple[bytes, ...] = ID_HEADERS
    """Headers by which its answers name the request."""

    @property
    def route(self) -> HttpRoute:
        return HttpRoute(
            "POST",
            self.path,
            self.serve,
            self.summary,
            self.body,
            errors=self.errors,
            id_headers=self.id_headers,
            generates=True,
        )

    async def serve(self, front: Front, request: Request) -> Response:
        """One generating request. Everything that can be refused is refused before the engine hears of it."""
        caller = caller_of(request)
        front.health.admit()
        with ExitStack() as held:
            place = held.enter_context(front.admission.place(caller.namespace))
            job, answer = await self._read(front, request, caller)
            front.admission.book(place, len(job.samples), job.prompt_len)
            record = JobRecord(front.recorder, job, caller, lambda: front.admission.start(place))
            if not job.is_streamed:
                return json_reply(await race(whole_answer(front.runner, record, answer), until_gone(request.receive)))
            return EventStream(
                partial(stream_answer, front.runner, record, answer),
                front.settings.stream_times,
                on_cut=front.metrics.streams_cut.inc,
                on_end=held.pop_all().close,  # the stream still has to be made
            )

    async def _read(self, front: Front, request: Request, caller: Caller) -> tuple[Job, AnswerFormat]:
        deadline, half = deadline_s(request, front.settings), front.settings.half
        async with front.reading.object_of(request) as raw:
            places = None if half is None else await take_places(raw, half)
            fields = parse(self.body, raw, front.unknown_fields)
            asker = Asker(caller.namespace, deadline, front.limits(), front.text, front.settings, front.unknown_fields)
            is_large = int(request.headers.get("content-length", THREAD_BYTES)) >= THREAD_BYTES
            job = await front.threads.run_if(is_large, partial(self.job, fields, asker))
            if job.constraint is not None:
                await front.grammars.check(job.constraint)
            if half is not None and places is not None:
                job = places.bound(job, half)
            if job.half is Role.PREFILL:
                return job, PrefillFormat(job)
            kept = fields.model_copy(update=dict.fromkeys(self.prompt_fields))
            return job, self.answer(front.text, job, kept)


class PrefillFormat(AnswerFormat):
    """The answer of a half that says nothing of the text: never streamed."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json | list[Json]:
        return prefill_body(self._job, counted)

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        raise StateError("prefill's half of a request is not streamed")


@contextmanager
def recorded(record: JobRecord) -> Iterator[None]:
    """Writes down how a job ended. Failures leave it as ApiError; their details are in the log."""
    outcome = "client_gone"
    record.begin()
    try:
        yield
        outcome = "ok"
    except NOT_OURS:
        raise
    except BaseException as error:
        failure = as_api_error(record.job, error)
        outcome = failure.code
        raise failure from error
    finally:
        record.end(outcome)


async def whole_answer(runner: Runner, record: JobRecord, answer: AnswerFormat) -> Json | list[Json]:
    """The JSON body of a job that is not streamed. Raises ApiError."""
    parts: dict[int, list[TextPiece]] = {sample.index: [] for sample in record.job.samples}

    async def keep(piece: TextPiece) -> None:
        parts[piece.index].append(piece)

    with recorded(record):
        await runner.run(record.job, record.piece, keep)
    return answer.whole({index: join(pieces) for index, pieces in parts.items()}, record.counts)


async def stream_answer(runner: Runner, record: JobRecord, answer: AnswerFormat, writer: EventWriter) -> None:
    """Writes all events of a job. A failure before the head is out raises ApiError; later it is the last event."""
    started: set[int] = set()

    async def emit(piece: TextPiece) -> None:
        events = answer.events(piece, record.counts, is_first=piece.index not in started)
        started.add(piece.index)
        if events:
            await writer.write(events)

    try:
        with recorded(record):
            await runner.run(record.job, record.piece, emit)
            last = answer.last_events(record.counts)
        await writer.write(last)
    except ApiError as error:
        if not writer.has_started:
            raise
        await writer.write(answer.error_events(error))


def as_api_error(job: Job, error: BaseException) -> ApiError:
    """What the client is told about a failure; the details go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailed):
        _log.warning("request %r failed: %s: %s", job.id, error.reason.value, error.message)
        failure = from_failure(error)
        if error.reason is FailReason.GRAMMAR_FAILED and job.constraint is not None:
            failure.param = job.constraint.param
        if job.half is not None:
            failure.message = partner_words(job.half, error)
        return failure
    _log.error("request %r met a bug", job.id, exc_info=error)
    return from_failure(RequestFailed(FailReason.INTERNAL, str(error)))
