"""From validated fields to a job: what all generating endpoints have in common."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from deltaserve.base.ids import Namespace
from deltaserve.request.client import Limits
from deltaserve.server.errors import ApiError, excerpt, invalid, unsupported
from deltaserve.server.fields import OnIgnored, Part
from deltaserve.server.jobs import Job, OutputOptions, Prompt, Streaming, Terms, make_samples, salted
from deltaserve.server.sampling_fields import Asked, SamplingFields, resolve, stop_strings
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text import TextCodec
from deltaserve.wire.messages import CacheUse


class StreamOptions(Part):
    """OpenAI's stream_options. Other names in it are refused: a typo would silently lose the usage."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: the counts so far in every event, not in the last one alone."""
    include_obfuscation: bool | None = None


class Common(SamplingFields):
    """Fields of both OpenAI dialects."""

    model: str | None = None
    """None: the one model served here."""
    n: int | None = None
    best_of: int | None = None
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    no_cache: bool | None = None
    """Match nothing and leave nothing in any cache: warm-up, probes, benchmarks."""
    timings: bool | None = None
    return_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and what the server can do now."""

    namespace: Namespace
    deadline_s: float
    limits: Limits
    codec: TextCodec
    settings: ServerSettings
    on_ignored: OnIgnored
    """Told each field name nobody knows."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an endpoint wants beyond the common fields."""

    id_prefix: str
    id: str | None = None
    """The client's own."""
    echo: bool = False
    input_logprobs_from: int | None = None
    text_in_logprobs: bool = False


def check_model(name: str | None, settings: ServerSettings) -> None:
    """Raises ApiError 404 for another model than the one served."""
    if name not in (None, settings.model_name, settings.model_path):
        message = f"the model {excerpt(name)} does not exist here; this server has {excerpt(settings.model_name)}"
        raise ApiError(404, "model_not_found", message, "model")


def compose(body: Common, asker: Asker, prompts: Sequence[Prompt], asked: Sequence[Asked], wanted: Wanted) -> Job:
    """The job of `prompts`, one `Asked` each. Raises ApiError 400."""
    num_each = 1 if body.n is None else body.n
    if not 1 <= num_each <= asker.settings.max_n:
        raise invalid("n", f"n is {excerpt(num_each)}, allowed is 1..{asker.settings.max_n}")
    num_samples, most = len(prompts) * num_each, asker.settings.max_samples
    if num_samples > most:
        raise invalid("prompt", f"{len(prompts)} prompts make {num_samples} samples, at most {most} are allowed")
    if body.best_of not in (None, num_each):
        raise unsupported("best_of", "best_of other than n is not supported: every sample made is returned")
    codec = asker.codec
    samplings = [resolve(body, each, codec.defaults, codec.eos_ids, asker.limits.vocab_size) for each in asked]
    cache = CacheUse.BYPASS if body.no_cache else CacheUse.NORMAL
    terms = Terms(salted(asker.namespace, body.cache_salt), asker.deadline_s, cache)
    options = OutputOptions(
        stops=stop_strings(body),
        keep_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=wanted.echo,
        input_logprobs_from=wanted.input_logprobs_from,
        text_in_logprobs=wanted.text_in_logprobs,
        hides_output=asked[0].max_tokens == 0,
        return_token_ids=bool(body.return_token_ids),
        show_prompt_logprobs=body.prompt_logprobs is not None,
        timings=bool(body.timings),
        cached_details=bool(body.return_cached_tokens_details),
        streaming=_streaming(body),
    )
    return Job(
        id=wanted.id or wanted.id_prefix + secrets.token_hex(16),
        created=int(time.time()),
        model=asker.settings.model_name,
        samples=make_samples(prompts, samplings, num_each, terms),
        options=options,
    )


def _streaming(body: Common) -> Streaming:
    options = body.stream_options
    if not body.stream:
        if options is not None:
            raise invalid("stream_options", "stream_options is only allowed with stream")
        return Streaming.WHOLE
    if options is not None and options.include_obfuscation:
        raise ApiError(400, "unsupported", "include_obfuscation is not supported", "stream_options.include_obfuscation")
    if options is not None and options.include_usage and options.continuous_usage_stats:
        return Streaming.EVENTS_WITH_USAGE
    if (options is not None and options.include_usage) or body.timings:
        return Streaming.EVENTS_AND_USAGE
    return Streaming.EVENTS
