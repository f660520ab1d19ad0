"""The text of one sample, in pieces as its tokens come: decoded, and ended at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.wire.messages import FinishReason, Usage
from deltaserve.server.text.answer_pieces import AnswerPiece, Arguments, CallBegins, Content, Reasoning, merged
from deltaserve.server.text.answers.answer_reader import AnswerReader, AnswerReading
from deltaserve.server.text.stop_filter import StopFilter
from deltaserve.server.text.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of an answer become text."""

    stops: tuple[str, ...]
    keeps_stop: bool
    skips_special_tokens: bool
    hides_output: bool
    """The client asked for no output tokens, only for what is said about its prompt."""
    reading: AnswerReading | None = None
    """How reasoning and calls are told apart in it; None: all of it is content."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one sample gained. Text may lag the tokens: part of a character or of a stop string is held back."""

    index: int
    parts: tuple[AnswerPiece, ...] = ()
    """What was said, in order; no two neighbours are texts of one kind."""
    num_calls: int = 0
    """Calls of the sample that have begun."""
    num_reasoning: int = 0
    """Tokens of this piece that were reasoning, markers among them."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    """Characters of output before each token."""
    places: tuple[int | None, ...] = ()
    """Which item of the answer each token is of, from its first token on: text may lag its tokens, and this as well.
    An item is a call, or text of one kind up to what is other. None: of reasoning that has not been said yet."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string found, or the stop id the client named."""
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Its content."""
        return "".join([part.text for part in self.parts if isinstance(part, Content)])

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])


class SampleText:
    """Text state of one sample: decoder, stop filter, counts."""

    def __init__(self, index: int, sampling: SamplingParams, options: TextOptions, codec: TextCodec) -> None:
        self._index = index
        self._sampling = sampling
        self._eos_ids = frozenset(codec.eos_ids)
        self._detokenizer = codec.detokenizer(skip_special_tokens=options.skips_special_tokens)
        self._stops = codec.stops(options.stops, skip_special_tokens=options.skips_special_tokens)
        self._filter = StopFilter(self._stops.stops)
        self._keeps_stop = options.keeps_stop
        self._reader = AnswerReader(options.reading) if options.reading else None
        self._marks = options.reading.spelling.marks if options.reading else {}
        self._kind: type[Content] | type[Reasoning] = Content
        """Which text the stop filter looks through."""
        self._hides_output = options.hides_output
        self._places = _ItemOfTokens()
        self._num_chars = 0
        self.num_tokens = 0
        self._num_calls = 0
        self._stop_reason: str | int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Tokens behind it are dropped."""
        return self._filter.matched is not None

    def take(self, delta: OutputDelta) -> TextPiece:
        """What the next delta adds."""
        shown: list[AnswerPiece] = []
        offsets: list[int] = []
        places: list[int | None] = []
        num_reasoning = 0
        for token in delta.tokens:
            if self.stopped or self._hides_output:
                break
            offsets.append(self._num_chars)
            was_reasoning = self._is_reasoning
            said = self._push(token)
            shown += said
            is_of_reasoning = was_reasoning or self._is_reasoning
            num_reasoning += is_of_reasoning
            places += self._places.token(said, is_of_reasoning=is_of_reasoning)
        finish = delta.finish
        if finish is not None:
            said = self._flush(finish)
            shown += said
            places += self._places.of(said)
            if self._hides_output:
                finish = FinishReason.LENGTH
            elif self.stopped:
                finish = FinishReason.STOP
        kept = len(offsets)
        return TextPiece(
            index=self._index,
            parts=merged(shown),
            num_calls=self._num_calls,
            num_reasoning=num_reasoning,
            tokens=delta.tokens[:kept],
            logprobs=delta.logprobs[:kept],
            offsets=tuple(offsets),
            places=tuple(places),
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=self._stop_reason if finish is FinishReason.STOP or self.stopped else None,
            usage=delta.usage,
        )

    @property
    def _is_reasoning(self) -> bool:
        return self._reader is not None and self._reader.is_reasoning

    def _push(self, token: int) -> list[AnswerPiece]:
        self.num_tokens += 1
        if token in self._sampling.stop_token_ids:
            self._stop_reason = None if token in self._eos_ids else token
            return []
        mark = self._marks.get(token)
        text = self._detokenizer.push(token) if mark is None else self._detokenizer.flush() + mark
        self._num_chars += len(text)
        stop_mark = self._stops.marks.get(token)
        return self._filtered(self._read(text), stop_mark)

    def _read(self, text: str) -> Sequence[AnswerPiece]:
        if self._reader is None:
            return (Content(text),) if text else ()
        return self._reader.push(text)

    def _flush(self, finish: FinishReason) -> list[AnswerPiece]:
        """Text held back until now, at the end of the output."""
        if self.stopped:
            return []
        read = self._read(self._detokenizer.flush())
        rest: Sequence[AnswerPiece] = ()
        if self._reader is not None:
            rest = self._reader.cut() if finish is FinishReason.LENGTH else self._reader.flush()
        shown = self._filtered([*read, *rest])
        return shown if self.stopped else [*shown, *self._release()]

    def _filtered(self, read: Sequence[AnswerPiece], stop_mark: str | None = None) -> list[AnswerPiece]:
        """What may be shown now. Content and reasoning are looked through for stop strings; calls are not: a part of
        one is none."""
        shown: list[AnswerPiece] = []
        for piece in read:
            if isinstance(piece, CallBegins | Arguments):
                self._num_calls += isinstance(piece, CallBegins)
                shown += [*self._release(), piece]
                continue
            if type(piece) is not self._kind:  # a stop string does not reach from one part into another
                shown += self._release()
                self._kind = type(piece)
            shown += self._said(self._look(piece.text))
            if self.stopped:
                return shown
        return [*shown, *self._said(self._look(stop_mark))] if stop_mark else shown

    def _release(self) -> list[AnswerPiece]:
        """What was held back, as it could have become a stop string."""
        return self._said(self._stops.shown(self._filter.flush()))

    def _said(self, text: str) -> list[AnswerPiece]:
        return [self._kind(text)] if text else []

    def _look(self, text: str) -> str:
        """What may be shown now, stop strings looked for."""
        if self.num_tokens < self._sampling.min_tokens:
            return self._stops.shown(self._filter.pass_by(text))
        shown = self._stops.shown(self._filter.push(text))
        if self._filter.matched is None:
            return shown
        self._stop_reason = stop = self._stops.told(self._filter.matched)
        return shown + stop if self._keeps_stop else shown


class _ItemOfTokens:
    """Tells which item each token is of: the first one that is said once it has come, so that it is the same however
    the tokens are put into pieces."""

    def __init__(self) -> None:
        self._num_due = 0
        """Tokens behind which nothing was said yet."""
        self._item = -1
        self._kind: type[AnswerPiece] | None = None

    def token(self, said: Sequence[AnswerPiece], *, is_of_reasoning: bool) -> Sequence[int | None]:
        """Items that are known of with the next token, and what is said with it."""
        self._num_due += 1
        return self.of(said) if said or not is_of_reasoning else self._settle(None)

    def of(self, said: Sequence[AnswerPiece]) -> Sequence[int | None]:
        """Items that are known of when this is said."""
        first: int | None = None
        for part in said:
            kind = CallBegins if isinstance(part, Arguments) else type(part)
            if isinstance(part, CallBegins) or kind is not self._kind:
                self._item, self._kind = self._item + 1, kind
            first = self._item if first is None else first
        return () if first is None else self._settle(first)

    def _settle(self, place: int | None) -> Sequence[int | None]:
        num_due, self._num_due = self._num_due, 0
        return (place,) * num_due


def join(parts: Sequence[TextPiece]) -> TextPiece:
    """Successive pieces of one sample as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return TextPiece(
        index=last.index,
        parts=merged([*chain.from_iterable(part.parts for part in parts)]),
        num_calls=last.num_calls,
        num_reasoning=sum(part.num_reasoning for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        offsets=tuple(chain.from_iterable(part.offsets for part in parts)),
        places=tuple(chain.from_iterable(part.places for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish=last.finish,
        stop_reason=last.stop_reason,
        usage=next((part.usage for part in reversed(parts) if part.usage is not None), None),
    )
