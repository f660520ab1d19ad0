"""What clients that leave cost the others, over NIXL and over Mooncake.

    python -m benchmarks.bench_cancel [--seconds 20] [--rounds 3]

One prefill and one decode worker of models/recall-micro. Four clients ask for 4 tokens after 512 new ones, one request
after the other; beside them two clients (or none) send 1,500 tokens and hang up at a random moment within 0.3 s. Runs
of all four variants alternate; medians over rounds.
"""

import argparse
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

import httpx

from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import DisaggregationSettings, ModelSettings, NetworkSettings, Settings

MODEL = Path(__file__).resolve().parent.parent / "models" / "recall-micro"
ASKERS, ASKED_LEN, LEAVING_LEN, MOST_S = 4, 512, 1500, 0.3
FIGURES = ("p50 ms", "p99 ms", "answers", "failed", "left", "fences' attempts")


@dataclass(frozen=True, slots=True)
class Variant:
    backend: Literal["nixl", "mooncake"]
    leavers: int

    def settings(self) -> Settings:
        return Settings(
            model=ModelSettings(model_path=str(MODEL), device="cpu"),
            disaggregation=DisaggregationSettings(
                disaggregation_transfer_backend=self.backend, verify="crc", conditional_prefill="off"
            ),
            network=NetworkSettings(port=free_port()),
        )


def body(draw: random.Random, length: int, stream: bool) -> dict[str, object]:
    prompt = [draw.randrange(10, 250) for _ in range(length)]
    return {"model": "recall-micro", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream}


def ask(url: str, seed: int, until: float) -> tuple[list[float], int]:
    """Seconds of each answer, and how many requests failed."""
    draw, took, failed = random.Random(seed), [], 0
    with httpx.Client(timeout=60.0) as client:
        while time.monotonic() < until:
            began = time.perf_counter()
            reply = client.post(f"{url}/v1/completions", json=body(draw, ASKED_LEN, stream=False))
            failed += reply.status_code != 200
            took.append(time.perf_counter() - began)
    return took, failed


def leave(url: str, seed: int, until: float) -> int:
    """How many requests were left."""
    draw, left = random.Random(seed), 0
    while time.monotonic() < until:
        timeout = httpx.Timeout(60.0, read=draw.uniform(0.0, MOST_S))
        try:
            request = body(draw, LEAVING_LEN, stream=True)
            with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=timeout) as reply:
                for _ in reply.iter_lines():
                    pass
        except httpx.ReadTimeout:
            left += 1
    return left


def run(variant: Variant, seconds: float, seed: int) -> list[float]:
    """FIGURES of one server."""
    out: list[float] = []

    def work(url: str, stopping: Event) -> int:
        ask(url, seed, time.monotonic() + 2.0)  # warm
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(ASKERS + variant.leavers) as pool:
            askers = [pool.submit(ask, url, seed + i + 1, until) for i in range(ASKERS)]
            leavers = [pool.submit(leave, url, seed + i + 100, until) for i in range(variant.leavers)]
            answers = [asker.result() for asker in askers]
            left = sum(leaver.result() for leaver in leavers)
        took = sorted(second for seconds_of, _ in answers for second in seconds_of)
        counts = httpx.get(f"{url}/server_info").json()["engine"]["counts"]
        p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
        failed = sum(failures for _, failures in answers)
        out.extend([p50 * 1e3, p99 * 1e3, len(took), failed, left, counts.get("retried_fenced", 0)])
        return 0

    def same(spec: WorkerSpec) -> WorkerSpec:
        return spec

    if serve_while(variant.settings(), same, work, lambda text: None) != 0:
        raise SystemExit(f"{variant}: no figures")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    variants = [Variant("nixl", 0), Variant("nixl", 2), Variant("mooncake", 0), Variant("mooncake", 2)]
    found: dict[Variant, list[list[float]]] = {variant: [] for variant in variants}
    for turn in range(args.rounds):
        for variant in variants:
            found[variant].append(run(variant, args.seconds, seed=1000 * turn))
    print(f"| transport | clients that leave | {' | '.join(FIGURES)} |")
    print("|---|---:|" + "---:|" * len(FIGURES))
    for variant, runs in found.items():
        medians = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {variant.backend} | {variant.leavers} | {' | '.join(f'{value:.0f}' for value in medians)} |")


if __name__ == "__main__":
    main()
