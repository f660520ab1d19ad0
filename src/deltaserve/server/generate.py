"""POST /generate: SGLang's native dialect, one prompt at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from deltaserve.server.completions import check_length, read_ids
from deltaserve.server.compose import Asker, Common, Wanted, as_budget, compose
from deltaserve.server.errors import ApiError, invalid, unsupported
from deltaserve.server.fields import Body as Fields
from deltaserve.server.fields import parse
from deltaserve.server.formats import Body, finite
from deltaserve.server.jobs import Job, OutputOptions, Prompt
from deltaserve.server.pieces import Piece, join
from deltaserve.server.sampling_fields import MAX_LOGPROBS, Asked
from deltaserve.server.text import TextCodec
from deltaserve.server.usage import Counted, cached_len
from deltaserve.wire.messages import FinishReason

DEFAULT_NEW_TOKENS = 128
_OUTSIDE = frozenset({"model", "stream", "stream_options", "prompt", "messages"})
"""Fields of a body, which SGLang's clients do not put into sampling_params."""


class GenerateBody(Fields):
    """SGLang's body. `text` or `input_ids`, one prompt."""

    text: str | None = None
    input_ids: list[object] | None = None
    sampling_params: dict[str, object] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class GenerateSampling(Common):
    """`sampling_params`: SGLang's two names for lengths, the rest as elsewhere."""

    max_new_tokens: int | None = None
    min_new_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


def generate_job(body: GenerateBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400."""
    fields = _sampling(body, asker)
    if fields.n not in (None, 1):
        raise unsupported("sampling_params.n", "one sample for each request; use /v1/completions for n > 1")
    prompt_param = "text" if body.input_ids is None else "input_ids"
    budget = as_budget(prompt_param, "sampling_params.max_new_tokens", fields.max_new_tokens, DEFAULT_NEW_TOKENS)
    budget.check(asker.limits)
    prompt = _prompt(body, asker)
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    asked = Asked(budget.resolve(len(prompt.tokens), asker.limits), logprobs, None)
    with _inside_sampling_params():
        return compose(fields, asker, [prompt], [asked], Wanted("gen-"))


def _sampling(body: GenerateBody, asker: Asker) -> GenerateSampling:
    given = dict(body.sampling_params or {})
    with _inside_sampling_params():
        for name in _OUTSIDE & given.keys():
            raise unsupported(name, f"{name} has no meaning inside sampling_params")
        if "min_new_tokens" in given:
            given["min_tokens"] = given["min_new_tokens"]
        fixed = {"model": asker.settings.model_name, "stream": body.stream}
        return parse(GenerateSampling, given | fixed, asker.on_ignored)


@contextmanager
def _inside_sampling_params() -> Iterator[None]:
    """Errors name the field where the client wrote it, by the client's name of it."""
    try:
        yield
    except ApiError as error:
        name = "min_new_tokens" if error.param == "min_tokens" else error.param
        error.param = f"sampling_params.{name}"
        raise


def _prompt(body: GenerateBody, asker: Asker) -> Prompt:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    if body.text is not None:
        check_length(body.text, "text", asker.codec, asker.limits)
        prompt = Prompt(asker.codec.encode(body.text) if body.text else (), body.text)
    else:
        prompt = Prompt(read_ids(body.input_ids or [], "input_ids", asker.limits.vocab_size))
    if not prompt.tokens:
        raise invalid("text" if body.input_ids is None else "input_ids", "the prompt is empty")
    return prompt


class GenerateFormat:
    """Every event repeats the text and ids so far, as SGLang's do."""

    def __init__(self, codec: TextCodec, options: OutputOptions) -> None:
        self._so_far: list[Piece] = []

    def whole(self, job: Job, pieces: Mapping[int, Piece], counted: Counted) -> Body:
        """The body of a job that is not streamed."""
        return self._body(job, pieces[0], counted)

    def chunk(self, job: Job, piece: Piece, *, is_first: bool) -> Body | None:
        """Everything up to and with `piece`."""
        self._so_far = [join([*self._so_far, piece])]
        so_far = self._so_far[0]
        return self._body(job, so_far, {0: (len(so_far.tokens), so_far.usage)})

    def last_chunk(self, job: Job, counted: Counted) -> Body | None:
        """None: the last piece carried the counts."""
        return None

    def _body(self, job: Job, piece: Piece, counted: Counted) -> Body:
        sample = job.samples[0]
        num_tokens, usage = counted[0]
        meta: Body = {
            "id": job.id,
            "finish_reason": _finish(piece, num_tokens),
            "prompt_tokens": len(sample.prompt.tokens),
            "completion_tokens": num_tokens,
            "cached_tokens": cached_len(usage) if usage else 0,
        }
        if sample.generation.sampling.logprobs is not None:
            pairs = list(zip(piece.tokens, piece.logprobs, strict=True))
            meta["output_token_logprobs"] = [[finite(value.logprob), token, None] for token, value in pairs]
            meta["output_top_logprobs"] = [[[finite(p), i, None] for i, p in value.top] for _, value in pairs]
        return {"text": piece.text, "output_ids": list(piece.tokens), "meta_info": meta}


def _finish(piece: Piece, num_tokens: int) -> Body | None:
    if piece.finish is None:
        return None
    if piece.finish is FinishReason.LENGTH:
        return {"type": "length", "length": num_tokens}
    return {"type": "stop", "matched": piece.stop_reason if piece.stop_reason is not None else _last(piece)}


def _last(piece: Piece) -> int | None:
    """The end-of-sequence id that ended the output."""
    return piece.tokens[-1] if piece.tokens else None
