"""What answers of the OpenAI endpoints have in common: chunks and whole bodies, usage, what is said of a prompt."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import Usage
from deltaserve.server.api_errors import Json
from deltaserve.server.dialect import AnswerFormat
from deltaserve.server.jobs import Common, Job, Sample, StreamOptions
from deltaserve.server.prompts import Prompt
from deltaserve.server.replies import DONE, event
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Counted, cached_details, cached_len, finite, hint_answers, timings


class OpenAiFormat(AnswerFormat):
    """What the OpenAI endpoints have in common: all but the text of a choice and its logprobs."""

    whole_object: str
    chunk_object: str
    prompt_at_root: bool
    """Where vLLM has what is said of the prompt: beside the choices of a chat, in each choice of a completion."""
    extension_choices: Sequence[Json] = ()
    """Choices of a stream's event with SGLang's `sglext`."""

    def __init__(self, codec: TextCodec, job: Job, fields: Common) -> None:
        self._codec = codec
        self._job = job
        self._fields = fields
        options = fields.stream_options or StreamOptions()
        self._tells_usage = bool(options.include_usage or fields.timings or fields.kv_hints)
        """Whether an event after the last piece tells the usage."""
        self._counts_all_along = bool(options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def message(self, sample: Sample, piece: TextPiece) -> Json:
        """The text of a whole sample."""

    @abstractmethod
    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        """The text of a streamed part of it."""

    @abstractmethod
    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        """Log-probabilities of a piece's tokens."""

    def finish_reason(self, piece: TextPiece) -> str | None:
        """Why the sample ended; None: it goes on."""
        return piece.finish.value if piece.finish else None

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json:
        """One choice for each sample."""
        ends = [(sample, pieces[sample.index]) for sample in self._job.samples]
        choices = [self._choice(*end, self.message(*end), is_first=True) for end in ends]
        return {
            **self._envelope(self.whole_object),
            "choices": choices,
            **(self._of_prompt(*ends[0]) if self.prompt_at_root else {}),
            "usage": self._usage(counted),
            **self._extension(counted),
        }

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        """A chunk about one sample."""
        ids = self._fields.return_token_ids and piece.tokens
        if not (is_first or piece.parts or piece.logprobs or piece.finish or ids):
            return b""
        sample = self._job.samples[piece.index]
        choice = self._choice(sample, piece, self.delta(sample, piece, is_first=is_first), is_first=is_first)
        chunk = {**self._envelope(self.chunk_object), "choices": [choice]}
        if self.prompt_at_root and is_first and piece.index == 0:
            chunk |= self._of_prompt(sample, piece)
        if self._tells_usage:
            chunk["usage"] = self._usage(counted) if self._counts_all_along else None
        return event(chunk)

    def last_events(self, counted: Counted) -> bytes:
        """SGLang's `sglext`, then the counts, each in a chunk of its own, for clients that asked for it."""
        usage: Json = {"usage": self._usage(counted)} if self._tells_usage else {}
        told: list[tuple[Sequence[Json], Json]] = [(self.extension_choices, self._extension(counted)), ((), usage)]
        envelope = self._envelope(self.chunk_object)
        chunks = ({**envelope, "choices": choices, **fields} for choices, fields in told if fields)
        return b"".join(map(event, chunks)) + DONE

    def _envelope(self, kind: str) -> Json:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._job.model}

    def _choice(self, sample: Sample, piece: TextPiece, text: Json, *, is_first: bool) -> Json:
        has_logprobs = sample.generation.sampling.logprobs is not None
        return {
            "index": sample.index,
            **text,
            "logprobs": self.logprobs(sample, piece, is_first=is_first) if has_logprobs else None,
            "finish_reason": self.finish_reason(piece),
            "stop_reason": piece.stop_reason,
            **({"token_ids": list(piece.tokens)} if self._fields.return_token_ids else {}),
            **(self._of_prompt(sample, piece) if is_first and not self.prompt_at_root else {}),
        }

    def _label(self, token: int) -> str:
        """What a token is called among logprobs."""
        return f"token_id:{token}" if self._fields.return_tokens_as_token_ids else self._codec.token_label(token)

    def _of_prompt(self, sample: Sample, piece: TextPiece) -> Json:
        """What only clients who asked for it see."""
        body: Json = {}
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = list(sample.prompt.tokens)
        if self._fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprob_list(self._codec, sample.prompt, piece.prompt_logprobs)
        return body

    def _extension(self, counted: Counted) -> Json:
        """SGLang's `sglext`, for clients that asked for what is in it."""
        if not self._fields.return_cached_tokens_details:
            return {}
        return {"sglext": {"cached_tokens_details": cached_details(*self._first_reports(counted))}}

    def _usage(self, counted: Counted) -> Json:
        """A prompt counts once, however many samples it has."""
        prompt_tokens = self._job.prompt_len
        output_tokens = sum(count.num_tokens for count in counted.values())
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(map(cached_len, self._first_reports(counted)))},
        }
        if self._job.tells_reasoning:
            num_reasoning = sum(count.num_reasoning for count in counted.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        if self._fields.timings:
            reports = [(index, count.report) for index, count in sorted(counted.items())]
            usage["timings"] = [timings(index, report) for index, report in reports if report]
        return usage | hint_answers(counted)

    def _first_reports(self, counted: Counted) -> list[Usage]:
        """Those of each prompt's first sample: the others find it in the cache."""
        found = (counted[sample.index].report for sample in self._job.samples if sample.is_first)
        return [report for report in found if report is not None]


def prompt_logprob_list(codec: TextCodec, prompt: Prompt, values: Sequence[TokenLogprobs]) -> list[Json | None]:
    """The `prompt_logprobs` extension: per position {id: {logprob, decoded_token}}, None for the first."""
    listed: list[Json | None] = [None]
    for token, value in zip(prompt.tokens[1:], values, strict=False):
        pairs = {token: value.logprob} | dict(value.top)
        listed.append({str(i): {"logprob": finite(p), "decoded_token": codec.token_label(i)} for i, p in pairs.items()})
    return listed
