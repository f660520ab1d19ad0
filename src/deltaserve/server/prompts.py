"""What a client writes as a prompt: texts and lists of ids become Prompts, those that cannot fit are refused early."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from deltaserve.control.front.client import Limits
from deltaserve.server.api_errors import CONTEXT_EXCEEDED, ApiError, excerpt, invalid
from deltaserve.server.text.text_codec import TextCodec

_LONGEST = 16
"""A prompt that is cut may have so many times the context's length: what is longer is not worth its tokenizing."""
KeptTokens = Annotated[int, Field(ge=-1, lt=1 << 31)] | None
"""vLLM's `truncate_prompt_tokens`: of each prompt the last so many tokens are taken; -1: as many as fit with what is
asked for. None: all, and a prompt that is too long is refused."""

TruncationSide = Annotated[Literal["left"] | None, BeforeValidator(lambda value: None if value == "" else value)]
"""vLLM's: the end of a prompt is never left out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    tokens: tuple[int, ...]
    text: str | None = None
    """Text as the client wrote it; None when the prompt came as ids or as messages."""

    def cut(self, kept: int | None) -> "Prompt":
        """The last `kept` tokens; None: all."""
        return self if kept is None or len(self.tokens) <= kept else Prompt(self.tokens[-kept:])


def read_prompts(
    value: object, codec: TextCodec, limits: Limits, most: int, *, add_special_tokens: bool
) -> list[Prompt]:
    """A string, a list of strings, a list of ids, or a list of such lists. Raises ApiError 400 naming the bad one, and
    for more than `most` prompts before any of them is cut into tokens."""
    read = partial(read_prompt, codec=codec, limits=limits, add_special_tokens=add_special_tokens)
    if isinstance(value, str) or _is_ids(value):
        return [read(value, "prompt")]
    if not isinstance(value, list):
        raise invalid("prompt", "prompt must be a string, a list of strings, or token ids")
    if not value:
        raise invalid("prompt", "prompt is empty")
    if len(value) > most:
        raise invalid("prompt", f"there are {len(value)} prompts, at most {most} are allowed")
    return [read(item, f"prompt[{index}]") for index, item in enumerate(value)]


def _is_ids(value: object) -> bool:
    """A flat list that begins with a number is one prompt of ids (and every other element must be one)."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def read_prompt(
    value: object, param: str, codec: TextCodec, limits: Limits, *, add_special_tokens: bool = True
) -> Prompt:
    """A text or a list of ids. Raises ApiError 400."""
    if isinstance(value, str):
        tokens = encode_text(value, param, codec, limits, add_special_tokens=add_special_tokens) if value else ()
        prompt = Prompt(tokens, value)
    elif isinstance(value, list):
        prompt = Prompt(read_ids(value, param, limits.vocab_size))
    else:
        raise invalid(param, f"{param} must be a string or a list of token ids")
    if not prompt.tokens:
        raise invalid(param, f"{param} is empty")
    return prompt


def encode_text(
    text: str, param: str, codec: TextCodec, limits: Limits | None, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Ids of a text. One that cannot fit however it is cut into tokens is refused before work is spent on cutting."""
    least = codec.least_tokens(text)
    if limits is not None and least > limits.max_context_len:
        raise too_long(least, param, limits)
    return codec.encode(text, add_special_tokens=add_special_tokens)


def too_long(least: int, param: str, limits: Limits) -> ApiError:
    """What a prompt of at least `least` tokens gets."""
    return context_exceeded(f"the prompt has at least {least} tokens", param, limits)


def context_exceeded(reason: str, param: str, limits: Limits) -> ApiError:
    """What a prompt gets that does not fit alone."""
    return ApiError(400, CONTEXT_EXCEEDED, told_context(reason, limits), param)


def told_context(reason: str, limits: Limits) -> str:
    """Why a prompt does not fit, alone or with its answer. Clients know it by how OpenAI's text begins."""
    return f"this model's maximum context length is {limits.max_context_len} tokens: {reason}"


def num_kept(asked: KeptTokens, longest: int) -> int | None:
    """Most tokens of a prompt that are taken from its end; None: all. `longest`: what fits. Raises ApiError 400."""
    if asked == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is 0: no prompt is left; -1 takes what fits")
    return longest if asked == -1 else asked


def limits_to_cut(limits: Limits, kept: int | None) -> Limits:
    """Limits of a prompt before it is cut."""
    return limits if kept is None else replace(limits, max_context_len=_LONGEST * limits.max_context_len)


def read_ids(value: list[object], param: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids of the model's vocabulary. Raises ApiError 400 naming the first bad one."""
    ids: list[int] = []
    for index, token in enumerate(value):
        # `type is int`: True is an int to isinstance.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(f"{param}[{index}]", f"{excerpt(token)} is not a token id in 0..{vocab_size - 1}")
        ids.append(token)
    return tuple(ids)
