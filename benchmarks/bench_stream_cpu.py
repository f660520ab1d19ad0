"""CPU time that a front takes for each streamed token.

    python -m benchmarks.bench_stream_cpu [--streams 1 8] [--tokens 600] [--rounds 3]

Streams of completions, so many at a time, from one prefill and one decode worker of models/recall-micro; the CPU time
of the front's process over the tokens that it sent, and over its events (tokens that come together share one). Medians
over rounds. Which event loop it has depends on whether uvloop is installed; the first line says.
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import MemorySettings, ModelSettings, NetworkSettings, Settings

MODEL = Path(__file__).resolve().parent.parent / "models" / "recall-micro"
SETTINGS = Settings(
    model=ModelSettings(model_path=str(MODEL), device="cpu"),
    memory=MemorySettings(page_size=16),
    network=NetworkSettings(port=free_port()),
)


def stream(url: str, num_tokens: int, _: int = 0) -> int:
    """Events of one stream."""
    body = {
        "prompt": "Facts: rada ruga;",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0) as reply:
        reply.raise_for_status()
        return sum(line.startswith("data: {") for line in reply.iter_lines())


def measure(
    counts: list[int], num_tokens: int, rounds: int, url: str, stopping: Event
) -> dict[int, tuple[float, float]]:
    """Number of streams |-> (us per token, us per event)."""
    children = psutil.Process().children()
    (front,) = (child for child in children if any("front_process" in word for word in child.cmdline()))
    stream(url, num_tokens)
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count, rows in found.items():
            began = sum(front.cpu_times()[:2])
            with ThreadPoolExecutor(count) as pool:
                num_events = sum(pool.map(partial(stream, url, num_tokens), range(count)))
            took_us = 1e6 * (sum(front.cpu_times()[:2]) - began)
            rows.append((took_us / (count * num_tokens), took_us / num_events))
    medians = {count: list(map(statistics.median, zip(*rows, strict=True))) for count, rows in found.items()}
    return {count: (values[0], values[1]) for count, values in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    console.print(f"event loop: {'asyncio' if find_spec('uvloop') is None else 'uvloop'}")
    work = partial(measure, args.streams, args.tokens, args.rounds)
    table = Table("streams", "CPU per token, us", "per event, us")
    for count, (per_token, per_event) in serve_while(SETTINGS, as_resolved, work, console.print).items():
        table.add_row(str(count), f"{per_token:.1f}", f"{per_event:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
