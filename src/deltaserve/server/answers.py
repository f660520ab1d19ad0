"""A job's answer: one JSON body, or a stream of events. Ends the record of the job whatever happens."""

import logging

from deltaserve.base.errors import FailReason, RequestFailed
from deltaserve.server.errors import ApiError, from_failure
from deltaserve.server.formats import Body, Format
from deltaserve.server.jobs import Job
from deltaserve.server.observe import JobRecord
from deltaserve.server.sse import DONE, EventWriter, event
from deltaserve.server.stream import Piece, Runner, join

_log = logging.getLogger("deltaserve.server")
CANCELLED = "client_gone"


async def whole_answer(runner: Runner, job: Job, record: JobRecord, form: Format) -> Body:
    """The JSON body of a job that is not streamed. Raises ApiError."""
    parts: dict[int, list[Piece]] = {sample.index: [] for sample in job.samples}
    outcome = CANCELLED

    async def keep(piece: Piece) -> None:
        parts[piece.index].append(piece)

    try:
        await runner.run(job, record.piece, keep)
        outcome = "ok"
    except Exception as error:
        answer = as_api_error(job, error)
        outcome = answer.code
        raise answer from error
    finally:
        record.end(outcome)
    return form.whole(job, {index: join(pieces) for index, pieces in parts.items()}, record.counts)


async def stream_answer(runner: Runner, job: Job, record: JobRecord, form: Format, writer: EventWriter) -> None:
    """Writes all events of a job. A failure before the head is out raises ApiError; later it is the last event."""
    outcome = CANCELLED
    started: set[int] = set()

    async def emit(piece: Piece) -> None:
        chunk = form.chunk(job, piece, record.counts, is_first=piece.index not in started)
        started.add(piece.index)
        if chunk is not None:
            await writer.write(event(chunk))

    try:
        await runner.run(job, record.piece, emit)
        outcome = "ok"
        last = form.last_chunk(job, record.counts)
        await writer.write(DONE if last is None else event(last) + DONE)
    except Exception as error:
        answer = as_api_error(job, error)
        outcome = answer.code
        if not writer.has_started:
            raise answer from error
        await writer.write(event(answer.body()) + DONE)
    finally:
        record.end(outcome)


def as_api_error(job: Job, error: Exception) -> ApiError:
    """What the client is told about a failure; the details go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailed):
        _log.warning("request %s failed: %s: %s", job.id, error.reason.value, error.message)
        return from_failure(error)
    _log.error("request %s met a bug", job.id, exc_info=error)
    return from_failure(RequestFailed(FailReason.INTERNAL, str(error)))
