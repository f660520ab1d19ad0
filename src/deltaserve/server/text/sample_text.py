"""The text of one sample, in pieces as its tokens come: decoded, and ended at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.wire.messages import FinishReason, Usage
from deltaserve.server.text.answer_channels import AnswerPart, ChannelReader, Channels, Shown
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
    channels: Channels | None = None
    """Channels in which the answer comes; None: all of it is its text."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one sample gained. Text may lag the tokens: part of a character or of a stop string is held back."""

    index: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    """Characters of output before each token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string found, or the stop id the client named."""
    usage: Usage | None = None


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
        self._channels = options.channels
        self._reader = ChannelReader(options.channels) if options.channels else None
        self._part = AnswerPart.CONTENT
        self._hides_output = options.hides_output
        self._num_chars = 0
        self.num_tokens = 0
        self._stop_reason: str | int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Tokens behind it are dropped."""
        return self._filter.matched is not None

    def take(self, delta: OutputDelta) -> TextPiece:
        """What the next delta adds."""
        shown: list[Shown] = []
        offsets: list[int] = []
        for token in delta.tokens:
            if self.stopped or self._hides_output:
                break
            offsets.append(self._num_chars)
            shown += self._push(token)
        finish = delta.finish
        if finish is not None:
            shown += self._flush()
            if self._hides_output:
                finish = FinishReason.LENGTH
            elif self.stopped:
                finish = FinishReason.STOP
        kept = len(offsets)
        return TextPiece(
            index=self._index,
            text="".join(text for part, text in shown if part is AnswerPart.CONTENT),
            reasoning="".join(text for part, text in shown if part is AnswerPart.REASONING),
            tokens=delta.tokens[:kept],
            logprobs=delta.logprobs[:kept],
            offsets=tuple(offsets),
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=self._stop_reason if finish is FinishReason.STOP or self.stopped else None,
            usage=delta.usage,
        )

    def _push(self, token: int) -> list[Shown]:
        self.num_tokens += 1
        if token in self._sampling.stop_token_ids:
            self._stop_reason = None if token in self._eos_ids else token
            return []
        if self._reader is None or self._channels is None:
            decoded = [(AnswerPart.CONTENT, self._detokenizer.push(token))]
        elif token in self._channels.markers:
            decoded = [*self._reader.text(self._detokenizer.flush()), *self._reader.marker(token)]
        else:
            decoded = self._reader.text(self._detokenizer.push(token))
        self._num_chars += sum(len(text) for _, text in decoded)
        mark = self._stops.marks.get(token)
        return self._filtered([*decoded, *([(self._part, mark)] if mark else [])])

    def _flush(self) -> list[Shown]:
        """Text held back until now, at the end of the output."""
        if self.stopped:
            return []
        rest = self._detokenizer.flush()
        decoded = (
            [(AnswerPart.CONTENT, rest)] if self._reader is None else [*self._reader.text(rest), *self._reader.flush()]
        )
        shown = self._filtered(decoded)
        return shown if self.stopped else [*shown, (self._part, self._stops.shown(self._filter.flush()))]

    def _filtered(self, decoded: Sequence[Shown]) -> list[Shown]:
        shown: list[Shown] = []
        for part, text in decoded:
            if part is not self._part:  # a stop string does not reach from one part into another
                shown.append((self._part, self._stops.shown(self._filter.flush())))
                self._part = part
            shown.append((part, self._look(text)))
            if self.stopped:
                break
        return shown

    def _look(self, text: str) -> str:
        """What may be shown now, stop strings looked for."""
        if self.num_tokens < self._sampling.min_tokens:
            return self._stops.shown(self._filter.pass_by(text))
        shown = self._stops.shown(self._filter.push(text))
        if self._filter.matched is None:
            return shown
        self._stop_reason = stop = self._stops.told(self._filter.matched)
        return shown + stop if self._keeps_stop else shown


def join(parts: Sequence[TextPiece]) -> TextPiece:
    """Successive pieces of one sample as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return TextPiece(
        index=last.index,
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        offsets=tuple(chain.from_iterable(part.offsets for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        finish=last.finish,
        stop_reason=last.stop_reason,
        usage=next((part.usage for part in reversed(parts) if part.usage is not None), None),
    )
