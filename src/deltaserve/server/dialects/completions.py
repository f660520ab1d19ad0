"""OpenAI's legacy completions."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema

from deltaserve.core.sampling import TokenLogprobs
from deltaserve.server.api_errors import Json
from deltaserve.server.dialect import Dialect
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, Sample, check_model, compose, new_id
from deltaserve.server.openai_format import OpenAiFormat
from deltaserve.server.prompts import KeptTokens, Prompt, TruncationSide, limits_to_cut, num_kept, read_prompts
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields
from deltaserve.server.structured_output import constraint_of
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import finite

DEFAULT_MAX_TOKENS = 16
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]
}
"""What `read_prompts` takes, for the API's description."""

_TWICE = (
    "a prompt begins with the token that the tokenizer puts in front of every text, so it stands there twice, as in "
    "vLLM and SGLang; a prompt that is rendered already wants add_special_tokens false"
)


class CompletionBody(Common):
    """OpenAI's fields plus extensions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello", "max_tokens": 16}]})
    prompt: Annotated[object, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens = None
    truncation_side: TruncationSide = None


def completion_job(body: CompletionBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    least = 0 if body.echo or body.prompt_logprobs is not None else 1
    limit = OutputLimit(asker.limits, "prompt", "max_tokens", body.max_tokens, DEFAULT_MAX_TOKENS, least)
    specials, most = body.add_special_tokens is not False, asker.settings.max_samples
    kept = num_kept(body.truncate_prompt_tokens, limit.longest_prompt)
    limits = limits_to_cut(asker.limits, kept)
    read = read_prompts(body.prompt, asker.codec, limits, most, add_special_tokens=specials)
    prompts = [prompt.cut(kept) for prompt in read]
    if any(prompt.text and asker.codec.begins_twice(prompt.tokens) for prompt in prompts):
        asker.unknown_fields.warn(_TWICE)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    asked = [EndpointFields(limit.resolve(prompt), body.logprobs, prompt_logprobs) for prompt in prompts]
    return compose(body, asker, prompts, asked, new_id("cmpl-"), constraint_of(body))


class CompletionFormat(OpenAiFormat):
    """Choices with `text`, and logprobs as lists side by side."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_at_root = False
    # sglang.bench_serving reads the first choice of whatever event comes, also where SGLang itself sends none.
    extension_choices = ({"index": 0, "text": "", "logprobs": None, "finish_reason": None},)

    def __init__(self, codec: TextCodec, job: Job, fields: CompletionBody) -> None:
        super().__init__(codec, job, fields)
        self._is_echoed = bool(fields.echo)

    def message(self, sample: Sample, piece: TextPiece) -> Json:
        return self.delta(sample, piece, is_first=True)

    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        return {"text": self._echo(sample) + piece.text if is_first else piece.text}

    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        echo_len = len(self._echo(sample))
        tokens, offsets = list(piece.tokens), [echo_len + offset for offset in piece.offsets]
        values: list[TokenLogprobs | None] = list(piece.logprobs)
        if is_first and self._is_echoed:
            prompt = sample.prompt
            tokens = [*prompt.tokens, *tokens]
            offsets = _prompt_offsets(self._codec, prompt) + offsets
            values = [None, *piece.prompt_logprobs, *values]
        return {
            "tokens": [self._label(token) for token in tokens],
            "token_logprobs": [finite(value.logprob) if value else None for value in values],
            "top_logprobs": [self._top(*pair) for pair in zip(tokens, values, strict=True)],
            "text_offset": offsets,
        }

    def _echo(self, sample: Sample) -> str:
        """The prompt as text, for who wants it: as the client wrote it, or what its ids spell."""
        if not self._is_echoed:
            return ""
        return self._codec.decode(sample.prompt.tokens) if sample.prompt.text is None else sample.prompt.text

    def _top(self, token: int, value: TokenLogprobs | None) -> Json | None:
        """Best first; the token that stands there is always among them, so there may be one more than asked for."""
        if value is None:
            return None
        top: Json = {}
        for other, logprob in value.top:
            top.setdefault(self._label(other), finite(logprob))
        top[self._label(token)] = finite(value.logprob)
        return top


def _prompt_offsets(codec: TextCodec, prompt: Prompt) -> list[int]:
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


DIALECT = Dialect("/v1/completions", "Continue a prompt", CompletionBody, completion_job, CompletionFormat, ("prompt",))
