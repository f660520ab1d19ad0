"""Running the samples of a job on the engine, and ending them early."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import cast

from deltaserve.control.front.client import Engine, OutputDelta
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Room
from deltaserve.server.jobs import Job, Sample
from deltaserve.server.text.sample_text import SampleText, TextPiece, join
from deltaserve.server.text.text_codec import TextCodec

DEADLINE_SLACK_S = 1.0
"""The engine ends a request at its deadline; the front gives up this much later, should the engine not."""

Sink = Callable[[TextPiece], Awaitable[None]]
"""Takes the next piece of any sample. The sample's next tokens are not asked for before it returns."""


class OpenRooms:
    """The rooms of all requests inside. When the server's grace is over they are ended together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rooms: set[Room] = set()
        self._is_closed = False

    def close(self) -> None:
        """End every one, and every one that still gets here, with DRAINING."""
        self._is_closed = True
        for room in tuple(self._rooms):
            self._engine.cancel(room, FailReason.DRAINING)

    @contextmanager
    def holding(self, room: Room) -> Iterator[None]:
        """Note the room for as long as the engine works on it. Raises RequestFailed once closed."""
        if self._is_closed:
            raise RequestFailed(FailReason.DRAINING, "the server is shutting down")
        self._rooms.add(room)
        try:
            yield
        finally:
            self._rooms.discard(room)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs jobs on one engine."""

    engine: Engine
    codec: TextCodec
    rooms: OpenRooms
    interval: int
    """Tokens that a piece holds at least; the first and the last one of a sample do not wait for them."""

    async def run(self, job: Job, on_delta: Callable[[TextPiece], None], sink: Sink) -> None:
        """All samples to their ends; `on_delta` sees each piece as it comes, `sink` gets them joined to the interval.

        The first sample to fail ends them all. Raises RequestFailed. Leaving early (cancellation) cancels the rooms.
        """
        try:
            async with asyncio.timeout(job.deadline_s + DEADLINE_SLACK_S):
                if len(job.samples) == 1:
                    await self._sample(job.samples[0], job, on_delta, sink)
                    return
                async with asyncio.TaskGroup() as group:
                    for sample in job.samples:
                        group.create_task(self._sample(sample, job, on_delta, sink))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except TimeoutError as error:
            raise RequestFailed(FailReason.DEADLINE, "the engine did not end the request at its deadline") from error

    async def _sample(self, sample: Sample, job: Job, on_delta: Callable[[TextPiece], None], sink: Sink) -> None:
        room = sample.generation.room
        text = SampleText(sample.index, sample.generation.sampling, job.text, self.codec)
        held: list[TextPiece] = []
        num_held, num_needed = 0, 1
        with self.rooms.holding(room):
            # An async generator by the contract's words ("aclose"), which its return type does not say.
            source = cast(AsyncGenerator[OutputDelta, None], self.engine.generate(sample.generation))
            async with aclosing(source):
                async for delta in source:
                    was_stopped = text.stopped
                    piece = text.take(delta)
                    if text.stopped and not was_stopped and delta.finish is None:
                        self.engine.finish(room, text.num_tokens)
                    on_delta(piece)
                    held.append(piece)
                    num_held += len(piece.tokens)
                    if num_held >= num_needed or piece.finish is not None:
                        await sink(join(held))
                        held.clear()
                        num_held, num_needed = 0, self.interval
                    if piece.finish is not None:
                        return
