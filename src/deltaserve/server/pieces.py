"""Running the samples of a job: token deltas from the engine become pieces of text, stop strings are found here."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import cast

from deltaserve.base.sampling import TokenLogprobs
from deltaserve.request.client import Engine, OutputDelta
from deltaserve.server.jobs import Job, OutputOptions, Sample
from deltaserve.server.stop import StopFilter
from deltaserve.server.text import TextCodec
from deltaserve.wire.messages import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Piece:
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


class _Sampler:
    """Text state of one sample: decoder, stop filter, counts."""

    def __init__(self, sample: Sample, options: OutputOptions, codec: TextCodec) -> None:
        self._sampling = sample.generation.sampling
        self._eos_ids = frozenset(codec.eos_ids)
        self._detokenizer = codec.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._filter = StopFilter(options.stops, keep_match=options.keep_stop)
        self._num_chars = 0
        self.hides_output = options.hides_output
        self.num_tokens = 0
        self.stop_reason: str | int | None = None

    def push(self, token: int) -> tuple[str, int]:
        """(text to show, characters decoded before this token)."""
        offset = self._num_chars
        self.num_tokens += 1
        if token in self._sampling.stop_token_ids:
            self.stop_reason = None if token in self._eos_ids else token
            return "", offset
        text = self._detokenizer.push(token)
        self._num_chars += len(text)
        return self._filtered(text), offset

    def flush(self) -> str:
        """Text held back until now, at the end of the output."""
        if self.stopped:
            return ""
        return self._filtered(self._detokenizer.flush()) + ("" if self.stopped else self._filter.flush())

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._filter.matched is not None

    def _filtered(self, text: str) -> str:
        if self.num_tokens < self._sampling.min_tokens:
            return self._filter.pass_by(text)
        shown = self._filter.push(text)
        if self.stopped:
            self.stop_reason = self._filter.matched
        return shown


async def sample_pieces(
    engine: Engine, sample: Sample, options: OutputOptions, codec: TextCodec
) -> AsyncGenerator[Piece]:
    """One sample from start to finish; the last piece has `finish` and `usage`. Raises RequestFailed.

    Leaving early (aclose, cancellation) cancels the room.
    """
    state = _Sampler(sample, options, codec)
    # An async generator by the contract's words ("aclose"), which its return type does not say.
    source = cast(AsyncGenerator[OutputDelta, None], engine.generate(sample.generation))
    async with aclosing(source):
        async for delta in source:
            stopped_before = state.stopped
            piece = _piece(sample.index, delta, state)
            if state.stopped and not stopped_before and delta.finish is None:
                engine.finish(sample.generation.room, state.num_tokens)
            yield piece
            if delta.finish is not None:
                return


def _piece(index: int, delta: OutputDelta, state: _Sampler) -> Piece:
    texts: list[str] = []
    offsets: list[int] = []
    for token in delta.tokens:
        if state.stopped or state.hides_output:
            break
        text, offset = state.push(token)
        texts.append(text)
        offsets.append(offset)
    if delta.finish is not None:
        texts.append(state.flush())
    kept = len(offsets)
    return Piece(
        index=index,
        text="".join(texts),
        tokens=delta.tokens[:kept],
        logprobs=delta.logprobs[:kept],
        offsets=tuple(offsets),
        prompt_logprobs=delta.prompt_logprobs,
        finish=_finish(delta, state),
        stop_reason=state.stop_reason if delta.finish is FinishReason.STOP or state.stopped else None,
        usage=delta.usage,
    )


def _finish(delta: OutputDelta, state: _Sampler) -> FinishReason | None:
    if delta.finish is None:
        return None
    if state.hides_output:
        return FinishReason.LENGTH
    return FinishReason.STOP if state.stopped else delta.finish


async def job_pieces(engine: Engine, job: Job, codec: TextCodec) -> AsyncGenerator[Piece]:
    """Pieces of all samples as they come. The first sample to fail ends them all."""
    sources = [sample_pieces(engine, sample, job.options, codec) for sample in job.samples]
    async with aclosing(sources[0] if len(sources) == 1 else _merged(sources)) as pieces:
        async for piece in pieces:
            yield piece


@dataclass(frozen=True, slots=True)
class _Ended:
    """One source is over, well or not."""

    error: BaseException | None


async def _merged(sources: Sequence[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    queue: asyncio.Queue[Piece | _Ended] = asyncio.Queue(maxsize=4 * len(sources))
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Piece):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[Piece], queue: "asyncio.Queue[Piece | _Ended]") -> None:
    try:
        async with aclosing(source):
            async for piece in source:
                await queue.put(piece)
    except Exception as error:
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended(None))


async def in_intervals(pieces: AsyncIterator[Piece], num_tokens: int) -> AsyncGenerator[Piece]:
    """Join the pieces of each sample until they hold `num_tokens`; its first and last pieces go out at once."""
    waiting: dict[int, list[Piece]] = {}
    started: set[int] = set()
    async for piece in pieces:
        held = waiting.setdefault(piece.index, [])
        held.append(piece)
        held_len = sum(len(part.tokens) for part in held)
        needed = num_tokens if piece.index in started else 1
        if held_len >= needed or piece.finish is not None:
            started.add(piece.index)
            yield join(waiting.pop(piece.index))


def join(parts: Sequence[Piece]) -> Piece:
    """Successive pieces of one sample as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return Piece(
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
