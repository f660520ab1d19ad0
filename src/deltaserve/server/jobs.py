"""A validated request: prompts as ids, and one Generation for each sample to make."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from deltaserve.base.ids import Namespace, Room
from deltaserve.base.sampling import SamplingParams
from deltaserve.base.tokens import pack_u32
from deltaserve.request.client import Generation, Limits
from deltaserve.server.errors import ApiError, excerpt, invalid
from deltaserve.server.sampling_fields import derive_seed
from deltaserve.wire.messages import CacheUse

MAX_SALT_BYTES = 256


class Streaming(Enum):
    """How the answer goes out."""

    WHOLE = "whole"
    EVENTS = "events"
    EVENTS_AND_USAGE = "events_and_usage"
    """One more event, with the counts."""
    EVENTS_WITH_USAGE = "events_with_usage"
    """The same, and the counts so far in every event."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    tokens: tuple[int, ...]
    text: str | None = None
    """As the client wrote it; None when it came as ids or as messages."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice of the answer."""

    index: int
    prompt: Prompt
    is_first: bool
    """The first sample of its prompt: the one whose cached tokens are reported."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the samples of a request are turned into text and shown."""

    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    input_logprobs_from: int | None = None
    """/generate: the prompt position from which on its logprobs are shown; None: they are not."""
    text_in_logprobs: bool = False
    hides_output: bool = False
    """The client asked for no output tokens, only for what is said about its prompt."""
    return_token_ids: bool = False
    show_prompt_logprobs: bool = False
    timings: bool = False
    cached_details: bool = False
    streaming: Streaming = Streaming.WHOLE


@dataclass(frozen=True, slots=True)
class Job:
    """All samples of one request."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    samples: tuple[Sample, ...]
    options: OutputOptions

    @property
    def prompt_len(self) -> int:
        """Tokens of all prompts."""
        return sum(len(sample.prompt.tokens) for sample in self.samples if sample.is_first)

    @property
    def deadline_s(self) -> float:
        """Seconds this request may take from now."""
        return max(sample.generation.deadline_s for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every sample of a request besides its prompt and sampling."""

    namespace: Namespace
    deadline_s: float
    cache: CacheUse


def make_samples(
    prompts: Sequence[Prompt], samplings: Sequence[SamplingParams], num_each: int, terms: Terms
) -> tuple[Sample, ...]:
    """`num_each` samples per prompt, in order, each with a fresh room and a seed of its own."""
    samples: list[Sample] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        packed = pack_u32(prompt.tokens)
        for number in range(num_each):
            generation = Generation(
                room=Room(secrets.token_bytes(16)),
                prompt=packed,
                namespace=terms.namespace,
                sampling=msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, number)),
                deadline_s=terms.deadline_s,
                cache=terms.cache,
            )
            samples.append(Sample(len(samples), prompt, number == 0, generation))
    return tuple(samples)


def salted(namespace: Namespace, salt: str | None) -> Namespace:
    """The tenant's namespace, narrowed by the client's `cache_salt`. Both parts are length-prefixed: no collisions."""
    if salt is None:
        return namespace
    if not 0 < len(salt.encode()) <= MAX_SALT_BYTES:
        raise invalid("cache_salt", f"cache_salt has {len(salt.encode())} bytes, allowed is 1..{MAX_SALT_BYTES}")
    return Namespace(f"{len(namespace)}:{namespace}+{salt}")


@dataclass(frozen=True, slots=True)
class Budget:
    """How many output tokens a request asks for, and under which names."""

    prompt_param: str
    param: str
    asked: int | None
    default: int | None
    """When nothing is asked; clamped to what the prompt leaves. None: all of that."""

    least: int = 1
    """0 where an answer without output tokens says something."""

    def check(self, limits: Limits) -> None:
        """Refuse a number that no prompt could use."""
        least, most = self.least, limits.max_context_len
        if self.asked is not None and not least <= self.asked <= most:
            raise invalid(self.param, f"{self.param} is {excerpt(self.asked)}, allowed is {least}..{most}")

    def resolve(self, prompt_len: int, limits: Limits) -> int:
        """Output tokens this prompt may get. Raises ApiError 400 with the numbers when prompt or sum do not fit."""
        context = min(limits.max_context_len, limits.max_total_len or limits.max_context_len)
        if prompt_len > limits.max_prompt_len or prompt_len >= context:
            most = min(limits.max_prompt_len, context - 1)
            raise self._too_long(f"the prompt has {prompt_len} tokens, at most {most} fit", prompt_len, limits)
        if self.asked is None:
            return min(self.default or context, context - prompt_len)
        if prompt_len + self.asked > context:
            need = prompt_len + self.asked
            raise self._too_long(f"prompt and {self.param} need {need} tokens, {context} fit", prompt_len, limits)
        return self.asked

    def _too_long(self, message: str, prompt_len: int, limits: Limits) -> ApiError:
        asked = "default" if self.asked is None else self.asked
        numbers = (
            f"prompt {prompt_len}, {self.param} {asked}, context {limits.max_context_len}, "
            f"largest prompt in memory {limits.max_prompt_len}"
        )
        return ApiError(400, "context_length_exceeded", f"{message} ({numbers})", self.prompt_param)
