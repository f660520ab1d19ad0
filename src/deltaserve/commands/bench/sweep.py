"""`deltaserve bench --sweep`: one load at several strengths, and the trade between rate and latency that it shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.table import Table

from deltaserve.commands.load.report import BenchSummary
from deltaserve.commands.load.reuse import ReuseSummary


class SweepKind(Enum):
    """What a sweep makes stronger."""

    CONCURRENCY = "concurrency"
    RATE = "rate"

    @property
    def heading(self) -> str:
        return "at a time" if self is SweepKind.CONCURRENCY else "started per s"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Strengths of a load, in the order in which they are measured."""

    kind: SweepKind
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """`concurrency=1,2,4` or `rate=0.5,1`. Raises ValueError."""
        name, _, listed = text.partition("=")
        if name not in {kind.value for kind in SweepKind}:
            raise ValueError(f"{name!r} cannot be swept, {' and '.join(kind.value for kind in SweepKind)} can")
        kind = SweepKind(name)
        values = tuple(float(part) for part in listed.split(","))
        if kind is SweepKind.CONCURRENCY and not all(value.is_integer() for value in values):
            raise ValueError(f"{text}: a concurrency is a whole number")
        if len(set(values)) < len(values) or not all(0 < value < float("inf") for value in values):
            raise ValueError(f"{text}: strengths are positive, each named once")
        return cls(kind, values)

    def __str__(self) -> str:
        return f"{self.kind.value}={','.join(f'{value:g}' for value in self.values)}"

    @property
    def concurrencies(self) -> tuple[int | None, ...]:
        """Concurrency of each point; None where a point changes the rate."""
        is_swept = self.kind is SweepKind.CONCURRENCY
        return tuple(int(value) if is_swept else None for value in self.values)

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Rate of each point; None where a point changes the concurrency."""
        return tuple(value if self.kind is SweepKind.RATE else None for value in self.values)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What one strength of the load gave."""

    value: float
    summary: BenchSummary

    def latency_ms(self, name: str, quantile: str) -> float | None:
        """`quantile`: a field of Distribution. None where no completed request tells it."""
        found = self.summary.latencies_s.get(name)
        if found is None:
            return None
        quantiles: Mapping[str, float] = {"p50": found.p50, "p95": found.p95}
        return 1e3 * quantiles[quantile]


def print_sweep(console: Console, sweep: Sweep, points: Sequence[SweepPoint]) -> None:
    """A row for each strength."""
    checked = any(point.summary.answers_expected for point in points)
    headings = ("req/s", "output tok/s", "ITL", "TTFT", "failed", *(["right"] if checked else []))
    table = _table("latencies in ms, p50 / p95", sweep, headings)
    for point in points:
        summary = point.summary
        row = [
            f"{point.value:g}",
            f"{summary.requests_per_s:,.2f}",
            f"{summary.output_tokens_per_s:,.1f}",
            *(_both(point, name) for name in ("itl", "ttft")),
            f"{summary.num_failed:,}",
        ]
        table.add_row(*row, *([f"{summary.answers_right}/{summary.answers_expected}"] if checked else []))
    console.print(table)
    told = [(point.value, reuse) for point in points if (reuse := point.summary.reuse) is not None]
    if told:
        _print_reuse(console, sweep, told)
    for point in points:
        if point.summary.distrust is not None:
            console.print(f"Note, {sweep.kind.heading} {point.value:g}: {point.summary.distrust}.", style="yellow")


def _table(title: str, sweep: Sweep, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (sweep.kind.heading, *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_reuse(console: Console, sweep: Sweep, told: Sequence[tuple[float, ReuseSummary]]) -> None:
    """What the server did with the prompts at each strength."""
    console.print()
    headings = ("by decode", "by prefill", "tokens computed", "found", "bytes moved")
    table = _table("where prompts were computed and found", sweep, headings)
    for value, reuse in told:
        by_decode, computed = reuse.share_by_decode, reuse.share_computed
        shares = (f"{share:.0%}" for share in (by_decode, 1 - by_decode, computed, 1 - computed))
        table.add_row(f"{value:g}", *shares, f"{reuse.moved_bytes:,}")
    console.print(table)
    console.print()
    fetched = ("from files", "pulled", "wait, decode", "wait, prefill")
    table = _table("tokens fetched, and mean waits that were compared", sweep, fetched)
    for value, reuse in told:
        waits = ("-", "-") if reuse.waits is None else reuse.waits.as_texts()
        table.add_row(f"{value:g}", f"{reuse.share_loaded:.0%}", f"{reuse.share_pulled:.0%}", *waits)
    console.print(table)


def _both(point: SweepPoint, name: str) -> str:
    return " / ".join(
        "-" if ms is None else f"{ms:,.1f}" for ms in (point.latency_ms(name, at) for at in ("p50", "p95"))
    )
