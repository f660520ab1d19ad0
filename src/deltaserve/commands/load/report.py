"""Turns records into figures: throughput, latency percentiles, cache use, right answers; as a table and as JSON."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate

from rich.console import Console
from rich.table import Table

from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.reuse import ReuseSummary, reuse_of

MAX_LAG_S = 0.01
MAX_BUNCHED = 0.1
"""Beyond these, latencies are printed with a warning."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How one quantity is distributed, in the unit of its samples."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """Figures of one run. Rates per second, over the time from the first send to the last answer's end."""

    duration_s: float
    num_completed: int
    num_failed: int
    input_len: int
    """Prompt tokens of completed requests, likewise the following lengths."""
    output_len: int
    cached_len: int | None
    """Prompt tokens served from cache; None if no answer told it."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Input and output tokens together."""
    peak_output_tokens_per_s: int
    """Output tokens in the best whole second after the start."""
    mean_concurrency: float
    peak_concurrency: int
    """Requests in flight, those that failed among them."""
    latencies_s: Mapping[str, Distribution]
    """ttft, tpot, itl, e2e; with several turns also ttft_first_turn and ttft_later_turns."""
    tokens_right: int
    tokens_expected: int
    """Tokens of completed requests whose answer can be computed and is known."""
    answers_right: int
    answers_expected: int
    num_bunched: int = 0
    """Output tokens that came together with the one before, so that the time between them is not known."""
    retokenized_len: int | None = None
    """Output tokens by the local tokenizer; None without one."""
    client_lag_s: Distribution | None = None
    """How late this client itself was: TTFT may read as much too long, TPOT and ITL too short."""
    reuse: ReuseSummary | None = None
    """None: the server told no timings."""
    hint_outcomes: Mapping[str, int] = field(default_factory=dict)
    """What became of hints |-> how many; empty: none was given, or nothing is told of them."""

    @property
    def distrust(self) -> str | None:
        """Why the latencies are not the server's, in words; None if nothing speaks against them."""
        reasons = []
        if self.client_lag_s is not None and self.client_lag_s.p99 > MAX_LAG_S:
            reasons.append(f"this client ran up to {self.client_lag_s.p99 * 1e3:.0f} ms late (p99)")
        if self.output_len and self.num_bunched / self.output_len > MAX_BUNCHED:
            reasons.append(f"{self.num_bunched / self.output_len:.0%} of the tokens came together with others")
        return f"{' and '.join(reasons)}: TTFT reads too long, TPOT and ITL too short" if reasons else None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile by linear interpolation between the closest ranks of ascending samples; at least one sample."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(samples: Iterable[float | None]) -> Distribution | None:
    """How the samples are distributed. None values are left out; None if nothing is left."""
    ordered = sorted(sample for sample in samples if sample is not None)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Distribution(mean, p50, p90, p95, p99, ordered[-1], len(ordered))


def summarize(measurement: Measurement) -> BenchSummary:
    """All figures but `num_failed` are of completed requests."""
    done = [record for record in measurement.records if record.error is None]
    judged = [record for record in done if record.tokens_right is not None]
    seconds = measurement.duration_s
    input_len, output_len = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    told = [record.cached_len for record in done if record.cached_len is not None]
    retokenized = [record.retokenized_len for record in done if record.retokenized_len is not None]

    def rate(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return BenchSummary(
        duration_s=seconds,
        num_completed=len(done),
        num_failed=len(measurement.records) - len(done),
        input_len=input_len,
        output_len=output_len,
        cached_len=sum(told) if told else None,
        requests_per_s=rate(len(done)),
        input_tokens_per_s=rate(input_len),
        output_tokens_per_s=rate(output_len),
        total_tokens_per_s=rate(input_len + output_len),
        peak_output_tokens_per_s=_peak_output(done),
        peak_concurrency=_peak_concurrency(measurement.records),
        mean_concurrency=rate(math.fsum(record.e2e_s for record in done)),
        latencies_s=_latencies(done),
        tokens_right=sum(record.tokens_right or 0 for record in judged),
        tokens_expected=sum(record.tokens_expected for record in judged),
        answers_right=sum(record.tokens_right == record.tokens_expected for record in judged),
        answers_expected=len(judged),
        num_bunched=sum(record.num_bunched for record in done),
        retokenized_len=sum(retokenized) if retokenized else None,
        client_lag_s=distribution(measurement.lags_s),
        reuse=reuse_of(done, measurement.moved),
        hint_outcomes=dict(Counter(outcome for record in done for outcome in record.hint_outcomes)),
    )


def _peak_output(done: Iterable[RequestRecord]) -> int:
    """Most tokens that arrived within one second of the clock that started with the measurement."""
    seconds: Counter[int] = Counter()
    for record in done:
        for arrival in record.arrivals:
            seconds[int(record.sent_s + arrival.at_s)] += arrival.num_tokens
    return max(seconds.values(), default=0)


def _peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests that were in flight at one moment; one that ends makes room for one that begins then."""
    moves = [move for record in records for move in ((record.sent_s, 1), (record.sent_s + record.e2e_s, -1))]
    return max(accumulate(step for _, step in sorted(moves)), default=0)


def _latencies(done: Sequence[RequestRecord]) -> dict[str, Distribution]:
    samples: dict[str, list[float | None]] = {"ttft": [record.ttft_s for record in done]}
    if any(record.turn for record in done):
        samples["ttft_first_turn"] = [record.ttft_s for record in done if record.turn == 0]
        samples["ttft_later_turns"] = [record.ttft_s for record in done if record.turn > 0]
    samples["tpot"] = [record.tpot_s for record in done]
    samples["itl"] = [gap for record in done for gap in record.itls_s()]
    samples["e2e"] = [record.e2e_s for record in done]
    return {name: found for name, values in samples.items() if (found := distribution(values)) is not None}


def print_summary(console: Console, summary: BenchSummary) -> None:
    """Two tables: totals and rates, then latencies in milliseconds."""
    totals = Table(show_header=False, box=None)
    totals.add_column(style="bold")
    totals.add_column(justify="right")
    for label, value in _totals(summary):
        totals.add_row(label, value)
    console.print(totals)
    latencies = Table(title="latency, ms", title_justify="left")
    latencies.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        latencies.add_column(heading, justify="right")
    for name, figures in summary.latencies_s.items():
        values = (figures.mean, figures.p50, figures.p90, figures.p95, figures.p99, figures.max)
        latencies.add_row(LABELS[name], *(f"{value * 1e3:,.1f}" for value in values))
    console.print(latencies)
    if summary.distrust is not None:
        console.print(f"Note: these latencies are not the server's alone ({summary.distrust}).", style="yellow")


LABELS = {
    "ttft": "TTFT",
    "ttft_first_turn": "TTFT, first turns",
    "ttft_later_turns": "TTFT, later turns",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
}


def _totals(summary: BenchSummary) -> Iterable[tuple[str, str]]:
    yield "completed requests", f"{summary.num_completed:,}"
    yield "failed requests", f"{summary.num_failed:,}"
    yield "duration, s", f"{summary.duration_s:,.2f}"
    yield "requests/s", f"{summary.requests_per_s:,.2f}"
    yield "input tokens/s", f"{summary.input_tokens_per_s:,.1f}"
    yield "output tokens/s", f"{summary.output_tokens_per_s:,.1f}"
    yield "output tokens, best second", f"{summary.peak_output_tokens_per_s:,}"
    yield "total tokens/s", f"{summary.total_tokens_per_s:,.1f}"
    yield "mean concurrency", f"{summary.mean_concurrency:,.1f}"
    yield "peak concurrency", f"{summary.peak_concurrency:,}"
    if summary.retokenized_len is not None:
        yield "output tokens, retokenized", f"{summary.retokenized_len:,}"
    if summary.cached_len is not None and summary.input_len:
        yield "prompt tokens cached", f"{summary.cached_len:,} ({summary.cached_len / summary.input_len:.1%})"
    if summary.reuse is not None:
        yield from summary.reuse.as_rows()
    if summary.hint_outcomes:
        yield "hints", ", ".join(f"{count:,} {word}" for word, count in sorted(summary.hint_outcomes.items()))
    if summary.tokens_expected:
        yield "answers right", f"{summary.answers_right:,} of {summary.answers_expected:,}"
        yield "tokens right", f"{summary.tokens_right / summary.tokens_expected:.2%}"


def as_json(settings: Mapping[str, object], measurement: Measurement, summary: BenchSummary) -> dict[str, object]:
    """What `--output-file` holds: the settings, the summary and every request."""
    return {
        "settings": dict(settings),
        "summary": {**asdict(summary), "distrust": summary.distrust},
        "requests": [asdict(record) for record in measurement.records],
    }
