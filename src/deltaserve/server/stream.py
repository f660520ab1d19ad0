"""Running the samples of a job: token deltas from the engine become pieces of text, stop strings are found here."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import cast

from deltaserve.base.errors import FailReason, RequestFailed
from deltaserve.base.ids import Room
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.request.client import Engine, OutputDelta
from deltaserve.server.jobs import Job, Sample
from deltaserve.text.stop_filter import StopFilter
from deltaserve.text.text_codec import TextCodec
from deltaserve.wire.messages import FinishReason, Usage

DEADLINE_SLACK_S = 1.0
"""The engine ends a request at its deadline; the front gives up this much later, should the engine not."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one sample gained. Text may lag the tokens: part of a character or of a stop string is held back."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    """Characters of output before each token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string found, or the stop id the client named."""
    usage: Usage | None = None


Sink = Callable[[TextPiece], Awaitable[None]]
"""Takes the next piece of any sample. The sample's next tokens are not asked for before it returns."""


class SampleText:
    """Text state of one sample: decoder, stop filter, counts."""

    def __init__(self, sample: Sample, job: Job, codec: TextCodec) -> None:
        self._index = sample.index
        self._sampling = sample.generation.sampling
        self._eos_ids = frozenset(codec.eos_ids)
        self._detokenizer = codec.detokenizer(skip_special_tokens=job.skips_special_tokens)
        self._filter = StopFilter(job.stops, keep_match=job.keeps_stop)
        self._hides_output = job.hides_output
        self._num_chars = 0
        self.num_tokens = 0
        self._stop_reason: str | int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Tokens behind it are dropped."""
        return self._filter.matched is not None

    def take(self, delta: OutputDelta) -> TextPiece:
        """What the next delta adds."""
        texts: list[str] = []
        offsets: list[int] = []
        for token in delta.tokens:
            if self.stopped or self._hides_output:
                break
            offsets.append(self._num_chars)
            texts.append(self._push(token))
        finish = delta.finish
        if finish is not None:
            texts.append(self._flush())
            if self._hides_output:
                finish = FinishReason.LENGTH
            elif self.stopped:
                finish = FinishReason.STOP
        kept = len(offsets)
        return TextPiece(
            index=self._index,
            text="".join(texts),
            tokens=delta.tokens[:kept],
            logprobs=delta.logprobs[:kept],
            offsets=tuple(offsets),
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=self._stop_reason if finish is FinishReason.STOP or self.stopped else None,
            usage=delta.usage,
        )

    def _push(self, token: int) -> str:
        self.num_tokens += 1
        if token in self._sampling.stop_token_ids:
            self._stop_reason = None if token in self._eos_ids else token
            return ""
        text = self._detokenizer.push(token)
        self._num_chars += len(text)
        return self._filtered(text)

    def _flush(self) -> str:
        """Text held back until now, at the end of the output."""
        if self.stopped:
            return ""
        return self._filtered(self._detokenizer.flush()) + ("" if self.stopped else self._filter.flush())

    def _filtered(self, text: str) -> str:
        if self.num_tokens < self._sampling.min_tokens:
            return self._filter.pass_by(text)
        shown = self._filter.push(text)
        if self.stopped:
            self._stop_reason = self._filter.matched
        return shown


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
        """For as long as the engine works on it. Raises RequestFailed once closed."""
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
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except TimeoutError as error:
            raise RequestFailed(FailReason.DEADLINE, "the engine did not end the request at its deadline") from error

    async def _sample(self, sample: Sample, job: Job, on_delta: Callable[[TextPiece], None], sink: Sink) -> None:
        text = SampleText(sample, job, self.codec)
        room = sample.generation.room
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


def join(parts: Sequence[TextPiece]) -> TextPiece:
    """Successive pieces of one sample as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return TextPiece(
        index=last.index,
        text="".join(part.text for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        offsets=tuple(chain.from_iterable(part.offsets for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish=last.finish,
        stop_reason=last.stop_reason,
        usage=last.usage,
    )
