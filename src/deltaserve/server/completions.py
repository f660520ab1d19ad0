"""POST /v1/completions: fields, and the job they describe."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from deltaserve.request.client import Limits
from deltaserve.server.api_errors import ApiError, excerpt, invalid
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, OutputOptions, Prompt, check_model, compose, new_id
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields
from deltaserve.text.text_codec import TextCodec

DEFAULT_MAX_TOKENS = 16
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]
}
"""What `read_prompts` takes, for the API's description."""


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
    limit = OutputLimit("prompt", "max_tokens", body.max_tokens, DEFAULT_MAX_TOKENS, least)
    limit.check(asker.limits)
    prompts = read_prompts(
        body.prompt, asker.codec, asker.limits, add_special_tokens=body.add_special_tokens is not False
    )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    asked = [
        EndpointFields(limit.resolve(len(p.tokens), asker.limits), body.logprobs, prompt_logprobs) for p in prompts
    ]
    return compose(body, asker, prompts, asked, new_id("cmpl-"), OutputOptions(echo=bool(body.echo)))


def read_prompts(value: object, codec: TextCodec, limits: Limits, *, add_special_tokens: bool) -> list[Prompt]:
    """A string, a list of strings, a list of ids, or a list of such lists."""
    if isinstance(value, str) or _is_ids(value):
        return [_prompt(value, "prompt", codec, limits, add_special_tokens=add_special_tokens)]
    if not isinstance(value, list):
        raise invalid("prompt", "prompt must be a string, a list of strings, or token ids")
    if not value:
        raise invalid("prompt", "prompt is empty")
    return [
        _prompt(item, f"prompt[{index}]", codec, limits, add_special_tokens=add_special_tokens)
        for index, item in enumerate(value)
    ]


def _is_ids(value: object) -> bool:
    """A flat list that begins with a number is one prompt of ids (and every other element must be one)."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _prompt(value: object, param: str, codec: TextCodec, limits: Limits, *, add_special_tokens: bool) -> Prompt:
    if isinstance(value, str):
        check_length(value, param, codec, limits)
        prompt = Prompt(codec.encode(value, add_special_tokens=add_special_tokens), value) if value else Prompt(())
    elif isinstance(value, list):
        prompt = Prompt(read_ids(value, param, limits.vocab_size))
    else:
        raise invalid(param, f"{param} must be a string or a list of token ids")
    if not prompt.tokens:
        raise invalid(param, f"{param} is empty")
    return prompt


def check_length(text: str, param: str, codec: TextCodec, limits: Limits) -> None:
    """Refuse a text that cannot fit however it is cut into tokens, before work is spent on cutting it."""
    least = codec.least_tokens(text)
    if least > limits.max_context_len:
        raise too_long(least, param, limits)


def too_long(least: int, param: str, limits: Limits) -> ApiError:
    """What a prompt of at least `least` tokens gets."""
    message = f"the prompt has at least {least} tokens, the context {limits.max_context_len}"
    return ApiError(400, "context_length_exceeded", message, param)


def read_ids(value: list[object], param: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids of the model's vocabulary. Raises ApiError 400 naming the first bad one."""
    ids: list[int] = []
    for index, token in enumerate(value):
        # `type is int`: True is an int to isinstance.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(f"{param}[{index}]", f"{excerpt(token)} is not a token id in 0..{vocab_size - 1}")
        ids.append(token)
    return tuple(ids)
