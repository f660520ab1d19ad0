"""Conversations on decode workers that share experts: do they stay on the member that has their prefix?

    python -m benchmarks.bench_expert_groups [--members N] [--conversations N] [--turns N] [--apart]
    python -m benchmarks.bench_expert_groups --exchange [--members N]

A real server: one prefill worker and N decode workers of one expert group (`--dp-size N --enable-dp-attention`), of
models/recall-micro with its feed-forward layers cut into experts (tools/recall/experts.py). All conversations at once,
each about a document of its own; a turn asks when the one before it is answered. Every token of an answer is a
look-up in the document, so an answer is right or it is not. Counted are later turns by how much of what was said before
was on the decode worker: at least 90 %, of the whole pages of it. --apart: N decode workers that share nothing, for
comparison. A wrong answer ends the run.

--exchange: what it takes to carry rows between members, of which each layer of experts needs two: N processes, which
compute nothing, send each other so many rows of 2,048 numbers of 16 bits. Median and fastest tenth.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Queue, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from benchmarks.bench_serve import ROOT, serving
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.traffic import Conversation
from deltaserve.compute.collective.expert_group import ExpertMesh
from deltaserve.core.layout.shard import Shard
from tools.recall.experts import with_experts

SHAPE = DocumentShape(100, 100)
ANSWER_LEN, PAGE_SIZE, NUM_PAGES = 16, 16, 8192
GOOD = 0.9
TIMEOUT_S = 300.0
HIDDEN, NUM_EXCHANGES = 2048, 400


@dataclass(frozen=True, slots=True)
class LaterTurn:
    """Tokens said before it, and those of them that the decode worker had."""

    known: int
    found: int
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.found >= GOOD * (self.known // PAGE_SIZE * PAGE_SIZE)


def talk(http: httpx.Client, conversation: Conversation) -> list[LaterTurn]:
    """Raises RuntimeError for a wrong answer."""
    text: list[int] = []
    turns: list[LaterTurn] = []
    for turn in conversation.turns:
        known, start = len(text), time.perf_counter()
        text += turn.tokens
        body = {"model": "experts", "prompt": text, "max_tokens": ANSWER_LEN, "temperature": 0}
        extra = {"ignore_eos": True, "timings": True, "return_token_ids": True}
        reply: dict[str, Any] = http.post("/v1/completions", json={**body, **extra}).raise_for_status().json()
        answer = reply["choices"][0]["token_ids"]
        if answer != list(turn.expected or ()):
            raise RuntimeError(f"a wrong answer: {answer}, not {turn.expected}")
        found = reply["usage"]["timings"][0]["decode_cached_tokens"]
        turns += [LaterTurn(known, found, time.perf_counter() - start)] if known else []
        text += answer
    return turns


def measure(folder: Path, members: int, is_apart: bool, conversations: Sequence[Conversation]) -> None:
    group = ["--decode", str(members)] if is_apart else ["--dp-size", str(members), "--enable-dp-attention"]
    sizes = ["--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), "--max-running-requests", "64"]
    with serving(folder, *group, *sizes) as served:
        http = served.http
        http.timeout = TIMEOUT_S
        while not is_ready(http):
            time.sleep(0.1)
        start = time.perf_counter()
        with ThreadPoolExecutor(len(conversations)) as pool:
            turns = [turn for some in pool.map(lambda one: talk(http, one), conversations) for turn in some]
        seconds = time.perf_counter() - start
        time.sleep(1.5)  # workers report twice a second
        workers = http.get("/server_info").json()["engine"]["workers"]
    steps = Counter({w["name"]: w["status"]["metrics"]["deltaserve_steps_total"] for w in workers})
    num_good = sum(turn.is_good for turn in turns)
    share = sum(turn.found for turn in turns) / sum(turn.known for turn in turns)
    kind = "share nothing" if is_apart else "share experts"
    print(f"{members} decode workers that {kind}; load average {os.getloadavg()[0]:.2f}")
    print(f"{len(conversations)} conversations, {len(turns)} later turns, every answer right, {seconds:.1f} s")
    print(f"at least {GOOD:.0%} of the prefix on decode: {num_good} of {len(turns)} ({num_good / len(turns):.1%})")
    print(f"of all tokens said before: {share:.1%}")
    print("steps: " + ", ".join(f"{name} {count:.0f}" for name, count in sorted(steps.items())))


def exchange(member: Shard, folder: Path, rows: int, told: "Queue[list[float]]") -> None:
    mesh = ExpertMesh.join(member, folder / f"rows-{rows}", TIMEOUT_S)
    parts = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)] * member.size
    taken = []
    for _ in range(NUM_EXCHANGES):
        start = time.perf_counter()
        mesh.all_to_all(parts)
        taken.append(time.perf_counter() - start)
    if member.rank == 0:
        told.put(taken)
    mesh.wait_for_all()


def measure_exchange(members: int) -> None:
    context = get_context("spawn")
    print(f"{members} members; load average {os.getloadavg()[0]:.2f}; us of an exchange, median and fastest tenth")
    with TemporaryDirectory() as folder:
        for rows in (0, 1, 16, 64, 512):
            told: Queue[list[float]] = context.Queue()
            processes = [
                context.Process(target=exchange, args=(Shard(rank, members), Path(folder), rows, told))
                for rank in range(members)
            ]
            for process in processes:
                process.start()
            taken = sorted(told.get())
            for process in processes:
                process.join()
            print(f"{rows:4} rows: {taken[len(taken) // 2] * 1e6:8.0f} {taken[len(taken) // 10] * 1e6:8.0f}")


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--exchange", action="store_true")
    asked = parser.parse_args()
    if asked.exchange:
        return measure_exchange(asked.members)
    traffic = RecallTraffic(asked.conversations, 1, asked.turns, ANSWER_LEN, SHAPE)
    with TemporaryDirectory() as folder:
        model = with_experts(ROOT / "models" / "recall-micro", Path(folder) / "experts")
        measure(model, asked.members, asked.apart, traffic.generate(seed=1))


if __name__ == "__main__":
    main()
