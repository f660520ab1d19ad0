"""The demo's one table, and what it says in words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from deltaserve.cli.demo_server import DECODE_PAGES
from deltaserve.cli.demo_traffic import Figures


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One quantity: how it is shown, and what is compared. Without `value` there is no factor."""

    label: str
    show: Callable[[Figures], str]
    value: Callable[[Figures], float | None] | None = None


ROWS = (
    ReportRow("answers right", lambda f: f"{f.answers_right} of {f.num_requests}"),
    ReportRow("prompt tokens", lambda f: f"{f.prompt_tokens:,}"),
    ReportRow("  cached on prefill", lambda f: f"{f.cached_on_prefill:,}"),
    ReportRow("  cached on decode", lambda f: f"{f.cached_on_decode:,}"),
    ReportRow("moved from prefill to decode", lambda f: f"{f.bytes_moved / 2**20:.1f} MiB", lambda f: f.bytes_moved),
    ReportRow("running on decode at once, peak", lambda f: str(f.running_peak), lambda f: f.running_peak),
    ReportRow("pages held on decode, peak", lambda f: f"{f.pages_peak} of {DECODE_PAGES}"),
    ReportRow("KV positions attention needed", lambda f: f"{f.tokens_read:,}"),
    ReportRow("  not read again, being shared", lambda f: f"{f.shared_tokens_read:,}"),
    ReportRow("time to first token, p50", lambda f: _milliseconds(f.ttft_p50_s), lambda f: f.ttft_p50_s),
    ReportRow("time per output token, p50", lambda f: _milliseconds(f.tpot_p50_s), lambda f: f.tpot_p50_s),
    ReportRow("wall time", lambda f: f"{f.wall_s:.2f} s", lambda f: f.wall_s),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scene without and with the decode cache."""

    title: str
    off: Figures
    on: Figures


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def factor(off: float | None, on: float | None) -> str:
    """How many times more or less the second is, in words."""
    if not off or not on:
        return ""
    times = f"{max(off, on) / min(off, on):.1f}"
    if times == "1.0":
        return "same"
    return f"{times}x more" if on > off else f"{times}x less"


def make_table(comparisons: tuple[Comparison, ...]) -> Table:
    table = Table(box=SIMPLE, title="the same traffic, decode's prefix cache off and on", title_justify="left")
    table.add_column("")
    for heading in ("off", "on", "on is"):
        table.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        table.add_row(f"[bold]{comparison.title}[/]")
        for cells in cells_of(comparison):
            table.add_row(*cells)
        table.add_section()
    return table


def cells_of(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """(label, off, on, factor) of each row."""
    off, on = comparison.off, comparison.on
    for row in ROWS:
        change = factor(row.value(off), row.value(on)) if row.value else ""
        yield f"  {row.label}", row.show(off), row.show(on), change


def in_words(documents: Comparison, turns: Comparison) -> str:
    """What was saved, in one paragraph of measured figures."""
    off, on = documents.off, documents.on
    moved_off = off.bytes_moved + turns.off.bytes_moved
    moved_on = on.bytes_moved + turns.on.bytes_moved
    shared = on.shared_tokens_read / max(1, on.tokens_read)
    return (
        f"Every prompt starts with a document that others ask about too. Without a cache decode was sent that document "
        f"anew for each request, {moved_off / 2**20:.0f} MiB in all, and held a copy of it for each: "
        f"{off.running_peak} requests filled its {DECODE_PAGES} pages. With the cache it kept one copy and was sent "
        f"only the pages it lacked, {moved_on / 2**20:.0f} MiB; {on.running_peak} requests ran at once in the same "
        f"memory, and {shared:.0%} of the KV they needed at each step was not read again, since one of them had just "
        f"read it. Every answer was checked token by token against its document. Times are those of one short run in "
        f"which client, front and workers share the cores of this machine."
    )
