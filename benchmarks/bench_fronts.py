"""Whether conversations find their prefix when several fronts share a port, and what that costs.

    python -m benchmarks.bench_fronts [--fronts 1 2 4] [--conversations 32] [--turns 6] [--rounds 3]

Two prefill and two decode workers of models/recall-micro. Conversations go on side by side, each turn on a connection
of its own, which the kernel gives to any front. The hit rate is the share of the tokens that the conversation had
before a turn which were not computed again for it. Runs with each number of fronts alternate; medians over rounds.
"""

import argparse
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import DisaggregationSettings, MemorySettings, ModelSettings, NetworkSettings, Settings

MODEL = Path(__file__).resolve().parent.parent / "models" / "recall-micro"
CLIENTS, TURN_LEN, ANSWER_LEN, PAGE_SIZE = 8, 96, 16, 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run."""

    hit_rate: float
    turn_ms: float
    """Median time of a turn."""
    front_mib: float
    """Resident memory of all fronts, pages that they share counted once for each."""


def converse(url: str, num_turns: int, seed: int) -> list[tuple[int, int, float]]:
    """Per turn but the first: cached tokens, tokens there were before, seconds."""
    draw = random.Random(seed)
    tokens: list[int] = []
    found = []
    for turn in range(num_turns):
        before = len(tokens)
        tokens += [draw.randrange(10, 250) for _ in range(TURN_LEN)]
        body = {"prompt": tokens, "max_tokens": ANSWER_LEN, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        reply = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60.0)
        reply.raise_for_status()
        took_s, answer = time.perf_counter() - began, reply.json()
        if turn:
            found.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], before, took_s))
        tokens += answer["choices"][0]["token_ids"]
    return found


def measure(num_conversations: int, num_turns: int, seed: int, url: str, stopping: Event) -> Outcome:
    """All conversations, so many at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        seeds = range(seed, seed + num_conversations)
        turns = [turn for turns in pool.map(partial(converse, url, num_turns), seeds) for turn in turns]
    whole = sum(before // PAGE_SIZE * PAGE_SIZE for _, before, _ in turns)
    children = psutil.Process().children()
    fronts = [child for child in children if any("front_process" in word for word in child.cmdline())]
    return Outcome(
        hit_rate=sum(cached for cached, _, _ in turns) / whole,
        turn_ms=1e3 * statistics.median(took_s for _, _, took_s in turns),
        front_mib=sum(front.memory_info().rss for front in fronts) / 2**20,
    )


def settings_of(num_fronts: int) -> Settings:
    return Settings(
        model=ModelSettings(model_path=str(MODEL), device="cpu"),
        memory=MemorySettings(page_size=PAGE_SIZE),
        disaggregation=DisaggregationSettings(prefill=2, decode=2, conditional_prefill="off"),
        network=NetworkSettings(port=free_port(), fronts=num_fronts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    outcomes: dict[int, list[Outcome]] = {count: [] for count in args.fronts}
    for index in range(args.rounds):
        for count, found in outcomes.items():
            work = partial(measure, args.conversations, args.turns, 1000 * index)
            found.append(serve_while(settings_of(count), as_resolved, work, print))
    table = Table("fronts", "hit rate", "of one front's", "median turn, ms", "fronts' memory, MiB")
    first = statistics.median(each.hit_rate for each in outcomes[args.fronts[0]])
    for count, found in outcomes.items():
        rate = statistics.median(each.hit_rate for each in found)
        turn_ms = statistics.median(each.turn_ms for each in found)
        memory = statistics.median(each.front_mib for each in found)
        table.add_row(str(count), f"{rate:.3f}", f"{rate / first:.3f}", f"{turn_ms:.1f}", f"{memory:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
