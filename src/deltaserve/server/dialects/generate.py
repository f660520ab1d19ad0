"""SGLang's native dialect."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import msgspec
from pydantic import ConfigDict, Field

from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.api_errors import ApiError, Json, invalid, unsupported
from deltaserve.server.body_fields import MAX_HINT_BYTES, Body, Items, parse
from deltaserve.server.dialect import AnswerFormat, Dialect
from deltaserve.server.jobs import Asker, Common, Job, KvHintFields, OutputLimit, Sample, compose, new_id
from deltaserve.server.prompts import Prompt, read_prompt
from deltaserve.server.read import ID_CHARACTERS
from deltaserve.server.replies import event
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields
from deltaserve.server.structured_output import constraint_of
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Counted, cached_details, cached_len, finite, hint_answers

DEFAULT_NEW_TOKENS = 128
_OUTSIDE = frozenset({"model", "stream", "stream_options", "prompt", "messages"})
"""Fields of a body, which SGLang's clients do not put into sampling_params."""

_RENAMED = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of fields that are called otherwise here."""


class GenerateBody(Body):
    """SGLang's body. `text` or `input_ids`: one prompt, or a list of them, whose answers are a list as well."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "Hello", "sampling_params": {"max_new_tokens": 16}}]}
    )
    text: str | Items[str] | None = None
    input_ids: list[object] | None = None
    """Ids of one prompt, or a list of such lists."""
    sampling_params: dict[str, object] | None = None
    stream: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=MAX_HINT_BYTES, pattern=f"^[{ID_CHARACTERS}]+$")] | None = None
    """The request's id in the answer and in the log."""
    extra_key: str | None = None
    """What SGLang's clients call `cache_salt`, and put here."""
    kv_hints: KvHintFields | None = None
    priority: int | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """Prompt position from which on return_logprob tells logprobs; -1: none."""
    return_text_in_logprobs: bool | None = None


class GenerateSampling(Common):
    """`sampling_params`: SGLang's names for lengths and seed, the rest as elsewhere."""

    max_new_tokens: int | None = None
    min_new_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    sampling_seed: int | None = None


def generate_job(body: GenerateBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400."""
    fields = _sampling(body, asker)
    prompt_param = "text" if body.input_ids is None else "input_ids"
    param, wanted = "sampling_params.max_new_tokens", fields.max_new_tokens
    limit = OutputLimit(asker.limits, prompt_param, param, wanted, DEFAULT_NEW_TOKENS, least=0)
    is_list = _is_list(body)
    prompts = _prompts(body, prompt_param, asker) if is_list else [_prompt(body, prompt_param, asker)]
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    start = _shown_from(body)
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if start is not None and start >= shortest:
        raise invalid("logprob_start_len", f"logprob_start_len is {start}, the prompt has {shortest} tokens")
    input_logprobs = None if start is None else logprobs
    asked = [EndpointFields(limit.resolve(prompt), logprobs, input_logprobs) for prompt in prompts]
    with _inside_sampling_params(body):
        job = compose(fields, asker, prompts, asked, body.rid or new_id("gen-"), constraint_of(fields))
    job = replace(job, is_list=is_list or len(job.samples) > 1)
    if job.constraint is None:
        return job
    return replace(job, constraint=replace(job.constraint, param=f"sampling_params.{job.constraint.param}"))


def _shown_from(body: GenerateBody) -> int | None:
    """The prompt position from which on its logprobs are told, if they are asked for."""
    return None if body.logprob_start_len == -1 else body.logprob_start_len


def _sampling(body: GenerateBody, asker: Asker) -> GenerateSampling:
    given = dict(body.sampling_params or {})
    with _inside_sampling_params(body):
        for name in _OUTSIDE & given.keys():
            raise unsupported(name, f"{name} has no meaning inside sampling_params")
        for name, ours in _RENAMED.items():
            if name in given:
                given[ours] = given[name]
        if body.extra_key is not None:
            given["extra_key"] = body.extra_key
        if body.kv_hints is not None:
            given["kv_hints"] = body.kv_hints.model_dump(exclude_none=True)
        if body.priority is not None:
            given["priority"] = body.priority
        fixed = {"model": asker.settings.model_name, "stream": body.stream}
        return parse(GenerateSampling, given | fixed, asker.unknown_fields)


@contextmanager
def _inside_sampling_params(body: GenerateBody) -> Iterator[None]:
    """Errors name the field where the client wrote it, by the client's name of it."""
    try:
        yield
    except ApiError as error:
        outside = {"extra_key": body.extra_key, "kv_hints": body.kv_hints, "priority": body.priority}
        if error.param is not None and outside.get(error.param) is not None:
            raise
        used = {ours: name for name, ours in _RENAMED.items() if name in (body.sampling_params or {})}
        error.rename(f"sampling_params.{used.get(error.param or '', error.param)}")
        raise


def _prompt(body: GenerateBody, param: str, asker: Asker) -> Prompt:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    value = body.input_ids if body.text is None else body.text
    if not value:
        raise invalid(param, "the prompt is empty")
    return read_prompt(value, param, asker.codec, asker.limits)


def _is_list(body: GenerateBody) -> bool:
    ids = body.input_ids
    return isinstance(body.text, list) or (ids is not None and isinstance(next(iter(ids), None), list))


def _prompts(body: GenerateBody, param: str, asker: Asker) -> list[Prompt]:
    """Each of a list. Raises ApiError 400 naming the bad one, and for too many before one is cut into tokens."""
    if body.text is not None and body.input_ids is not None:
        raise invalid("text", "give either text or input_ids")
    values = body.input_ids if body.text is None else body.text
    most = asker.settings.max_samples
    if not values or len(values) > most:
        raise invalid(param, f"{param} has {len(values or ())} prompts, allowed are 1..{most}")
    named = ((f"{param}[{index}]", value) for index, value in enumerate(values))
    return [read_prompt(value, name, asker.codec, asker.limits) for name, value in named]


class GenerateFormat(AnswerFormat):
    """One body, or one for each sample where prompts came in a list."""

    def __init__(self, codec: TextCodec, job: Job, fields: GenerateBody) -> None:
        self._is_list = job.is_list
        self._samples = [_SampleFormat(codec, job, sample, fields) for sample in job.samples]

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json | list[Json]:
        """What a stream's last event has, for each sample."""
        bodies = [one.grown(pieces[index], counted, is_first=True) for index, one in enumerate(self._samples)]
        return bodies if self._is_list else bodies[0]

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        """Everything of a sample up to and with `piece`, the counts as well."""
        grown = self._samples[piece.index].grown(piece, counted, is_first=is_first)
        return event({**grown, "index": piece.index} if self._is_list else grown)


class _SampleFormat:
    """Every event repeats the text and ids so far, as SGLang's do. Each part is encoded once, and then only copied."""

    def __init__(self, codec: TextCodec, job: Job, sample: Sample, fields: GenerateBody) -> None:
        self._codec = codec
        self._id = f"{job.id}_{sample.index}" if job.is_list else job.id
        self._sample = sample
        self._fields = fields
        self._text = bytearray()
        """The text so far as JSON, without its quotes."""
        self._ids = _Grown()
        self._lists: dict[str, _Grown] = {}
        self._last: int | None = None

    def grown(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> Json:
        """The body with everything up to and with `piece`."""
        sample = self._sample
        self._text += msgspec.json.encode(piece.text)[1:-1]
        self._ids.extend(piece.tokens)
        self._last = piece.tokens[-1] if piece.tokens else self._last
        start = _shown_from(self._fields) if self._fields.return_logprob else None
        if is_first and start is not None:
            self._add_logprobs("input", sample.prompt.tokens[start:], [None, *piece.prompt_logprobs[start:]])
        if sample.generation.sampling.logprobs is not None:
            self._add_logprobs("output", piece.tokens, piece.logprobs)
        num_tokens, usage, _ = counted[sample.index]
        meta: Json = {
            "id": self._id,
            "finish_reason": self._finish(piece, num_tokens),
            "prompt_tokens": len(sample.prompt.tokens),
            "completion_tokens": num_tokens,
            "cached_tokens": cached_len(usage) if usage else 0,
            "cached_tokens_details": cached_details(usage) if usage else None,
            **hint_answers({sample.index: counted[sample.index]}),
            **{name: values.raw() for name, values in self._lists.items()},
        }
        return {"text": msgspec.Raw(b'"' + self._text + b'"'), "output_ids": self._ids.raw(), "meta_info": meta}

    def _add_logprobs(self, side: str, tokens: Sequence[int], values: Sequence[TokenLogprobs | None]) -> None:
        """Triples of SGLang's: logprob, id, text. The first token told of a prompt has no logprob."""
        pairs = list(zip(tokens, values, strict=True))
        ones = [self._triple(token, value.logprob if value else None) for token, value in pairs]
        tops = [value and [self._triple(*pair) for pair in value.top] for _, value in pairs]
        self._lists.setdefault(f"{side}_token_logprobs", _Grown()).extend(ones)
        self._lists.setdefault(f"{side}_top_logprobs", _Grown()).extend(tops)

    def _triple(self, token: int, logprob: float | None) -> list[object]:
        text = self._codec.token_label(token) if self._fields.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]

    def _finish(self, piece: TextPiece, num_tokens: int) -> Json | None:
        if piece.finish is None:
            return None
        if piece.finish is FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        # Without a reason of its own it was the end-of-sequence id.
        return {"type": "stop", "matched": self._last if piece.stop_reason is None else piece.stop_reason}


class _Grown:
    """A JSON array whose items are encoded when they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def extend(self, items: Sequence[object]) -> None:
        if items:
            self._data += (b"," if self._data else b"") + msgspec.json.encode(items)[1:-1]

    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._data + b"]")


DIALECT = Dialect(
    "/generate",
    "Continue a prompt, in SGLang's dialect",
    GenerateBody,
    generate_job,
    GenerateFormat,
    ("text", "input_ids", "sampling_params"),
)
