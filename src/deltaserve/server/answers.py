"""A job's answer: one JSON body, or a stream of events. Ends the record of the job whatever happens."""

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deltaserve.base.errors import FailReason, RequestFailed
from deltaserve.server.errors import ApiError, from_failure
from deltaserve.server.formats import Body, Format
from deltaserve.server.front import Front
from deltaserve.server.jobs import Job
from deltaserve.server.observe import JobRecord
from deltaserve.server.pieces import Piece, in_intervals, job_pieces, join
from deltaserve.server.sse import DONE, event

_log = logging.getLogger("deltaserve.server")
DEADLINE_SLACK_S = 1.0
"""The engine ends a request at its deadline; the front gives up this much later, should the engine not."""
CANCELLED = "client_gone"


async def whole_answer(front: Front, job: Job, record: JobRecord, dialect: Format) -> Body:
    """The JSON body of a job that is not streamed. Raises ApiError."""
    parts: defaultdict[int, list[Piece]] = defaultdict(list)
    outcome = CANCELLED
    try:
        async with aclosing(_recorded(front, job, record)) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        outcome = "ok"
    except Exception as error:
        answer = as_api_error(front, job, error)
        outcome = answer.code
        raise answer from error
    finally:
        record.end(outcome)
    return dialect.whole(job, {index: join(all_parts) for index, all_parts in parts.items()}, record.counted())


async def event_answer(front: Front, job: Job, record: JobRecord, dialect: Format) -> AsyncGenerator[bytes]:
    """The events of a streamed job. A failure before the first event raises ApiError; later it is the last event."""
    outcome, has_begun = CANCELLED, False
    started: set[int] = set()
    try:
        async with aclosing(_recorded(front, job, record)) as pieces:
            async for piece in in_intervals(pieces, front.settings.stream_interval):
                chunk = dialect.chunk(job, piece, record.counted(), is_first=piece.index not in started)
                started.add(piece.index)
                if chunk is not None:
                    has_begun = True
                    yield event(chunk)
        outcome = "ok"
        last = dialect.last_chunk(job, record.counted())
        yield DONE if last is None else event(last) + DONE
    except Exception as error:
        answer = as_api_error(front, job, error)
        outcome = answer.code
        if not has_begun:
            raise answer from error
        yield event(answer.body()) + DONE
    finally:
        record.end(outcome)


def as_api_error(front: Front, job: Job, error: Exception) -> ApiError:
    """What the client is told about a failure; the details go to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        error = RequestFailed(FailReason.DEADLINE, "the engine did not end the request at its deadline")
    if isinstance(error, RequestFailed):
        _log.warning("request %s failed: %s: %s", job.id, error.reason.value, error.message)
        return from_failure(error)
    _log.error("request %s met a bug", job.id, exc_info=error)
    return from_failure(RequestFailed(FailReason.INTERNAL, str(error)))


async def _recorded(front: Front, job: Job, record: JobRecord) -> AsyncGenerator[Piece]:
    source = job_pieces(front.engine, job, front.text)
    async with aclosing(front.cutoff.bound(source, job.deadline_s + DEADLINE_SLACK_S)) as pieces:
        async for piece in pieces:
            record.piece(piece)
            yield piece
