"""POST /v1/completions: fields, and the job they describe."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, check_model, compose, new_id
from deltaserve.server.prompts import read_prompts
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields

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
    """OpenAI's legacy completions plus extensions."""

    prompt: Annotated[object, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


def completion_job(body: CompletionBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    least = 0 if body.echo or body.prompt_logprobs is not None else 1
    limit = OutputLimit(asker.limits, "prompt", "max_tokens", body.max_tokens, DEFAULT_MAX_TOKENS, least)
    specials, most = body.add_special_tokens is not False, asker.settings.max_samples
    prompts = read_prompts(body.prompt, asker.codec, asker.limits, most, add_special_tokens=specials)
    if any(prompt.text and asker.codec.begins_twice(prompt.tokens) for prompt in prompts):
        asker.unknown_fields.warn(_TWICE)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    asked = [EndpointFields(limit.resolve(prompt), body.logprobs, prompt_logprobs) for prompt in prompts]
    return compose(body, asker, prompts, asked, new_id("cmpl-"))
