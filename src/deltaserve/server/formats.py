"""One choice of an answer in each dialect: OpenAI completions, OpenAI chat."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from deltaserve.base.sampling import TokenLogprobs
from deltaserve.server.jobs import Job, OutputOptions, Prompt, Sample, Streaming
from deltaserve.server.stream import TextPiece
from deltaserve.server.usage import Counted, extension, usage_body
from deltaserve.text.text_codec import TextCodec

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Body = dict[str, object]


class Format(Protocol):
    """A dialect, made for one job. `is_first` marks the first piece of a sample that carries a token."""

    def whole(self, job: Job, pieces: Mapping[int, TextPiece], counted: Counted) -> Body:
        """The body of a job that is not streamed; `pieces` holds every sample, complete."""
        ...

    def chunk(self, job: Job, piece: TextPiece, counted: Counted, *, is_first: bool) -> Body | None:
        """One event of a streamed job; None when it would say nothing."""
        ...

    def last_chunk(self, job: Job, counted: Counted) -> Body | None:
        """The event after all samples, if the dialect has one."""
        ...


class Choices(Protocol):
    """How one OpenAI endpoint writes a choice."""

    whole_object: str
    chunk_object: str

    def choice(self, sample: Sample, piece: TextPiece) -> Body:
        """The whole of one sample."""
        ...

    def chunk(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body | None:
        """A streamed part of one sample."""
        ...


class OpenAiFormat:
    """What both OpenAI endpoints put around their choices."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def whole(self, job: Job, pieces: Mapping[int, TextPiece], counted: Counted) -> Body:
        """The body of a job that is not streamed."""
        choices = [self._choices.choice(sample, pieces[sample.index]) for sample in job.samples]
        envelope = _envelope(job, self._choices.whole_object)
        return {**envelope, "choices": choices, "usage": usage_body(job, counted), **extension(job, counted)}

    def chunk(self, job: Job, piece: TextPiece, counted: Counted, *, is_first: bool) -> Body | None:
        """One event, about one sample."""
        choice = self._choices.chunk(job.samples[piece.index], piece, is_first=is_first)
        return None if choice is None else self._chunk(job, [choice], counted)

    def last_chunk(self, job: Job, counted: Counted) -> Body | None:
        """The usage, for clients that asked for it."""
        if job.options.streaming is Streaming.EVENTS:
            return None
        return self._chunk(job, [], counted) | {"usage": usage_body(job, counted), **extension(job, counted)}

    def _chunk(self, job: Job, choices: list[Body], counted: Counted) -> Body:
        chunk: Body = {**_envelope(job, self._choices.chunk_object), "choices": choices}
        if job.options.streaming is not Streaming.EVENTS:
            with_counts = job.options.streaming is Streaming.EVENTS_WITH_USAGE
            chunk["usage"] = usage_body(job, counted) if with_counts else None
        return chunk


def _envelope(job: Job, kind: str) -> Body:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


class CompletionChoices:
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, codec: TextCodec, options: OutputOptions) -> None:
        self._codec = codec
        self._options = options

    def choice(self, sample: Sample, piece: TextPiece) -> Body:
        return self._choice(sample, piece, is_first=True)

    def chunk(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body | None:
        if is_first or _says_something(piece, self._options):
            return self._choice(sample, piece, is_first=is_first)
        return None

    def _choice(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        echo = echo_text(self._codec, sample.prompt) if self._options.echo else ""
        body: Body = {
            "index": sample.index,
            "text": echo + piece.text if is_first else piece.text,
            "logprobs": self._logprobs(sample, piece, len(echo), is_first=is_first),
            "finish_reason": piece.finish.value if piece.finish else None,
            "stop_reason": piece.stop_reason,
        }
        return body | _extensions(self._codec, self._options, sample, piece, is_first=is_first)

    def _logprobs(self, sample: Sample, piece: TextPiece, echo_len: int, *, is_first: bool) -> Body | None:
        if sample.generation.sampling.logprobs is None:
            return None
        tokens, offsets = list(piece.tokens), [echo_len + offset for offset in piece.offsets]
        values: list[TokenLogprobs | None] = list(piece.logprobs)
        if is_first and self._options.echo:
            prompt = sample.prompt
            tokens = [*prompt.tokens, *tokens]
            offsets = prompt_offsets(self._codec, prompt) + offsets
            values = [None, *piece.prompt_logprobs, *values]
        return {
            "tokens": [self._codec.token_label(token) for token in tokens],
            "token_logprobs": [finite(value.logprob) if value else None for value in values],
            "top_logprobs": [self._top(*pair) for pair in zip(tokens, values, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: int, value: TokenLogprobs | None) -> Body | None:
        """Best first; the token that stands there is always among them, so there may be one more than asked for."""
        if value is None:
            return None
        top: Body = {}
        for other, logprob in value.top:
            top.setdefault(self._codec.token_label(other), finite(logprob))
        top[self._codec.token_label(token)] = finite(value.logprob)
        return top


class ChatChoices:
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, codec: TextCodec, options: OutputOptions) -> None:
        self._codec = codec
        self._options = options

    def choice(self, sample: Sample, piece: TextPiece) -> Body:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(sample, piece, {"message": message}, is_first=True)

    def chunk(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body | None:
        if not is_first and not _says_something(piece, self._options):
            return None
        delta: Body = {"role": "assistant", "content": piece.text} if is_first else {}
        if piece.text:
            delta["content"] = piece.text
        return self._choice(sample, piece, {"delta": delta}, is_first=is_first)

    def _choice(self, sample: Sample, piece: TextPiece, content: Body, *, is_first: bool) -> Body:
        body: Body = {
            "index": sample.index,
            **content,
            "logprobs": self._logprobs(sample, piece),
            "finish_reason": piece.finish.value if piece.finish else None,
            "stop_reason": piece.stop_reason,
        }
        return body | _extensions(self._codec, self._options, sample, piece, is_first=is_first)

    def _logprobs(self, sample: Sample, piece: TextPiece) -> Body | None:
        if sample.generation.sampling.logprobs is None:
            return None
        entries = [
            self._entry(token, value.logprob) | {"top_logprobs": [self._entry(*pair) for pair in value.top]}
            for token, value in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Body:
        return {
            "token": self._codec.token_label(token),
            "logprob": finite(logprob),
            "bytes": list(self._codec.token_bytes(token)),
        }


def finite(logprob: float) -> float:
    """A number JSON can say."""
    return max(logprob, LOWEST_LOGPROB)


def echo_text(codec: TextCodec, prompt: Prompt) -> str:
    """The prompt as text: as the client wrote it, or what its ids spell."""
    return codec.decode(prompt.tokens) if prompt.text is None else prompt.text


def prompt_offsets(codec: TextCodec, prompt: Prompt) -> list[int]:
    """Characters of the echoed prompt before each of its tokens. An added start token has no width."""
    detokenizer = codec.detokenizer(skip_special_tokens=False)
    offsets, num_chars = [], 0
    for position, token in enumerate(prompt.tokens):
        offsets.append(num_chars)
        text = detokenizer.push(token)
        if position == 0 and prompt.text is not None and not prompt.text.startswith(text):
            text = ""
        num_chars += len(text)
    return offsets


def prompt_logprob_list(codec: TextCodec, prompt: Prompt, values: Sequence[TokenLogprobs]) -> list[Body | None]:
    """The `prompt_logprobs` extension: per position {id: {logprob, decoded_token}}, None for the first."""
    listed: list[Body | None] = [None]
    for token, value in zip(prompt.tokens[1:], values, strict=False):
        pairs = {token: value.logprob} | dict(value.top)
        listed.append({str(i): {"logprob": finite(p), "decoded_token": codec.token_label(i)} for i, p in pairs.items()})
    return listed


def _says_something(piece: TextPiece, options: OutputOptions) -> bool:
    return bool(piece.text or piece.logprobs or piece.finish or (options.return_token_ids and piece.tokens))


def _extensions(codec: TextCodec, options: OutputOptions, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
    """Fields that only clients who asked for them see."""
    body: Body = {}
    if options.return_token_ids:
        body["token_ids"] = list(piece.tokens)
        if is_first:
            body["prompt_token_ids"] = list(sample.prompt.tokens)
    if options.show_prompt_logprobs and is_first:
        body["prompt_logprobs"] = prompt_logprob_list(codec, sample.prompt, piece.prompt_logprobs)
    return body
