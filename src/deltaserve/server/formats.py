"""Answers of the OpenAI endpoints, as JSON-ready bodies: completions, chat."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from deltaserve.core.sampling import TokenLogprobs
from deltaserve.server.chat import ChatBody
from deltaserve.server.completions import CompletionBody
from deltaserve.server.jobs import Common, Job, Sample, Streaming
from deltaserve.server.prompts import Prompt
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Counted, usage_body, usage_fields

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Body = dict[str, object]


class OpenAiFormat(ABC):
    """What the OpenAI endpoints have in common: all but the text of a choice and its logprobs. Made for one job.

    `is_first` marks the first piece of a sample that carries a token.
    """

    whole_object: str
    chunk_object: str
    prompt_at_root: bool
    """Where vLLM has what is said of the prompt: beside the choices of a chat, in each choice of a completion."""

    def __init__(self, codec: TextCodec, job: Job, fields: Common) -> None:
        self._codec = codec
        self._job = job
        self._fields = fields

    @abstractmethod
    def message(self, sample: Sample, piece: TextPiece) -> Body:
        """The text of a whole sample."""

    @abstractmethod
    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        """The text of a streamed part of it."""

    @abstractmethod
    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        """Log-probabilities of a piece's tokens."""

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Body:
        """The body of a job that is not streamed; `pieces` holds every sample, complete."""
        ends = [(sample, pieces[sample.index]) for sample in self._job.samples]
        choices = [self._choice(*end, self.message(*end), is_first=True) for end in ends]
        return {
            **self._envelope(self.whole_object),
            "choices": choices,
            **(self._of_prompt(*ends[0]) if self.prompt_at_root else {}),
            **usage_fields(self._job, self._fields, counted),
        }

    def chunk(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> Body | None:
        """One event of a streamed job, about one sample; None when it would say nothing."""
        ids = self._fields.return_token_ids and piece.tokens
        if not (is_first or piece.text or piece.reasoning or piece.logprobs or piece.finish or ids):
            return None
        sample = self._job.samples[piece.index]
        choice = self._choice(sample, piece, self.delta(sample, piece, is_first=is_first), is_first=is_first)
        root = self._of_prompt(sample, piece) if self.prompt_at_root and is_first and piece.index == 0 else {}
        chunk = {**self._envelope(self.chunk_object), "choices": [choice], **root}
        if self._job.streaming is Streaming.EVENTS_WITH_USAGE:
            return chunk | {"usage": usage_body(self._job, self._fields, counted)}
        return chunk if self._job.streaming is Streaming.EVENTS else chunk | {"usage": None}

    def last_chunk(self, counted: Counted) -> Body | None:
        """The event after all samples: the usage, for clients that asked for it."""
        if self._job.streaming is Streaming.EVENTS:
            return None
        return {**self._envelope(self.chunk_object), "choices": [], **usage_fields(self._job, self._fields, counted)}

    def _envelope(self, kind: str) -> Body:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._job.model}

    def _choice(self, sample: Sample, piece: TextPiece, text: Body, *, is_first: bool) -> Body:
        has_logprobs = sample.generation.sampling.logprobs is not None
        return {
            "index": sample.index,
            **text,
            "logprobs": self.logprobs(sample, piece, is_first=is_first) if has_logprobs else None,
            "finish_reason": piece.finish.value if piece.finish else None,
            "stop_reason": piece.stop_reason,
            **({"token_ids": list(piece.tokens)} if self._fields.return_token_ids else {}),
            **(self._of_prompt(sample, piece) if is_first and not self.prompt_at_root else {}),
        }

    def _of_prompt(self, sample: Sample, piece: TextPiece) -> Body:
        """What only clients who asked for it see."""
        body: Body = {}
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = list(sample.prompt.tokens)
        if self._fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprob_list(self._codec, sample.prompt, piece.prompt_logprobs)
        return body


class CompletionFormat(OpenAiFormat):
    """Answers of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_at_root = False

    def __init__(self, codec: TextCodec, job: Job, fields: CompletionBody) -> None:
        super().__init__(codec, job, fields)
        self._is_echoed = bool(fields.echo)

    def message(self, sample: Sample, piece: TextPiece) -> Body:
        return self.delta(sample, piece, is_first=True)

    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        return {"text": self._echo(sample) + piece.text if is_first else piece.text}

    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        echo_len = len(self._echo(sample))
        tokens, offsets = list(piece.tokens), [echo_len + offset for offset in piece.offsets]
        values: list[TokenLogprobs | None] = list(piece.logprobs)
        if is_first and self._is_echoed:
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

    def _echo(self, sample: Sample) -> str:
        """The prompt as text, for who wants it: as the client wrote it, or what its ids spell."""
        if not self._is_echoed:
            return ""
        return self._codec.decode(sample.prompt.tokens) if sample.prompt.text is None else sample.prompt.text

    def _top(self, token: int, value: TokenLogprobs | None) -> Body | None:
        """Best first; the token that stands there is always among them, so there may be one more than asked for."""
        if value is None:
            return None
        top: Body = {}
        for other, logprob in value.top:
            top.setdefault(self._codec.token_label(other), finite(logprob))
        top[self._codec.token_label(token)] = finite(value.logprob)
        return top


class ChatFormat(OpenAiFormat):
    """Answers of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_at_root = True

    def __init__(self, codec: TextCodec, job: Job, fields: ChatBody) -> None:
        super().__init__(codec, job, fields)
        self._shows_reasoning = fields.include_reasoning is not False

    def message(self, sample: Sample, piece: TextPiece) -> Body:
        return {"message": {"role": "assistant", "content": piece.text, **self._reasoning(piece), "refusal": None}}

    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
        role = {"role": "assistant"} if is_first else {}
        content = {"content": piece.text} if is_first or piece.text else {}
        return {"delta": {**role, **content, **self._reasoning(piece)}}

    def _reasoning(self, piece: TextPiece) -> Body:
        """The reasoning, named as DeepSeek's API, SGLang and vLLM named it; later versions of vLLM say `reasoning`."""
        return {"reasoning_content": piece.reasoning} if piece.reasoning and self._shows_reasoning else {}

    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Body:
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
