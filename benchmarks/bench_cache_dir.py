"""Time to the first token of a long prompt by where its pages are: nowhere, in the file under the cache, in the cache.

    python -m benchmarks.bench_cache_dir [--prompt-len 8192] [--prompts 4] [--rounds 3] [--model FOLDER]

Workers whose memory holds one prompt and a half, one unified and a pair, each with and without --cache-dir. Prompts are
asked in turn, so that each evicts the one before it; asked twice in a row, the second time is that of the cache. One
token is drawn; times are those of the client. What was computed is counted by the workers.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import httpx

from benchmarks.bench_e2e import MODEL
from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import (
    DisaggregationSettings,
    MemorySettings,
    ModelSettings,
    NetworkSettings,
    Settings,
)

PAGE = 16
_REPORT_S = 1.5
"""Reports of what workers have computed come twice a second."""


class Figures(NamedTuple):
    """What one server came to: seconds by tier, and tokens computed for each prompt that had been evicted."""

    first: list[float]
    again: list[float]
    """Evicted from the cache: from the file where there is one."""
    cached: list[float]
    computed: float


class Asked(NamedTuple):
    """What a server is asked."""

    prompt_len: int
    num_prompts: int
    rounds: int


def settings_of(model: Path, unified: bool, folder: str | None, prompt_len: int) -> Settings:
    alone = DisaggregationSettings(disaggregation_mode="null")
    return Settings(
        model=ModelSettings(model_path=str(model), device="cpu", context_length=prompt_len + 64),
        memory=MemorySettings(
            page_size=PAGE, num_pages=3 * prompt_len // (2 * PAGE), cache_dir=folder, cache_dir_mib=4096
        ),
        disaggregation=alone if unified else DisaggregationSettings(conditional_prefill="off"),
        network=NetworkSettings(port=free_port()),
    )


def ask(client: httpx.Client, prompt: Sequence[int]) -> float:
    """Seconds until one token has come."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def computed(client: httpx.Client) -> float:
    """Tokens that all workers have computed so far."""
    time.sleep(_REPORT_S)
    workers = client.get("/server_info").raise_for_status().json()["engine"]["workers"]
    return sum(float(worker["status"]["metrics"]["deltaserve_computed_tokens_total"]) for worker in workers)


def measure(asked: Asked, url: str, stopping: Event) -> Figures:
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 4000) for _ in range(asked.prompt_len)] for _ in range(asked.num_prompts)]
    with httpx.Client(base_url=url, timeout=600.0) as client:
        first, cached = [], []
        for prompt in prompts:
            first.append(ask(client, prompt))
            cached.append(ask(client, prompt))
        before = computed(client)
        again = [ask(client, prompt) for _ in range(asked.rounds) for prompt in prompts]
        return Figures(first, again, cached, (computed(client) - before) / len(again))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--folder", default=None, help="folder of the files; by default one for temporary files")
    args = parser.parse_args()
    asked = Asked(args.prompt_len, args.prompts, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for unified in (True, False):
            for where in (None, folder):
                settings = settings_of(args.model, unified, where, asked.prompt_len)
                found = serve_while(settings, as_resolved, partial(measure, asked), print)
                name = f"{'unified' if unified else 'P/D'}, {'with' if where else 'without'} a file"
                first, again, cached = (1e3 * statistics.median(values) for values in found[:3])
                print(
                    f"{name:24} computed {first:8.0f} ms, evicted {again:8.0f} ms ({again / first:.2f}), "
                    f"cached {cached:6.0f} ms; {found.computed:.0f} tokens computed for an evicted prompt",
                    flush=True,
                )


if __name__ == "__main__":
    main()
