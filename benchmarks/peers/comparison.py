"""What the servers' runs say beside each other: figures, their medians over rounds, and ratios with bars. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of one server under one load; latencies in ms."""

    requests_per_s: float
    output_tokens_per_s: float
    cached_share: float | None
    """Share of prompt tokens that were cached; None where the server does not say."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    peak_rss_mib: float
    ready_s: float
    num_failed: float
    bunched_share: float
    """Share of output tokens that came together with the one before. Many: ITL says little, TPOT more."""
    client_lag_p99: float
    """How late the client itself was."""
    load: float
    """The machine's load average as the run began."""

    @classmethod
    def of_report(
        cls, summary: Mapping[str, Any], *, peak_rss_mib: float, ready_s: float, load: float
    ) -> "ServerFigures":
        """`summary`: as `deltaserve bench --output-file` writes it. Raises KeyError if nothing completed."""
        latencies = summary["latencies_s"]
        cached = summary["cached_len"]
        return cls(
            requests_per_s=summary["requests_per_s"],
            output_tokens_per_s=summary["output_tokens_per_s"],
            cached_share=None if cached is None else cached / summary["input_len"],
            ttft_p50=1e3 * latencies["ttft"]["p50"],
            ttft_p99=1e3 * latencies["ttft"]["p99"],
            itl_p50=1e3 * latencies["itl"]["p50"],
            itl_p99=1e3 * latencies["itl"]["p99"],
            tpot_p50=1e3 * latencies["tpot"]["p50"],
            peak_rss_mib=peak_rss_mib,
            ready_s=ready_s,
            num_failed=summary["num_failed"],
            bunched_share=summary["num_bunched"] / summary["output_len"],
            client_lag_p99=1e3 * summary["client_lag_s"]["p99"],
            load=load,
        )


def medians(rounds: Sequence[ServerFigures]) -> ServerFigures:
    """Median of each figure; at least one round."""
    middle: dict[str, Any] = {name: _median(getattr(one, name) for one in rounds) for name in HEADINGS}
    return ServerFigures(**middle)


def _median(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return statistics.median(told) if told else None


@dataclass(frozen=True, slots=True)
class PeerBar:
    """One server's figure over the best of others' must reach a bar."""

    what: str
    server: str
    peers: tuple[str, ...]
    figure: str
    """A field of ServerFigures."""
    limit: float
    is_upper: bool = False
    """Less is better, and the ratio must not be above the limit."""

    def ratio(self, of_servers: Mapping[str, ServerFigures]) -> float | None:
        """None where this server or all the peers are missing."""
        peers = [getattr(of_servers[peer], self.figure) for peer in self.peers if peer in of_servers]
        if self.server not in of_servers or not peers:
            return None
        best: float = min(peers) if self.is_upper else max(peers)
        own: float = getattr(of_servers[self.server], self.figure)
        return own / best if best else None

    def holds(self, ratio: float) -> bool:
        return ratio <= self.limit if self.is_upper else ratio >= self.limit


HEADINGS = {
    "requests_per_s": ("req/s", "{:.3f}"),
    "output_tokens_per_s": ("output tok/s", "{:.1f}"),
    "cached_share": ("prompt cached", "{:.0%}"),
    "ttft_p50": ("TTFT p50, ms", "{:,.0f}"),
    "ttft_p99": ("p99", "{:,.0f}"),
    "itl_p50": ("ITL p50, ms", "{:,.1f}"),
    "itl_p99": ("p99", "{:,.0f}"),
    "tpot_p50": ("TPOT p50, ms", "{:,.1f}"),
    "peak_rss_mib": ("peak RSS, MiB", "{:,.0f}"),
    "ready_s": ("ready after, s", "{:.0f}"),
    "num_failed": ("failed", "{:.0f}"),
    "bunched_share": ("bunched", "{:.0%}"),
    "client_lag_p99": ("client late p99, ms", "{:.0f}"),
    "load": ("load", "{:.1f}"),
}
"""Figure |-> heading, form."""


def servers_table(of_servers: Mapping[str, ServerFigures]) -> str:
    """In Markdown, a row for each server."""
    rows: list[Sequence[str]] = [("server", *(heading for heading, _ in HEADINGS.values()))]
    rows += [(name, *_cells(figures)) for name, figures in of_servers.items()]
    return markdown(rows)


def _cells(figures: ServerFigures) -> Iterable[str]:
    for name, (_, form) in HEADINGS.items():
        value = getattr(figures, name)
        yield "-" if value is None else form.format(value)


def bars_table(bars: Sequence[PeerBar], of_servers: Mapping[str, ServerFigures]) -> str:
    """In Markdown, a row for each bar whose servers ran."""
    rows: list[Sequence[str]] = [("what", "bar", "measured", "")]
    for bar in bars:
        ratio = bar.ratio(of_servers)
        if ratio is not None:
            limit = f"{'<=' if bar.is_upper else '>='} {bar.limit:g}"
            rows.append((bar.what, limit, f"{ratio:.2f}", "holds" if bar.holds(ratio) else "missed"))
    return markdown(rows) if len(rows) > 1 else ""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the heading."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    rule = "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    return "\n".join((head, rule, *body))
