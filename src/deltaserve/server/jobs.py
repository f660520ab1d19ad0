"""A validated request: from its fields to prompts as ids, and one Generation for each sample to make."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from pydantic import ConfigDict, Field

from deltaserve.control.front.client import Generation, Limits
from deltaserve.core.hints import NO_HINTS, KvHints
from deltaserve.core.ids import Namespace, Role, Room
from deltaserve.core.namespaces import narrowed
from deltaserve.core.priority import clipped
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import CacheUse
from deltaserve.server.api_errors import CONTEXT_EXCEEDED, AnswerTooLong, ApiError, excerpt, invalid, unsupported
from deltaserve.server.body_fields import BodyPart, UnknownFields
from deltaserve.server.prompts import Prompt, context_exceeded, told_context
from deltaserve.server.sampling_fields import EndpointFields, derive_seed, resolve, stop_strings
from deltaserve.server.settings import ServerSettings
from deltaserve.server.structured_output import Constraint, ConstraintFields
from deltaserve.server.text.sample_text import TextOptions
from deltaserve.server.text.text_codec import TextCodec

MAX_SALT_BYTES = 256
_MAX_N = 128
_MAX_HINTED_S = 31_536_000
"""A year: what is meant is a number of seconds, and no date."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice of the answer."""

    index: int
    prompt: Prompt
    is_first: bool
    """The first sample of its prompt: the one whose cached tokens are reported."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class Job:
    """All samples of one request."""

    id: str
    created: int
    """When the request came, in Unix seconds."""
    model: str
    samples: tuple[Sample, ...]
    is_streamed: bool
    text: TextOptions
    is_list: bool = False
    """The answer is a list, in dialects where one prompt has an answer alone."""
    constraint: Constraint | None = None
    """What every sample must be; to be checked before the job runs."""
    half: Role | None = None
    """Role of the half that is done here; None: all of it."""

    @property
    def prompt_len(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(sample.prompt.tokens) for sample in self.samples if sample.is_first)

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told apart in its answers, if they have any."""
        return self.text.reading is not None and self.text.reading.reasoning is not None

    @property
    def deadline_s(self) -> float:
        """Seconds this request may take from now."""
        return max(sample.generation.deadline_s for sample in self.samples)


def new_id(prefix: str) -> str:
    """A new id, for a job whose client names none."""
    return prefix + secrets.token_hex(16)


def salted(namespace: Namespace, salt: str | None, param: str = "cache_salt") -> Namespace:
    """The tenant's namespace, narrowed by the client's salt. Raises ApiError 400."""
    if salt is None:
        return namespace
    if not 0 < len(salt.encode()) <= MAX_SALT_BYTES:
        raise invalid(param, f"{param} has {len(salt.encode())} bytes, allowed is 1..{MAX_SALT_BYTES}")
    return narrowed(namespace, salt)


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How many output tokens a request asks for, and under which names. What no prompt could use is refused."""

    limits: Limits
    prompt_param: str
    param: str
    asked: int | None
    default: int | None
    """When nothing is asked; clamped to what the prompt leaves. None: all of that."""

    least: int = 1
    """Least output tokens; 0 where an answer without any says something."""

    def __post_init__(self) -> None:
        least, most = self.least, self.limits.max_context_len
        if self.asked is not None and not least <= self.asked <= most:
            allowed = f"{least}..{most}, the context's length"
            raise invalid(self.param, f"{self.param} is {excerpt(self.asked)}, allowed is {allowed}")

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that fits with what is asked."""
        context = min(self.limits.max_context_len, self.limits.max_total_len or self.limits.max_context_len)
        return max(1, min(self.limits.max_prompt_len, context - (self.asked or 1)))

    def resolve(self, prompt: Prompt) -> int:
        """Output tokens this prompt may get. Raises ApiError 400 with the numbers when prompt or sum do not fit."""
        limits, prompt_len = self.limits, len(prompt.tokens)
        context = min(limits.max_context_len, limits.max_total_len or limits.max_context_len)
        if prompt_len > limits.max_prompt_len or prompt_len >= context:
            most = min(limits.max_prompt_len, context - 1)
            reason = self._with_numbers(f"the prompt has {prompt_len} tokens, at most {most} fit", prompt_len)
            raise context_exceeded(reason, self.prompt_param, limits)
        if self.asked is None:
            return min(self.default or context, context - prompt_len)
        if prompt_len + self.asked > context:
            need = prompt_len + self.asked
            reason = self._with_numbers(f"prompt and {self.param} need {need} tokens, {context} fit", prompt_len)
            raise AnswerTooLong(
                400,
                CONTEXT_EXCEEDED,
                told_context(reason, limits),
                self.prompt_param,
                prompt_len=prompt_len,
                asked_len=self.asked,
                context_len=context,
            )
        return self.asked

    def _with_numbers(self, reason: str, prompt_len: int) -> str:
        asked = "default" if self.asked is None else self.asked
        numbers = f"prompt {prompt_len}, {self.param} {asked}, context {self.limits.max_context_len}"
        if self.limits.max_prompt_len < self.limits.max_context_len:
            numbers += f", pages for a prompt of {self.limits.max_prompt_len}"
        return f"{reason} ({numbers})"


class StreamOptions(BodyPart):
    """OpenAI's stream_options. Other names in it are refused: a typo would silently lose the usage."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether the counts so far stand in every event, not in the last one alone; needs `include_usage`."""
    include_obfuscation: bool | None = None


class KvHintFields(BodyPart):
    """What the client knows of the requests to come. Other names are refused: a typo would silently be no hint."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    done: bool | None = None
    """No further turn of this conversation comes."""
    retain_s: float | None = Field(default=None, gt=0, le=_MAX_HINTED_S)
    """Its next turn comes within so many seconds: a tool runs meanwhile, or its user reads."""
    prefetch: bool | None = None
    """Have the prompt ready for requests that begin with it; the answer is empty."""


class Common(ConstraintFields):
    """Fields of every dialect that has OpenAI's names; one with names of its own fills them in."""

    model: str | None = None
    """Name of the model; None: the one served here."""
    n: int | None = None
    best_of: int | None = None
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    """SGLang's name of `cache_salt`. Who gives both shares pages with those who give the same two."""
    kv_hints: KvHintFields | None = None
    priority: int | None = None
    """How much sooner than others it is to be taken, under a --schedule-policy by priority."""
    no_cache: bool | None = None
    """Match nothing and leave nothing in any cache: warm-up, probes, benchmarks."""
    timings: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: tokens of logprobs are `token_id:7` in place of their text, which several tokens may share."""
    return_cached_tokens_details: bool | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """The sender of a request, and what the server can do now."""

    namespace: Namespace
    deadline_s: float
    limits: Limits
    codec: TextCodec
    settings: ServerSettings
    unknown_fields: UnknownFields


def check_model(name: str | None, settings: ServerSettings) -> None:
    """Raises ApiError 404 for another model than the one served."""
    if name not in (None, *settings.model_names, *settings.model_paths):
        names = " and ".join(map(excerpt, settings.model_names))
        message = f"the model {excerpt(name)} does not exist here; this server has {names}"
        raise ApiError(404, "model_not_found", message, "model")


def compose(
    body: Common,
    asker: Asker,
    prompts: Sequence[Prompt],
    asked: Sequence[EndpointFields],
    job_id: str,
    constraint: Constraint | None,
) -> Job:
    """The job of `prompts`, one `EndpointFields` each. `constraint`: all that is asked of the answer, by `body` and
    beside it. Raises ApiError 400."""
    grammar = None if constraint is None else constraint.grammar
    num_each = 1 if body.n is None else body.n
    if not 1 <= num_each <= _MAX_N:
        raise invalid("n", f"n is {excerpt(num_each)}, allowed is 1..{_MAX_N}")
    num_samples, most = len(prompts) * num_each, asker.settings.max_samples
    if num_samples > most:
        raise invalid("prompt", f"{len(prompts)} prompts make {num_samples} samples, at most {most} are allowed")
    if body.best_of not in (None, num_each):
        raise unsupported("best_of", "best_of other than n is not supported: every sample made is returned")
    samples: list[Sample] = []
    namespace = salted(salted(asker.namespace, body.cache_salt), body.extra_key or None, "extra_key")
    cache = CacheUse.BYPASS if body.no_cache else CacheUse.NORMAL
    hints, priority = _hints(body.kv_hints), clipped(body.priority or 0)
    if hints.prefetch:
        _check_prefetch(num_each)
        constraint = grammar = None
    for prompt, each in zip(prompts, asked, strict=True):
        tokens = pack_u32(prompt.tokens)
        first = resolve(body, each, asker.codec, asker.limits.vocab_size, grammar)
        if hints.prefetch:  # the one token that is drawn is not shown
            first = msgspec.structs.replace(first, max_tokens=1, min_tokens=0)
        for number in range(num_each):
            room, seed = Room(secrets.token_bytes(16)), derive_seed(first.seed, number)
            sampling = msgspec.structs.replace(first, seed=seed)
            generation = Generation(
                room, tokens, namespace, sampling, asker.deadline_s, cache, hints=hints, priority=priority
            )
            samples.append(Sample(len(samples), prompt, number == 0, generation))
    _check_stream(body)
    return Job(
        id=job_id,
        created=int(time.time()),
        model=asker.settings.model_name,
        samples=tuple(samples),
        is_streamed=bool(body.stream),
        text=TextOptions(
            stops=stop_strings(body),
            keeps_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
            skips_special_tokens=body.skip_special_tokens is not False,
            hides_output=asked[0].max_tokens == 0 or hints.prefetch,
        ),
        constraint=constraint,
    )


def _hints(given: KvHintFields | None) -> KvHints:
    """Raises ApiError 400 where one hint contradicts another."""
    if given is None:
        return NO_HINTS
    if given.done and given.retain_s is not None:
        raise invalid("kv_hints", "kv_hints: done says that no further turn comes, retain_s that one does")
    if given.done and given.prefetch:
        raise invalid(
            "kv_hints", "kv_hints: done says that nobody comes back to this prompt, prefetch that somebody does"
        )
    retain_ms = math.ceil(1000 * (given.retain_s or 0))
    return KvHints(done=bool(given.done), retain_ms=retain_ms, prefetch=bool(given.prefetch))


def _check_prefetch(num_each: int) -> None:
    if num_each > 1:
        raise invalid("n", f"n is {num_each}: kv_hints.prefetch makes the prompt ready, once")


def _check_stream(body: Common) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream")
    if body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
