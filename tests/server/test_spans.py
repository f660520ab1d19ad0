"""A request's way as spans: parts lie in what they are parts of, whatever times were reported."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.wire.messages import Cores, PrefillWay, Usage, Weighed
from deltaserve.server.spans import SampleTimes, TimedSpan, request_span
from deltaserve.server.usage import timings

_USAGE = Usage(
    prompt_len=100,
    output_len=8,
    decode_cached_len=64,
    prefill_cached_len=16,
    transferred_bytes=4096,
    queue_s=1.0,
    prefill_s=2.0,
    transfer_s=0.5,
    first_token_s=3.5,
)


def _span(*samples: SampleTimes, outcome: str = "ok", end: float = 20.0) -> TimedSpan:
    return request_span("generate m", 10.0, end, outcome, {"gen_ai.response.model": "m"}, samples)


def _times(span: TimedSpan) -> list[tuple[str, float, float]]:
    inside = [times for part in span.inside for times in _times(part)]
    return [(span.name, round(span.start, 6), round(span.end, 6)), *inside]


def test_the_parts_of_a_request() -> None:
    span = _span(SampleTimes(0, 100, 8, first_token=14.0, usage=_USAGE))
    assert _times(span) == [
        ("generate m", 10.0, 20.0),
        ("route", 10.0, 10.5),
        ("queue", 10.5, 11.5),
        ("prefill", 11.5, 13.5),
        ("transfer", 13.0, 13.5),
        ("decode", 13.5, 20.0),
    ]
    assert span.error is None
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 64, "one prefix, which both sides have a part of"
    assert span.attributes["gen_ai.server.time_to_first_token"] == 4.0
    assert span.inside[2].inside[0].attributes["deltaserve.transferred_bytes"] == 4096


def test_what_decided_which_side_computes_is_told() -> None:
    weighed = Weighed(
        missing_len=20,
        filed_len=0,
        load_len=0,
        backlog_len=1,
        num_rows=2,
        pace_alone=1.0,
        pace_beside=2.0,
        pace_of_row=1.0,
        most_len=256,
        cores=Cores.OWN,
        way=PrefillWay(queue_len=10, lacking_len=28, handover_len=2, pulled_len=12, pull_len=2),
        local_wait_len=84,
        prefill_wait_len=40,
        pull_wait_len=30,
        is_near=False,
    )
    usage = msgspec.structs.replace(_USAGE, weighed=weighed)
    of_prefill = _span(SampleTimes(0, 100, 8, 14.0, usage)).inside[2].attributes
    assert of_prefill["deltaserve.computed_on"] == timings(0, usage)["computed_on"] == "prefill"
    assert of_prefill["deltaserve.pull_wait_tokens"] == timings(0, usage)["pull_wait_tokens"] == 30
    assert timings(0, _USAGE).keys() == timings(0, usage).keys()
    assert timings(0, _USAGE)["computed_on"] is None


def test_what_was_not_reported_is_no_part() -> None:
    span = _span(SampleTimes(0, 100, 0, None, None), outcome="deadline_exceeded")
    assert (span.inside, span.error) == ((), "deadline_exceeded")
    assert "gen_ai.server.time_to_first_token" not in span.attributes
    local = _span(SampleTimes(0, 100, 8, 14.0, Usage(prompt_len=100, output_len=8, prefill_s=1.0, first_token_s=1.0)))
    assert [part.name for part in local.inside] == ["route", "queue", "prefill", "decode"]
    assert local.inside[2].inside == ()


def test_each_sample_has_parts_of_its_own() -> None:
    span = _span(*(SampleTimes(index, 100, 8, 14.0, _USAGE) for index in range(3)))
    assert [part.attributes["deltaserve.sample"] for part in span.inside] == [0] * 4 + [1] * 4 + [2] * 4
    assert span.attributes["gen_ai.usage.input_tokens"] == 300


_SECONDS = st.floats(0.0, 100.0)


@given(_SECONDS, _SECONDS, _SECONDS, _SECONDS, _SECONDS)
def test_no_part_lies_outside(
    first_s: float, queue_s: float, prefill_s: float, transfer_s: float, after_s: float
) -> None:
    """Clocks of several processes measured these: they need not add up."""
    usage = Usage(
        prompt_len=1, output_len=1, queue_s=queue_s, prefill_s=prefill_s, transfer_s=transfer_s, first_token_s=first_s
    )
    first = 10.0 + first_s / 2
    span = _span(SampleTimes(0, 1, 1, first, usage), end=first + after_s)

    def check(outer: TimedSpan) -> None:
        assert outer.start <= outer.end
        for part in outer.inside:
            assert outer.start <= part.start <= part.end <= outer.end
            check(part)

    check(span)
