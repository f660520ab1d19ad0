"""The demo's one table, and what it says in words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from rich.box import SIMPLE
from rich.table import Table

from deltaserve.commands.demo.server import DECODE_PAGES
from deltaserve.commands.demo.traffic import Figures
from deltaserve.core.sizes import size

_NO_VALUE = "-"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One quantity: its value in one round, how that is shown, what is made of several."""

    label: str
    value: Callable[[Figures], float | None]
    show: Callable[[float], str] = "{:,}".format
    is_compared: bool = False
    time_unit: str | None = None
    """Unit of a time; None: the quantity is none. No round has the same time: least and most stand beside the
    median."""


def _size(num_bytes: float) -> str:
    return size(round(num_bytes))


def _scaled(seconds: float | None, per_second: float) -> float | None:
    return None if seconds is None else seconds * per_second


ROWS = (
    ReportRow("moved from prefill to decode", lambda f: f.bytes_moved, _size, is_compared=True),
    ReportRow("prompt tokens", lambda f: f.prompt_tokens),
    ReportRow("  not computed again", lambda f: f.cached_on_prefill),
    ReportRow("  not moved again", lambda f: f.cached_on_decode),
    ReportRow("KV positions attention needed", lambda f: f.tokens_read),
    ReportRow("  not read again", lambda f: f.shared_tokens_read),
    ReportRow("answered at once, at most", lambda f: f.answered_at_once, is_compared=True),
    ReportRow("answers right", lambda f: f.answers_right),
    ReportRow("time to first token, p50", lambda f: f.ttft_p50_s, "{:.1f}".format, True, "s"),
    ReportRow("time per output token, p50", lambda f: _scaled(f.tpot_p50_s, 1e3), "{:.1f}".format, True, "ms"),
    ReportRow("all of it", lambda f: f.wall_s, "{:.1f}".format, True, "s"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scene on the servers of the demo: what each round cost, at least one of each."""

    title: str
    off: tuple[Figures, ...]
    """Without decode's cache."""
    on: tuple[Figures, ...]
    """With it."""
    weighed: tuple[Figures, ...]
    """With it, and prompts computed by decode where that is sooner."""

    @property
    def is_right(self) -> bool:
        return all(figures.is_right for figures in (*self.off, *self.on, *self.weighed))


def change(off: Sequence[float], on: Sequence[float]) -> str:
    """How many times more or less the median of the second is; no number where the rounds of both overlap."""
    if not off or not on or not min(off) or not min(on):
        return ""
    if min(off) <= max(on) and min(on) <= max(off):
        return "the same" if {*off} == {*on} else "about the same"
    before, after = median_low(off), median_low(on)
    times = f"{max(before, after) / min(before, after):.1f}x"
    return f"{times} more" if after > before else f"{times} less"


def make_table(comparisons: tuple[Comparison, ...]) -> Table:
    rounds = len(comparisons[0].on)
    title = f"the same traffic {rounds} times to each server in turns, decode's prefix cache off and on: medians"
    table = Table(box=SIMPLE, title=title, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("off", "on", "on is"):
        table.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        table.add_row(f"[bold]{comparison.title}[/]")
        for cells in cells_of(comparison):
            table.add_row(*cells)
        table.add_section()
    return table


def cells_of(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """(label, off, on, change) of each row."""
    for row in ROWS:
        off, on = _values(row, comparison.off), _values(row, comparison.on)
        yield f"  {row.label}", _cell(row, off), _cell(row, on), change(off, on) if row.is_compared else ""


def _values(row: ReportRow, rounds: Sequence[Figures]) -> list[float]:
    return [value for figures in rounds if (value := row.value(figures)) is not None]


def _cell(row: ReportRow, values: Sequence[float]) -> str:
    if not values:
        return _NO_VALUE
    middle = row.show(median_low(values))
    if row.time_unit is None:
        return middle
    return f"{middle} {row.time_unit} ({row.show(min(values))}-{row.show(max(values))})"


def _median(rounds: Sequence[Figures], value: Callable[[Figures], float]) -> float:
    return median_low([value(figures) for figures in rounds])


def in_words(documents: Comparison, turns: Comparison) -> str:
    """What was saved, in one paragraph of measured figures."""
    moved_off, moved_on = (
        sum(_median(rounds, lambda f: f.bytes_moved) for rounds in pair)
        for pair in ((documents.off, turns.off), (documents.on, turns.on))
    )
    shared = _median(documents.on, lambda f: f.shared_tokens_read / max(1, f.tokens_read))
    return (
        f"Every prompt starts with a document that others ask about too. Without a cache decode was sent that document "
        f"anew for each request, {_size(moved_off)} in all, and held a copy of it for each: "
        f"{_median(documents.off, lambda f: f.answered_at_once):.0f} requests filled its {DECODE_PAGES} pages. With "
        f"the cache it kept one copy and was sent only the pages it lacked, {_size(moved_on)}; "
        f"{_median(documents.on, lambda f: f.answered_at_once):.0f} requests ran at once in the same memory, and "
        f"{shared:.0%} of the KV they needed at each step was not read again, since one of them had just read it. "
        f"Every answer was checked token by token against its document. Counts repeat from run to run, but for "
        f"those of conversations that depend on the pages that a small pool evicts; "
        f"times are those of a machine on which client, fronts and workers share the cores."
    )


def weighed_in_words(*comparisons: Comparison) -> str:
    """What the same traffic cost where decode may compute prompts, in one paragraph of measured figures."""
    times = [
        f"{_median(c.weighed, lambda f: f.wall_s):.1f} s ({_median(c.off, lambda f: f.wall_s):.1f} s off)"
        for c in comparisons
    ]
    moved = sum(_median(c.weighed, lambda f: f.bytes_moved) for c in comparisons)
    rounds = [figures for c in comparisons for figures in c.weighed]
    num_right, num_asked = sum(f.answers_right for f in rounds), sum(f.num_requests for f in rounds)
    return (
        f"On the third server decode computes a prompt itself where that is sooner than a hand-over, as `serve` does "
        f"by default. The same traffic took it {' and '.join(times)}; {_size(moved)} moved to decode, and {num_right} "
        f"of {num_asked} answers of all rounds were right."
    )
