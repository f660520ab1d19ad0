"""The text of one sample, in pieces as its tokens come: decoded, and ended at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from deltaserve.base.sampling import SamplingParams, TokenLogprobs
from deltaserve.request.client import OutputDelta
from deltaserve.text.stop_filter import StopFilter
from deltaserve.text.text_codec import TextCodec
from deltaserve.wire.messages import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of an answer become text."""

    stops: tuple[str, ...]
    keeps_stop: bool
    skips_special_tokens: bool
    hides_output: bool
    """The client asked for no output tokens, only for what is said about its prompt."""


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


class SampleText:
    """Text state of one sample: decoder, stop filter, counts."""

    def __init__(self, index: int, sampling: SamplingParams, options: TextOptions, codec: TextCodec) -> None:
        self._index = index
        self._sampling = sampling
        self._eos_ids = frozenset(codec.eos_ids)
        self._detokenizer = codec.detokenizer(skip_special_tokens=options.skips_special_tokens)
        self._filter = StopFilter(options.stops, keep_match=options.keeps_stop)
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
