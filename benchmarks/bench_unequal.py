"""Unequal numbers of ranks on prefill and decode, served: each way to move the pages, and equal numbers beside it.

    python -m benchmarks.bench_unequal [--quick] [--rounds N] [--shapes P2D1 P1D2 P4D2]
                                       [--paths scatter direct staged auto] [--concurrency 1 4 16 64]
                                       [--at-once 1 16 64 512] [--json FILE]
    python -m benchmarks.bench_unequal --asking 200 [--shapes P2D1 P1D2]

Real processes on models/recall-micro (2 KV heads, float32), pages of 16 tokens, which move by NIXL as between
machines, one compute thread for each rank. Each question is asked about a document of its own, so every prompt moves
whole, and every generated token is a look-up in it: an answer is right or it is not.

    P2D1     two ranks of prefill, one of decode: --prefill-tp-size 2
    P4D2     each KV head of this model twice on prefill; not with --quick
    scatter  a descriptor for each token, head, layer, K and V, as engines without staging write (token_writes.py)
    direct   a descriptor for each page and range of heads: --staging off
    staged   gather, one bulk write, scatter: --staging on
    auto     the rule between the last two: --staging auto
    equal    P2D2, P4D4: the ranks of the wider side on both sides; P1D1 stands beside it

Two loads: *concurrency* c keeps c requests in flight (throughput, and TTFT under it); *at once* sends n prompts at one
moment (TTFT alone; more than 128 to servers of unequal ranks alone). Servers run one at a time and take turns within a
round; the figures are medians over rounds, ratios medians of the ratios within a round, so that other load on the
machine falls on all alike. A server that was not ready in time, or a wrong answer, ends the run.

--asking N: what a staged prompt takes longer than a direct one, where there is little to send: both servers at once,
asked in turn for N prompts of 200 tokens (13 pages), one at a time. control/transfer/staging.py has it as ASKING_BYTES.
Where cores are busy every message waits for one: then the fastest of the prompts say more than the median.

What to expect: --quick takes about 4 minutes on 2 idle cores, a run without it, also of one round, 11. With P1D2 both
ranks of decode read each token together, so its answers cost more than those of P2D1 on few cores, however pages move.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.bench_serve import ROOT, Served, serving
from benchmarks.token_writes import PROGRAM
from deltaserve.commands.client.completion_stream import LENIENT, ServerDialect
from deltaserve.commands.load.load_client import Client, Load
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.report import BenchSummary, distribution, summarize

MODEL = ROOT / "models" / "recall-micro"
SHAPE = DocumentShape(120, 240)
"""600 tokens: 38 pages, 1.2 MiB of KV."""
ANSWER_LEN, SHORT_ANSWER_LEN = 16, 2
PAGE_SIZE, NUM_PAGES = 16, 8192
MAX_RUNNING = 64
MIN_ASKED = 16
"""Requests of a load, in several goes if need be."""
TIMEOUT_S = 300.0
PATHS = {"scatter": "off", "direct": "off", "staged": "on", "auto": "auto"}
"""How pages move |-> --staging."""
SHAPES = {"P2D1": (2, 1), "P1D2": (1, 2), "P4D2": (4, 2)}
"""Unequal numbers of ranks of prefill and decode."""
QUICK_SHAPES = ("P2D1", "P1D2")
MAX_EQUAL_BURST = 128
"""Prompts at once of servers of equal ranks: what they cost beyond is computing, and takes minutes."""
ASKING_LEN, NUM_WARM = 200, 6
STAGED_BYTES_PER_S = 2.5e9
"""Gathered, sent and scattered (bench_staging.py)."""
MIN_RATE, MAX_TTFT, MAX_SMALL = 0.95, 0.5, 1.05
"""Bars: requests per second of equal ranks; TTFT of scatter where most is asked; TTFT of direct where least is."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A server."""

    prefill: int
    decode: int
    path: str

    @property
    def shape(self) -> str:
        return f"P{self.prefill}D{self.decode}"

    def takes(self, workload: "Workload") -> bool:
        return self.path != "equal" or workload.kind != "at once" or workload.number <= MAX_EQUAL_BURST

    def serving(self) -> AbstractContextManager[Served]:
        flags = ["--device", "cpu", "--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), "--num-threads", "1"]
        flags += ["--max-running-requests", str(MAX_RUNNING), "--staging", PATHS.get(self.path, "off")]
        flags += ["--disaggregation-transfer-backend", "nixl"]
        flags += ["--prefill-tp-size", str(self.prefill), "--decode-tp-size", str(self.decode)]
        return serving(MODEL, *flags, program=PROGRAM if self.path == "scatter" else None)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one load on one server."""

    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What a server is asked."""

    kind: str
    """`at once` or `concurrency`."""
    number: int

    @property
    def num_requests(self) -> int:
        return self.number if self.kind == "at once" else max(12, 2 * self.number)

    @property
    def repeats(self) -> int:
        """Repeats of a small load: a few requests say little."""
        return max(1, MIN_ASKED // self.num_requests)

    @property
    def answer_len(self) -> int:
        return SHORT_ANSWER_LEN if self.kind == "at once" else ANSWER_LEN

    @property
    def name(self) -> str:
        return f"{self.number} at once" if self.kind == "at once" else f"c {self.number}"


Found = dict[Variant, dict[Workload, list[Figures]]]
"""By round, and by repeat of it."""


async def ask(served: Served, workload: Workload, seed: int) -> BenchSummary:
    traffic = RecallTraffic(workload.num_requests, 1, num_turns=1, answer_len=workload.answer_len, shape=SHAPE)
    conversations = traffic.generate(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    url = str(served.http.base_url)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
        client = Client(http, ServerDialect(MODEL.name, LENIENT))
        load = Load([0.0] * len(conversations), max_concurrency=workload.number)
        return summarize(await client.measure(conversations, load))


def figures_of(summary: BenchSummary) -> Figures:
    """Raises SystemExit unless everything was answered right."""
    if summary.num_failed or summary.answers_right < summary.num_completed:
        raise SystemExit(f"{summary.num_failed} failed, {summary.answers_right} of {summary.num_completed} right")
    ttft, tpot = summary.latencies_s["ttft"], summary.latencies_s.get("tpot") or distribution([0.0])
    assert tpot is not None
    return Figures(summary.requests_per_s, ttft.p50 * 1e3, ttft.p99 * 1e3, tpot.p50 * 1e3)


def run_server(variant: Variant, workloads: Sequence[Workload], seed: int) -> dict[Workload, list[Figures]]:
    """`workloads`: also those that this server does not take, so that all are asked the same."""
    seeds = itertools.count(seed)  # documents that nobody asked about before
    with variant.serving() as served:
        served.wait_ready()
        asyncio.run(ask(served, Workload("concurrency", 4), next(seeds)))  # warm: endpoints, generated code
        found: dict[Workload, list[Figures]] = {}
        for workload in workloads:
            own = [next(seeds) for _ in range(workload.repeats)]
            if variant.takes(workload):
                found[workload] = [figures_of(asyncio.run(ask(served, workload, one))) for one in own]
        return found


def measure(variants: Sequence[Variant], workloads: Sequence[Workload], rounds: int) -> Found:
    found: Found = {
        variant: {workload: [] for workload in workloads if variant.takes(workload)} for variant in variants
    }
    began = time.monotonic()
    for number in range(rounds):
        for index, variant in enumerate(variants):
            at = f"round {number + 1} of {rounds}, server {index + 1} of {len(variants)}"
            told = f"{time.monotonic() - began:4.0f} s: {at}: {variant.shape} {variant.path}"
            print(told, file=sys.stderr, flush=True)
            for workload, figures in run_server(variant, workloads, seed=1000 * number).items():
                found[variant][workload] += figures
    return found


def ratio(found: Found, top: Variant, bottom: Variant, workload: Workload, of: Callable[[Figures], float]) -> float:
    """Median of the ratios within a round."""
    pairs = zip(found[top][workload], found[bottom][workload], strict=True)
    return statistics.median(of(a) / of(b) for a, b in pairs)


def requests_per_s(figures: Figures) -> float:
    return figures.requests_per_s


def ttft_p50(figures: Figures) -> float:
    return figures.ttft_p50_ms


def show(found: Found, workloads: Sequence[Workload]) -> None:
    print(f"load average {os.getloadavg()[0]:.1f}; all answers right; TTFT p50 / p99 in ms; req/s (TPOT p50, ms)\n")
    print(f"| ranks | path | {' | '.join(workload.name for workload in workloads)} |")
    print("|---|---|" + "---|" * len(workloads))
    for variant, by_workload in found.items():
        cells = (cell(workload, by_workload[workload]) if workload in by_workload else "" for workload in workloads)
        print(f"| {variant.shape} | {variant.path} | {' | '.join(cells)} |")


def cell(workload: Workload, rounds: Sequence[Figures]) -> str:
    rate, p50, p99, tpot = (
        statistics.median(values)
        for values in zip(
            *((f.requests_per_s, f.ttft_p50_ms, f.ttft_p99_ms, f.tpot_p50_ms) for f in rounds), strict=True
        )
    )
    latency = f"{p50:.0f} / {p99:.0f}"
    return latency if workload.kind == "at once" else f"{latency}; {rate:.1f} ({tpot:.1f})"


def bars(found: Found, workloads: Sequence[Workload]) -> list[tuple[str, float, float, bool]]:
    """(what, measured, bar, whether it holds)"""
    out: list[tuple[str, float, float, bool]] = []
    by_name = {(variant.shape, variant.path): variant for variant in found}
    loads = {kind: [w for w in workloads if w.kind == kind] for kind in ("concurrency", "at once")}
    for (shape, path), variant in by_name.items():
        if path in ("equal", "scatter"):
            continue
        wider = max(variant.prefill, variant.decode)
        equal, scatter = by_name.get((f"P{wider}D{wider}", "equal")), by_name.get((shape, "scatter"))
        direct = by_name.get((shape, "direct"))
        for workload in loads["concurrency"] if equal is not None else ():
            assert equal is not None
            value = ratio(found, variant, equal, workload, requests_per_s)
            out.append((f"{shape} {path}: req/s of {equal.shape}, {workload.name}", value, MIN_RATE, value >= MIN_RATE))
        for of_kind in loads.values():
            if of_kind and scatter is not None:
                most = max(of_kind, key=lambda w: w.number)
                value = ratio(found, variant, scatter, most, ttft_p50)
                out.append((f"{shape} {path}: TTFT of scatter, {most.name}", value, MAX_TTFT, value <= MAX_TTFT))
            if of_kind and direct is not None and path != "direct":
                least = min(of_kind, key=lambda w: w.number)
                value = ratio(found, variant, direct, least, ttft_p50)
                out.append((f"{shape} {path}: TTFT of direct, {least.name}", value, MAX_SMALL, value <= MAX_SMALL))
    return out


def show_bars(found: Found, workloads: Sequence[Workload]) -> None:
    print("\n| what | measured | bar | |\n|---|---:|---:|---|")
    for what, value, bar, holds in bars(found, workloads):
        print(f"| {what} | {value:.2f} | {bar:.2f} | {'holds' if holds else '**missed**'} |")


def show_asking(shape: str, num_pairs: int) -> None:
    servers = {path: Variant(*SHAPES[shape], path) for path in ("direct", "staged")}
    taken: dict[str, list[float]] = {path: [] for path in servers}
    prompts = random.Random(1)
    with ExitStack() as stack:
        running = {path: stack.enter_context(variant.serving()) for path, variant in servers.items()}
        for served in running.values():
            served.wait_ready()
        for number in range(NUM_WARM + num_pairs):
            prompt = [prompts.randrange(256) for _ in range(ASKING_LEN)]
            for path in sorted(running, reverse=number % 2 == 1):
                seconds, _ = running[path].ask(MODEL.name, prompt)
                if number >= NUM_WARM:
                    taken[path].append(seconds)
        writes, ahead = (running["staged"].prefill_count(name) for name in ("staged_writes", "staged_ahead"))
    direct, staged = taken["direct"], taken["staged"]
    fastest = [max(1, num_pairs // 20) - 1, max(1, num_pairs // 4) - 1]
    told = {f"fastest {at + 1}": sorted(staged)[at] - sorted(direct)[at] for at in fastest}
    told["median of the pairs"] = statistics.median(a - b for a, b in zip(staged, direct, strict=True))
    print(
        f"\n{shape}, TTFT p50 direct {statistics.median(direct) * 1e3:.1f} ms; memory was there for {ahead} of {writes}"
    )
    for name, seconds in told.items():
        mib = seconds * STAGED_BYTES_PER_S / (1 << 20)
        print(f"  {name}: staged takes {seconds * 1e3:.2f} ms longer, as long as {mib:.1f} MiB take")


def write_json(path: Path, found: Found) -> None:
    told = [
        {"server": asdict(variant), "load": asdict(workload), "rounds": [asdict(figures) for figures in rounds]}
        for variant, by_workload in found.items()
        for workload, rounds in by_workload.items()
    ]
    path.write_text(json.dumps(told, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, all paths, at most 64 at once")
    parser.add_argument("--rounds", type=int, metavar="N", default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="staged by itself is left out but with --quick")
    parser.add_argument("--concurrency", nargs="*", type=int, metavar="C")
    parser.add_argument("--at-once", nargs="*", type=int, metavar="N")
    parser.add_argument("--asking", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure of every round")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.asking:
        for shape in args.shapes or QUICK_SHAPES:
            show_asking(shape, args.asking)
        return
    at_once = ([1, 16, 64] if args.quick else [1, 16, 64, 512]) if args.at_once is None else args.at_once
    concurrency = [1, 8, 64] if args.concurrency is None else args.concurrency
    shapes = args.shapes or (QUICK_SHAPES if args.quick else tuple(SHAPES))
    paths = args.paths or (tuple(PATHS) if args.quick else ("scatter", "direct", "auto"))
    workloads = [Workload("at once", n) for n in at_once] + [Workload("concurrency", c) for c in concurrency]
    variants = [Variant(*SHAPES[shape], path) for shape in shapes for path in paths]
    sizes = sorted({1, *(max(SHAPES[shape]) for shape in shapes)})
    variants += [Variant(size, size, "equal") for size in sizes]
    found = measure(variants, workloads, args.rounds)
    if args.json:
        write_json(args.json, found)
    show(found, workloads)
    show_bars(found, workloads)


if __name__ == "__main__":
    main()
