"""Agents' traffic on one server and on prefill and decode apart, on the same cores.

    python -m benchmarks.bench_agents [MODEL] [--rounds 3] [--concurrency 1,4,16] [--json FILE]

The load is `deltaserve bench --workload agents`: sessions of ten turns behind prefixes that they share, scaled from a
public recipe (57,600 shared tokens, 6,400 new ones, 400 of output) to the machine: 1,800, 200 and 12. MODEL is by
default the 46 M parameter model of bench_e2e. At each concurrency the variants take turns, each with a new server for
each point, and the order turns round with each round. Ratios are medians over rounds of a variant's figure over that of
the unified server in the same round.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench_e2e import MODEL, told_under
from benchmarks.load_shapes import AgentsShape
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import (
    DisaggregationSettings,
    ModelSettings,
    NetworkSettings,
    SchedulingSettings,
    Settings,
)

LENGTHS = (1800, 200, 12)
"""Tokens of the shared prefix, new ones, and of the output."""
CONTEXT_LEN = 4096
VARIANTS: Mapping[str, DisaggregationSettings] = {
    "unified": DisaggregationSettings(disaggregation_mode="null"),
    "P/D": DisaggregationSettings(conditional_prefill="off"),
    "P/D, conditional": DisaggregationSettings(conditional_prefill="auto"),
}
BASE = "unified"


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one variant at one concurrency, in one round."""

    requests_per_s: float
    ttft_p50_s: float
    itl_p99_s: float
    computed_over_new: float
    num_lost: int
    """Requests that failed."""

    @classmethod
    def read(cls, summary: Mapping[str, Any]) -> "Point":
        latencies, reuse = summary["latencies_s"], summary["reuse"]
        return cls(
            requests_per_s=summary["requests_per_s"],
            ttft_p50_s=latencies["ttft"]["p50"],
            itl_p99_s=latencies["itl"]["p99"],
            computed_over_new=reuse["computed_len"] / reuse["new_len"],
            num_lost=summary["num_failed"],
        )


def run_once(variant: DisaggregationSettings, model: Path, concurrency: int, seed: int) -> Point:
    """A new server under the load."""
    line = [*AgentsShape(*LENGTHS, concurrency).options, "--seed", str(seed)]
    settings = Settings(
        model=ModelSettings(model_path=str(model), device="cpu", context_length=CONTEXT_LEN),
        scheduling=SchedulingSettings(max_running_requests=max(16, concurrency)),
        disaggregation=variant,
        network=NetworkSettings(port=free_port()),
    )
    with TemporaryDirectory() as folder:
        return Point.read(told_under(settings, as_resolved, line, Path(folder) / "run.json")["summary"])


def table_of(runs: Mapping[str, list[dict[int, Point]]], concurrencies: list[int]) -> Table:
    table = Table(
        "at a time", "", "requests/s", "of unified", "TTFT p50, ms", "of unified", "ITL p99, ms", "of unified"
    )
    table.add_column("computed over new")
    for at_a_time in concurrencies:
        base = [points[at_a_time] for points in runs[BASE]]
        for name, rounds in runs.items():
            found = [points[at_a_time] for points in rounds]
            columns: list[Callable[[Point], float]] = [
                lambda point: point.requests_per_s,
                lambda point: point.ttft_p50_s * 1e3,
                lambda point: point.itl_p99_s * 1e3,
            ]
            cells = [str(at_a_time), name]
            for figure in columns:
                ratios = [figure(one) / figure(other) for one, other in zip(found, base, strict=True)]
                cells += [f"{statistics.median(map(figure, found)):,.1f}", f"{statistics.median(ratios):.2f}"]
            table.add_row(*cells, f"{statistics.median(point.computed_over_new for point in found):.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--only", nargs="*", default=[*VARIANTS], help="names of variants, beside the unified one")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(f"{arguments.model} is missing: python -m tools.make_bench_model {arguments.model}")
    concurrencies = [int(part) for part in arguments.concurrency.split(",")]
    variants = {name: variant for name, variant in VARIANTS.items() if name in (BASE, *arguments.only)}
    runs: dict[str, list[dict[int, Point]]] = {name: [{} for _ in range(arguments.rounds)] for name in variants}
    for index in range(arguments.rounds):
        for concurrency in concurrencies:
            for name in [*variants][:: -1 if index % 2 else 1]:
                point = run_once(variants[name], arguments.model, concurrency, seed=100 * index)
                runs[name][index][concurrency] = point
                print(f"round {index + 1}, {concurrency} at a time, {name}: {point}", file=sys.stderr)
    Console(width=120).print(table_of(runs, concurrencies))
    if arguments.json:
        as_written = {
            name: [{count: asdict(point) for count, point in points.items()} for points in rounds]
            for name, rounds in runs.items()
        }
        arguments.json.write_text(json.dumps(as_written, indent=1))


if __name__ == "__main__":
    main()
