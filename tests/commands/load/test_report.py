"""Report arithmetic on records with known figures."""

import io
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.record import Arrival, RequestRecord
from deltaserve.commands.load.report import as_json, distribution, percentile, print_summary, summarize


def record(turn: int, arrivals: tuple[Arrival, ...], error: str | None = None) -> RequestRecord:
    return RequestRecord(
        conversation=0,
        turn=turn,
        sent_s=0.0,
        prompt_len=100,
        arrivals=arrivals,
        e2e_s=2.0,
        output_len=sum(arrival.num_tokens for arrival in arrivals),
        cached_len=64 if turn else 0,
        tokens_right=3,
        tokens_expected=4 if turn else 3,
        error=error,
    )


EVEN = (Arrival(0.5, 1), Arrival(0.7, 1), Arrival(0.9, 1))
BUNCHED = (Arrival(0.25, 1), Arrival(1.0, 3))


def test_times_of_one_request() -> None:
    even, bunched, empty = record(0, EVEN), record(1, BUNCHED), record(0, ())
    assert even.ttft_s == 0.5
    assert even.tpot_s == pytest.approx(0.2)
    assert even.itls_s() == pytest.approx([0.2, 0.2])
    assert bunched.tpot_s == pytest.approx(0.25)
    assert bunched.itls_s() == pytest.approx([0.25, 0.25, 0.25])
    assert (empty.ttft_s, empty.tpot_s, empty.itls_s()) == (None, None, [])


def test_tokens_that_came_together_are_not_timed() -> None:
    piece, burst = record(0, (Arrival(0.5, 24),)), record(0, (Arrival(0.5, 1), Arrival(0.50001, 1), Arrival(0.9, 2)))
    assert (piece.tpot_s, piece.itls_s(), piece.num_bunched) == (None, [], 23)
    assert burst.num_bunched == 2
    assert record(0, EVEN).num_bunched == 0


def test_latencies_that_are_not_the_servers_are_marked() -> None:
    def distrust(arrivals: tuple[Arrival, ...], *lags_s: float) -> str | None:
        return summarize(Measurement((record(0, arrivals),), 1.0, lags_s)).distrust

    assert distrust(EVEN, 0.001, 0.002) is None
    assert "this client ran up to 80 ms late" in (distrust(EVEN, 0.08) or "")
    assert "96% of the tokens came together" in (distrust((Arrival(0.5, 24),), 0.001) or "")
    out = io.StringIO()
    print_summary(Console(file=out, width=200), summarize(Measurement((record(0, EVEN),), 1.0, (0.08,))))
    assert "these latencies are not the server's alone" in out.getvalue()


def test_percentiles_agree_with_numpy() -> None:
    rng = random.Random(0)
    for count in (1, 2, 3, 10, 101):
        samples = [rng.expovariate(1.0) for _ in range(count)]
        for percent in (0, 50, 90, 95, 99, 100):
            assert percentile(sorted(samples), percent) == pytest.approx(np.percentile(samples, percent))


def test_distribution_leaves_unknowns_out() -> None:
    found = distribution([3.0, None, 1.0])
    assert found is not None
    assert (found.mean, found.p50, found.count) == (2.0, 2.0, 2)
    assert distribution([None]) is None


def test_summary_counts_completed_requests_only() -> None:
    summary = summarize(Measurement((record(0, EVEN), record(1, BUNCHED), record(2, (), error="gone")), duration_s=4.0))
    assert (summary.num_completed, summary.num_failed) == (2, 1)
    assert (summary.input_len, summary.output_len, summary.cached_len) == (200, 7, 64)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (0.5, 1.75)
    assert summary.mean_concurrency == 1.0
    assert (summary.tokens_right, summary.tokens_expected) == (6, 7)
    assert (summary.answers_right, summary.answers_expected) == (1, 2)
    assert summary.latencies_s["ttft"].mean == pytest.approx(0.375)
    assert summary.latencies_s["ttft_first_turn"].mean == 0.5
    assert summary.latencies_s["ttft_later_turns"].mean == 0.25
    assert summary.latencies_s["itl"].count == 5
    assert summary.latencies_s["ttft"].max == 0.5
    assert summary.total_tokens_per_s == 51.75


def test_peaks_of_output_and_of_requests_in_flight() -> None:
    """EVEN has 3 tokens before its first second is over; BUNCHED 1, and 3 in the next second."""
    waves = [replace(record(0, EVEN), sent_s=at_s) for at_s in (0.0, 0.05, 2.0)]
    waves += [replace(record(1, BUNCHED), sent_s=4.0), replace(record(2, (), error="gone"), sent_s=4.0)]
    summary = summarize(Measurement(tuple(waves), duration_s=6.0))
    assert summary.peak_output_tokens_per_s == 6
    assert summary.peak_concurrency == 2, "those of the first wave end as the third begins"
    assert summarize(Measurement((), duration_s=0.0)).peak_concurrency == 0


def test_output_is_counted_by_the_local_tokenizer_too() -> None:
    records = tuple(replace(record(0, EVEN), retokenized_len=length) for length in (4, 5))
    summary = summarize(Measurement(records, duration_s=1.0))
    assert (summary.output_len, summary.retokenized_len) == (6, 9)
    assert summarize(Measurement((record(0, EVEN),), duration_s=1.0)).retokenized_len is None
    out = io.StringIO()
    print_summary(Console(file=out, width=100), summary)
    assert "output tokens, retokenized" in out.getvalue()


def test_an_empty_run_has_no_rates() -> None:
    summary = summarize(Measurement((), duration_s=0.0))
    assert (summary.requests_per_s, summary.cached_len, summary.latencies_s) == (0.0, None, {})


def test_tables_and_json() -> None:
    measurement = Measurement((record(0, EVEN),), duration_s=2.0)
    summary = summarize(measurement)
    out = io.StringIO()
    print_summary(Console(file=out, width=100), summary)
    assert "500.0" in out.getvalue()
    assert "0 (0.0%)" in out.getvalue()
    report = json.loads(json.dumps(as_json({"seed": 1}, measurement, summary)))
    assert report["settings"] == {"seed": 1}
    assert report["summary"]["latencies_s"]["ttft"]["p99"] == 0.5
    assert report["requests"][0]["arrivals"][2] == {"at_s": 0.9, "num_tokens": 1}
