"""A request's way as spans, for a tracing system: request > route > queue > prefill > transfer > decode.

They are made when the request is over, of the times that its answer reports: no clock of a worker is read, so no clocks
need to agree. Names of attributes are those of OpenTelemetry's conventions for generative models where these have one.
No text of a request is in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltaserve.core.wire.messages import Usage
from deltaserve.server.usage import cached_len, weighed

Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """One part of a request's way. Times are `time.monotonic()` seconds of the front."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None
    """Why it failed; None: it did not."""
    inside: tuple["TimedSpan", ...] = ()


class SpanSink(Protocol):
    """Where spans go."""

    def put(self, request: TimedSpan, trace: str | None) -> None:
        """Never blocks. `trace`: the client's `traceparent`, whose span the request is a part of; None: it begins a
        trace."""
        ...

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """One sample of a request, as the front saw it."""

    index: int
    prompt_len: int
    output_len: int
    first_token: float | None
    """When its first token came; None: none did."""
    usage: Usage | None
    """What was reported of it last; None: nothing was."""


def request_span(
    name: str,
    received: float,
    end: float,
    outcome: str,
    attributes: Mapping[str, Attribute],
    samples: Sequence[SampleTimes],
) -> TimedSpan:
    """The whole request, with the parts of each sample in it. `outcome`: `ok`, `client_gone` or an error code."""
    counts: dict[str, Attribute] = {
        "gen_ai.usage.input_tokens": sum(sample.prompt_len for sample in samples),
        "gen_ai.usage.output_tokens": sum(sample.output_len for sample in samples),
        "gen_ai.usage.cache_read.input_tokens": sum(cached_len(s.usage) for s in samples if s.usage is not None),
    }
    firsts = [sample.first_token for sample in samples if sample.first_token is not None]
    if firsts:
        counts["gen_ai.server.time_to_first_token"] = min(firsts) - received
    inside = tuple(span for sample in samples for span in _parts(sample, received, end))
    error = None if outcome == "ok" else outcome
    return TimedSpan(name, received, end, {**attributes, **counts, "deltaserve.outcome": outcome}, error, inside)


def _parts(sample: SampleTimes, received: float, end: float) -> Iterator[TimedSpan]:
    """None of a sample that got no token: nothing was reported of its way."""
    usage, first = sample.usage, sample.first_token
    if usage is None or first is None:
        return
    which: dict[str, Attribute] = {"deltaserve.sample": sample.index}
    submitted = max(received, first - usage.first_token_s)
    computed_from = min(first, submitted + usage.queue_s)
    landed = min(first, computed_from + usage.prefill_s)
    yield TimedSpan("route", received, submitted, which | {"deltaserve.worker_wait_s": usage.worker_wait_s})
    yield TimedSpan("queue", submitted, computed_from, which)
    transfer = TimedSpan("transfer", max(computed_from, landed - usage.transfer_s), landed, which | _moved(usage))
    yield TimedSpan(
        "prefill", computed_from, landed, which | _found(usage), inside=(transfer,) if usage.transfer_s else ()
    )
    decoded = {"deltaserve.output_tokens": sample.output_len, "deltaserve.retractions": usage.num_retractions}
    yield TimedSpan("decode", landed, end, which | decoded)


def _moved(usage: Usage) -> dict[str, Attribute]:
    return {"deltaserve.transferred_bytes": usage.transferred_bytes}


def _found(usage: Usage) -> dict[str, Attribute]:
    return {
        "deltaserve.prompt_tokens": usage.prompt_len,
        "deltaserve.decode_cached_tokens": usage.decode_cached_len,
        "deltaserve.prefill_cached_tokens": usage.prefill_cached_len,
        "deltaserve.decode_loaded_tokens": usage.decode_loaded_len,
        "deltaserve.prefill_loaded_tokens": usage.prefill_loaded_len,
        "deltaserve.prefill_pulled_tokens": usage.prefill_pulled_len,
        **({} if usage.weighed is None else {f"deltaserve.{k}": v for k, v in weighed(usage.weighed).items()}),
    }
