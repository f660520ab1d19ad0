"""A model with recurrent states, served: what its cache costs where nothing is shared, and what it saves where much is.

    python -m benchmarks.bench_hybrid [--quick | --rounds N] [--only LOAD ...] [--modes unified P/D] [--json FILE]

Real processes on out/bench-hybrid (`python -m tools.make_bench_model out/bench-hybrid --kind hybrid`: six recurrent
layers, two of attention, a state as heavy as the KV of 804 tokens), pages of 64 tokens, 16 rows, one compute thread a
worker. Where the cache is compared, two servers are up at once, one with --disable-radix-cache, and are asked in turn
for prompts that neither has seen. The figures are medians over the turns, ratios medians of the ratios within a turn.
*CPU* is that of all processes of a server, which other load on the machine hardly moves.

    no-reuse     50 random prompts of 1,280 tokens, 1 token out, in turns of 10; then where the CPU time of both went
    groups       8 groups x 24 prompts, 1,000 shared + 200 own tokens, 4 out, chunk 16,384, shuffled; 1, 5 and all at
                 once (the seed's load, 8 x 128 of 1,000 + 2,744, scaled): how much of the shared tokens the answers
                 say was cached, from each group's second request on
    equal        the same with equal prompts of 1,200 tokens
    rate         10 groups x 6, 1,024 shared + 64 own tokens, 8 out, 5 at a time (10,240 + 256 and 128, scaled); with
                 the cache on 5 at a time run more rows at once, so besides with one row at a time, as they run with it
                 off; and as many a second as there were with it off
    retractions  48 prompts of 64 tokens, 192 out, 16 rows, where the pages hold half of that: as the answers count
                 them, by --num-reserved-decode-tokens (0: no reserve; it adapts from 32 on, from 512 on)

About 10 minutes on 2 idle cores; --quick takes unified servers alone, about 5.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx

from benchmarks import timed_workers
from benchmarks.bench_serve import ROOT, Served, serving
from deltaserve.commands.client.completion_stream import LENIENT, ServerDialect
from deltaserve.commands.load.load_client import Client, Load, Measurement
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.report import BenchSummary, summarize
from deltaserve.commands.load.traffic import ChatTurn, Conversation, TokenRange

MODEL = ROOT / "out" / "bench-hybrid"
TOKENS = TokenRange(300, 16_000)
PAGE_SIZE, NUM_PAGES, MAX_RUNNING, STATES = 64, 1024, 16, 64
FLAGS = ("--device", "cpu", "--num-threads", "1")
ROWS = "--max-running-requests"
POOL = ("--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), "--context-length", "4096")
CACHE_OFF = ("--disable-radix-cache",)
ONE_ROW = (ROWS, "1", "--max-mamba-cache-size", str(STATES))
MODES: dict[str, tuple[str, ...]] = {"unified": ("--disaggregation-mode", "null"), "P/D": ()}
TIMEOUT_S = 600.0
NUM_WARM = 4
MIN_RATE_ALONE, MIN_REUSED, MIN_RATE, MAX_TTFT, MAX_TAIL, MAX_RETRACTED = 0.97, 0.9, 1.34, 0.57, 1.0, 1 / 3
RESERVES = (512, 32, 0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts in groups, in shuffled order."""

    num_groups: int
    num_each: int
    shared_len: int
    own_len: int
    output_len: int

    def generate(self, seed: int) -> tuple[list[int], list[Conversation]]:
        """-> the group of each prompt, and the prompts"""
        rng = Random(f"hybrid {seed}")
        made = []
        for group in range(self.num_groups):
            shared = TOKENS.sample(rng, self.shared_len)
            for _ in range(self.num_each):
                turn = ChatTurn((*shared, *TOKENS.sample(rng, self.own_len)), self.output_len, ())
                made.append((group, Conversation((turn,))))
        rng.shuffle(made)
        return [group for group, _ in made], [conversation for _, conversation in made]


ALONE = Traffic(10, 1, 0, 1280, 1)
NUM_TURNS_ALONE = 5
GROUPS = Traffic(8, 24, 1000, 200, 4)
EQUAL = Traffic(8, 24, 1200, 0, 4)
CONCURRENCIES = (1, 5, GROUPS.num_groups * GROUPS.num_each)
RATE, RATE_CONCURRENCY = Traffic(10, 6, 1024, 64, 8), 5
LONG_ANSWERS = Traffic(48, 1, 0, 64, 192)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of bars."""

    what: str
    measured: float
    bar: float
    holds: bool
    told: str = ""
    """The figures behind it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one server did in one turn."""

    measurement: Measurement
    summary: BenchSummary
    cpu_s: float

    @property
    def cpu_ms(self) -> float:
        return 1e3 * self.cpu_s / self.summary.num_completed


def ask(served: Served, conversations: Sequence[Conversation], concurrency: int, interval_s: float = 0.0) -> Turn:
    """`interval_s`: between their starts. Raises SystemExit if a request fails."""

    async def send() -> Measurement:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = str(served.http.base_url)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
            client = Client(http, ServerDialect(MODEL.name, {**LENIENT, "timings": True}))
            return await client.measure(
                conversations, Load([number * interval_s for number in range(len(conversations))], concurrency)
            )

    before = served.cpu_s()
    measurement = asyncio.run(send())
    summary = summarize(measurement)
    if summary.num_failed:
        raise SystemExit(next(record.error for record in measurement.records if record.error is not None))
    return Turn(measurement, summary, served.cpu_s() - before)


@contextmanager
def servers(*flags: Sequence[str], program: Sequence[str] | None = None) -> Iterator[list[Served]]:
    """Servers of the model, ready and warm, up together."""
    with ExitStack() as stack:
        rows = [() if ROWS in some else (ROWS, str(MAX_RUNNING)) for some in flags]
        lines = [(*FLAGS, *of_rows, *some) for of_rows, some in zip(rows, flags, strict=True)]
        found = [stack.enter_context(serving(MODEL, *line, program=program)) for line in lines]
        for served in found:
            served.wait_ready()
            ask(served, Traffic(NUM_WARM, 2, 100, 28, 4).generate(-1)[1], NUM_WARM)
        yield found


def medians(turns: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    return statistics.median(map(of, turns))


def ratio(top: Sequence[Turn], bottom: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    """Median of the ratios within a turn."""
    return statistics.median(of(a) / of(b) for a, b in zip(top, bottom, strict=True))


def in_turns(
    both: Sequence[Served], traffic: Traffic, num_turns: int, seed: int, concurrency: int
) -> tuple[list[Turn], list[Turn]]:
    """The same prompts to both servers, one after the other; who is first alternates."""
    found: tuple[list[Turn], list[Turn]] = ([], [])
    for number in range(num_turns):
        _, conversations = traffic.generate(seed + number)
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            found[index].append(ask(both[index], conversations, concurrency))
    return found


def rate_of(turn: Turn) -> float:
    return turn.summary.requests_per_s


def cpu_of(turn: Turn) -> float:
    return turn.cpu_ms


def ttft_of(turn: Turn) -> float:
    return turn.summary.latencies_s["ttft"].mean


def ttft_p99_of(turn: Turn) -> float:
    return turn.summary.latencies_s["ttft"].p99


def max_itl_of(turn: Turn) -> float:
    return turn.summary.latencies_s["itl"].max


# ---------------------------------------------------------------- loads


def no_reuse(mode: str, rounds: int) -> Iterator[Row]:
    num_turns = NUM_TURNS_ALONE * rounds
    with servers((*MODES[mode], *POOL), (*MODES[mode], *POOL, *CACHE_OFF)) as both:
        on, off = in_turns(both, ALONE, num_turns, 1000, ALONE.num_groups)
    value, cpu = ratio(on, off, rate_of), ratio(on, off, cpu_of)
    told = f"{medians(on, rate_of):.2f} / {medians(off, rate_of):.2f} req/s"
    yield Row(f"{mode}: req/s over cache off", value, MIN_RATE_ALONE, value >= MIN_RATE_ALONE, told)
    told = f"{medians(on, cpu_of):.0f} / {medians(off, cpu_of):.0f} ms a request"
    yield Row(f"{mode}: CPU over cache off", cpu, 1 / MIN_RATE_ALONE, cpu <= 1 / MIN_RATE_ALONE, told)


Profile = Mapping[str, tuple[Counter[str], Counter[str]]]
"""Role |-> what its worker counted a request, cache on and off."""


def profile(mode: str, num_turns: int) -> Profile:
    """Servers that count: each slower by that, so apart from those whose rates are told."""
    with TemporaryDirectory() as name:
        folders = [Path(name) / "on", Path(name) / "off"]
        with ExitStack() as stack:
            both = []
            for folder, more in zip(folders, ((), CACHE_OFF), strict=True):
                folder.mkdir()
                os.environ[timed_workers.FOLDER] = str(folder)
                flags = (*MODES[mode], *POOL, *more)
                both += stack.enter_context(servers(flags, program=timed_workers.PROGRAM))
            before = [timed_workers.told_times(folder) for folder in folders]
            in_turns(both, ALONE, num_turns, 2000, ALONE.num_groups)
            after = [timed_workers.told_times(folder) for folder in folders]
    num_requests = num_turns * ALONE.num_groups
    counted: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for role in after[0]:
        on, off = (
            Counter({label: (late[role][label] - early[role][label]) / num_requests for label in late[role]})
            for early, late in zip(before, after, strict=True)
        )
        counted[role] = on, off
    return counted


def show_profile(mode: str, counted: Profile) -> None:
    for role, (on, off) in counted.items():
        steps = (f"{c[timed_workers.STEPS]:.2f} steps, {c[timed_workers.EXTENDS]:.2f} chunks" for c in (on, off))
        print(f"\n{mode}, {role}: {' and '.join(steps)} a request\n")
        print("| CPU time a request, ms | on | off | more |\n|---|---:|---:|---:|")
        rest = [c[timed_workers.ALL] - sum(c[label] for label in timed_workers.SITES) for c in (on, off)]
        rows = [(label, on[label], off[label]) for label in timed_workers.SITES]
        rows += [("links, loop, transfers, all else", rest[0], rest[1])]
        rows += [("**all**", on[timed_workers.ALL], off[timed_workers.ALL])]
        for label, a, b in rows:
            print(f"| {label} | {1e3 * a:.2f} | {1e3 * b:.2f} | {1e3 * (a - b):+.2f} |")


def computed_before(record: RequestRecord) -> int:
    """Tokens of its prompt that were cached where the rest was computed: on prefill, where there is one."""
    assert record.usage is not None
    timings = record.usage["timings"][0]
    is_moved = timings["transferred_state_bytes"] > 0
    return int(timings["prefill_cached_tokens"]) if is_moved else record.cached_len or 0


def reused(turn: Turn, groups: Sequence[int], shared_len: int) -> float:
    """Share of the shared tokens that needed no computation, of each group's requests but the one sent first."""
    seen: set[int] = set()
    total = found = 0
    for record in sorted(turn.measurement.records, key=lambda r: r.sent_s):
        if groups[record.conversation] in seen:
            total += shared_len
            found += min(shared_len, computed_before(record))
        seen.add(groups[record.conversation])
    return found / total


def shared_prefixes(mode: str, traffic: Traffic, name: str) -> Iterator[Row]:
    """A server of its own for each concurrency: nothing is cached before."""
    for concurrency in CONCURRENCIES:
        with servers((*MODES[mode], *POOL, "--chunked-prefill-size", "16384")) as (served,):
            groups, conversations = traffic.generate(3000)
            turn = ask(served, conversations, concurrency)
        value = reused(turn, groups, traffic.shared_len)
        at = "all at once" if concurrency == len(groups) else f"{concurrency} at a time"
        told = f"{rate_of(turn):.1f} req/s, TTFT p50 {1e3 * turn.summary.latencies_s['ttft'].p50:.0f} ms"
        yield Row(f"{mode}: {name}, {at}: shared tokens reused", value, MIN_REUSED, value >= MIN_REUSED, told)


def _rate_turns(cached: Served, plain: Served, single: Served, seed: int) -> tuple[Turn, Turn, Turn, Turn]:
    """Cache on, off, on with one row at a time, on at the rate of off: close together, so that load befalls all."""
    (_, first), (_, second) = RATE.generate(seed), RATE.generate(seed + 500)
    on, off = ask(cached, first, RATE_CONCURRENCY), ask(plain, first, RATE_CONCURRENCY)
    alone = ask(single, first, RATE_CONCURRENCY)
    return on, off, alone, ask(cached, second, RATE_CONCURRENCY, 1 / rate_of(off))


def rates(mode: str, rounds: int) -> Iterator[Row]:
    flags = (*MODES[mode], *POOL)
    with servers(flags, (*flags, *CACHE_OFF), (*flags, *ONE_ROW)) as (cached, plain, single):
        made = [_rate_turns(cached, plain, single, 4000 + number) for number in range(2 * rounds)]
    on, off, alone, paced = zip(*made, strict=True)
    value = ratio(on, off, rate_of)
    told = f"{medians(on, rate_of):.2f} / {medians(off, rate_of):.2f} req/s"
    yield Row(f"{mode}: req/s over cache off", value, MIN_RATE, value >= MIN_RATE, told)
    value = ratio(alone, off, rate_of)
    told = f"{medians(alone, rate_of):.2f} / {medians(off, rate_of):.2f} req/s"
    yield Row(f"{mode}: one row at a time: req/s over cache off", value, MIN_RATE, value >= MIN_RATE, told)
    for name, turns, of, bar in (
        ("mean TTFT", on, ttft_of, MAX_TTFT),
        ("p99 TTFT", on, ttft_p99_of, MAX_TAIL),
        ("maximum ITL", on, max_itl_of, MAX_TAIL),
        ("one row at a time: mean TTFT", alone, ttft_of, MAX_TTFT),
        ("one row at a time: p99 TTFT", alone, ttft_p99_of, MAX_TAIL),
        ("one row at a time: maximum ITL", alone, max_itl_of, MAX_TAIL),
        ("at its rate: p99 TTFT", paced, ttft_p99_of, MAX_TAIL),
        ("at its rate: maximum ITL", paced, max_itl_of, MAX_TAIL),
    ):
        value = ratio(turns, off, of)
        told = f"{1e3 * medians(turns, of):.0f} / {1e3 * medians(off, of):.0f} ms"
        yield Row(f"{mode}: {name} over cache off", value, bar, value <= bar, told)


def retractions(mode: str, rounds: int) -> Iterator[Row]:
    """Small pages, as many as half of the rows need in the end; states for all."""
    pool = ("--page-size", "16", "--num-pages", "136", "--max-mamba-cache-size", str(3 * MAX_RUNNING))
    counted: dict[int, list[float]] = {reserve: [] for reserve in RESERVES}
    seconds: dict[int, list[float]] = {reserve: [] for reserve in RESERVES}
    for number in range(rounds):
        for reserve in RESERVES:
            flags = (*MODES[mode], *pool, "--num-reserved-decode-tokens", str(reserve), "--context-length", "512")
            with servers(flags) as (served,):
                turn = ask(served, LONG_ANSWERS.generate(5000 + number)[1], LONG_ANSWERS.num_groups)
            usages = [record.usage or {} for record in turn.measurement.records]
            counted[reserve].append(sum(usage["timings"][0]["num_retractions"] for usage in usages))
            seconds[reserve].append(turn.summary.duration_s)
    none, none_s = statistics.median(counted[0]), statistics.median(seconds[0])
    for reserve in RESERVES[:-1]:
        found, found_s = statistics.median(counted[reserve]), statistics.median(seconds[reserve])
        value = found / max(1.0, none)
        told = f"{found:.0f} / {none:.0f}, in {found_s:.1f} / {none_s:.1f} s"
        holds = value <= MAX_RETRACTED and none > 0
        yield Row(f"{mode}: retractions, reserve of {reserve} over 0", value, MAX_RETRACTED, holds, told)


LOADS = ("no-reuse", "groups", "equal", "rate", "retractions")


def measure(load: str, mode: str, rounds: int) -> Iterator[Row]:
    match load:
        case "no-reuse":
            yield from no_reuse(mode, rounds)
        case "groups":
            yield from shared_prefixes(mode, GROUPS, "groups")
        case "equal":
            yield from shared_prefixes(mode, EQUAL, "equal prompts")
        case "rate":
            yield from rates(mode, rounds)
        case "retractions":
            yield from retractions(mode, rounds)


def show(rows: Sequence[Row]) -> None:
    print(f"\nload average {os.getloadavg()[0]:.1f}\n")
    print("| what | measured | bar | | figures |\n|---|---:|---:|---|---|")
    for row in rows:
        verdict = "holds" if row.holds else "**missed**"
        print(f"| {row.what} | {row.measured:.3f} | {row.bar:.2f} | {verdict} | {row.told} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="unified servers alone")
    parser.add_argument("--rounds", type=int, metavar="N", default=1)
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=" ".join(LOADS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="by default both, with --quick unified")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not MODEL.is_dir():
        made = MODEL.relative_to(ROOT)
        raise SystemExit(f"{made} is missing: python -m tools.make_bench_model {made} --kind hybrid")
    modes = args.modes or (["unified"] if args.quick else list(MODES))
    began, rows, profiles = time.monotonic(), [], {}
    for load in args.only:
        for mode in modes:
            print(f"{time.monotonic() - began:4.0f} s: {load}, {mode}", file=sys.stderr, flush=True)
            for row in measure(load, mode, args.rounds):
                print(f"       {row.what}: {row.measured:.3f} ({row.told})", file=sys.stderr, flush=True)
                rows.append(row)
            if load == "no-reuse":
                profiles[mode] = profile(mode, num_turns=2 * args.rounds)
    show(rows)
    for mode, counted in profiles.items():
        show_profile(mode, counted)
    if args.json:
        args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "profiles": profiles}, indent=1) + "\n")


if __name__ == "__main__":
    main()
