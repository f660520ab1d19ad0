"""The public result tables of decode's radix cache, at scale, on a decode pool that is full without it.

    python -m benchmarks.bench_seed [--quick] [--only shared-documents|drawn-lengths] [--prefill 3,2,1] [--json FILE]

Two loads, scaled to models/recall-micro, on real processes (those of `deltaserve serve`), 128 requests at a time:

    shared-documents  the table of SGLang's pull request 19746: 3 prefill workers and 1 decode worker, 20 prefixes x 50
                      requests (50,000 + 4,500 tokens in, 355 out), decode's pool as large as 37 private copies. Rows:
                      decode's cache off; on; on with the batch capped at half of the peak seen before; on with other
                      numbers of prefill workers (--prefill; the most of them serve the first rows)
    drawn-lengths     the table of SGLang's pull request 22234: 1 prefill and 1 decode worker, 80 prefixes x 8 requests
                      (7,000 + 1,000 in, 1,000 out, each length drawn from half of it up). Rows: decode's cache off; on.
                      The pull request does not tell the pool; by its times without the cache 78 of 128 requests ran at
                      once, so it is as large as 78 private copies

A prompt is a document of facts, one to three earlier questions with their answers (the request's own part) and a
question whose answer is known: every answer is checked, and a wrong one fails the run. Lengths are such that this
model can recall (contexts below 768 tokens): 600 + 34 in, 48 out on average, and 330 + 34, 48. All rows of a table get
the same requests, with the same output lengths; with the default seed the model alone answers all 1,640 rightly. Decode
must be the slowest part, as in public: so the model gets 16 times as many attention heads (--heads), the new ones all
zeros, which change no answer; and the events of a stream carry 8 tokens.

*Running* and *usage* (pages neither free nor evictable) are what decode reports ten times a second, between the first
and the last 128 answers. TTFT and ITL are the client's; in brackets the server's own, read from the histograms of
/metrics, and so only as fine as their buckets.
*CPU* is the time of client, front, prefill and decode for a request, which other load on the machine moves least.
*Held*: what the workers still hold after the last answer; must be 0.
The exit code is 1 when a request failed, an answer was wrong or something stayed held.

About 15 minutes on 2 idle cores; --quick, a small load of the same form with 1 prefill worker, under one.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event

import httpx
import msgspec
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.serve_while import serve_while
from deltaserve.commands.client.completion_stream import LENIENT, ServerDialect
from deltaserve.commands.load.load_client import Client, Load, Measurement
from deltaserve.commands.load.recall import ASK, Document, DocumentShape, RecallTraffic, expected_chain, make_document
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.report import MAX_LAG_S, BenchSummary, Distribution, distribution, summarize
from deltaserve.commands.load.traffic import ChatTurn, Conversation
from deltaserve.compute.native.native_library import NativeLibrary, NativeUnavailable
from deltaserve.core.ids import Role
from deltaserve.launch.compose import free_port
from deltaserve.process.children.interrupts import EXIT_INTERRUPTED
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import (
    DisaggregationSettings,
    MemorySettings,
    ModelSettings,
    NetworkSettings,
    SchedulingSettings,
    Settings,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE_SIZE = 16
CONTEXT_LEN = 1024
HEARTBEAT_S = 0.1
TIMEOUT_S = 600.0
SETTLED_WITHIN_S = 30.0
DECODE = "decode-0"
CLIENT = "client"
PARTS = (CLIENT, "front", "prefill", "decode")
STREAM_INTERVAL = 8
"""Tokens of an event: with one each, front and client would take more of two cores than decode."""
EARLIER_LEN = 16
"""Tokens of an earlier question and its answer."""
SHARED_DOCUMENTS, DRAWN_LENGTHS = "shared-documents", "drawn-lengths"


# ---------------------------------------------------------------- loads


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths drawn evenly from `[least, most]`."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.least, self.most)

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2


@dataclass(frozen=True, slots=True)
class SeedLoad:
    """The form of a public benchmark's traffic. Lengths in tokens."""

    name: str
    num_documents: int
    requests_per_document: int
    document_len: Span
    num_earlier: Span
    """Earlier questions with their answers in a prompt."""
    output_len: Span
    concurrency: int
    num_copies: int
    """Decode's pool, in requests that share nothing."""
    seed: int

    @property
    def num_requests(self) -> int:
        return self.num_documents * self.requests_per_document

    @property
    def decode_pages(self) -> int:
        longest = self.document_len.mean + EARLIER_LEN * self.num_earlier.mean + 2 + self.output_len.mean
        return self.num_copies * -(-int(longest) // PAGE_SIZE)

    @property
    def prefill_pages(self) -> int:
        """Enough for every document and all requests at a time: this benchmark is about decode's pool."""
        own_len = EARLIER_LEN * self.num_earlier.most + 2
        tokens = self.num_documents * self.document_len.most + self.concurrency * own_len
        return 5 * tokens // (4 * PAGE_SIZE)

    def generate(self) -> list[Conversation]:
        """In shuffled order."""
        rng = Random(f"{self.name} {self.seed}")
        documents = [make_document(rng, _shape(self.document_len.draw(rng))) for _ in range(self.num_documents)]
        conversations = [
            self._conversation(rng, document) for document in documents for _ in range(self.requests_per_document)
        ]
        rng.shuffle(conversations)
        return conversations

    def _conversation(self, rng: Random, document: Document) -> Conversation:
        names = list(document.successor)
        tokens = list(document.tokens)
        for start in rng.choices(names, k=self.num_earlier.draw(rng)):
            tokens += [ASK, start, *expected_chain(document, start, EARLIER_LEN - 2)]
        start = rng.choice(names)
        answer = expected_chain(document, start, self.output_len.draw(rng))
        return Conversation((ChatTurn((*tokens, ASK, start), len(answer), answer, expected=answer),))


def _shape(length: int) -> DocumentShape:
    """A fifth as many facts as tokens, the rest noise: what the model was trained for."""
    num_facts = length // 5
    return DocumentShape(num_facts, length - 3 * num_facts)


EARLIER = Span(1, 3)
FULL = (
    SeedLoad(SHARED_DOCUMENTS, 20, 50, Span(600, 600), EARLIER, Span(24, 72), concurrency=128, num_copies=37, seed=1),
    SeedLoad(DRAWN_LENGTHS, 80, 8, Span(220, 440), EARLIER, Span(32, 64), concurrency=128, num_copies=78, seed=1),
)
QUICK = (
    SeedLoad(SHARED_DOCUMENTS, 4, 16, Span(300, 300), EARLIER, Span(12, 36), concurrency=16, num_copies=5, seed=1),
    SeedLoad(DRAWN_LENGTHS, 10, 6, Span(110, 220), EARLIER, Span(16, 32), concurrency=16, num_copies=10, seed=1),
)


# ---------------------------------------------------------------- the model


def widen(model: Path, times: int, folder: Path) -> Path:
    """A copy of a Qwen3 checkpoint with `times` as many heads, the new ones all zeros: dearer, with the same answers.

    They are added in whole groups after the others, so that each of these keeps its KV head.
    """
    wide = folder / model.name
    shutil.copytree(model, wide)
    config = json.loads((wide / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise SystemExit(f"--heads: {model} is no Qwen3")
    for name in ("num_attention_heads", "num_key_value_heads"):
        config[name] *= times
    (wide / "config.json").write_text(json.dumps(config))
    weights = load_file(wide / "model.safetensors")
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):  # [heads * head_dim, hidden]
            weights[name] = torch.cat([weight, weight.new_zeros((times - 1) * weight.shape[0], weight.shape[1])])
        elif kind == "o_proj":  # [hidden, heads * head_dim]
            zeros = weight.new_zeros(weight.shape[0], (times - 1) * weight.shape[1])
            weights[name] = torch.cat([weight, zeros], dim=1).contiguous()
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    return wide


# ---------------------------------------------------------------- what the server tells


@dataclass(frozen=True, slots=True)
class Sight:
    """One report of decode's, and how many answers were complete then."""

    num_done: int
    num_running: float
    usage: float


@dataclass(slots=True)
class Watch:
    """Looks at decode while a load runs."""

    num_done: int = 0
    sights: list[Sight] = field(default_factory=list)

    async def keep_looking(self, http: httpx.AsyncClient) -> None:
        """Until cancelled. A server that goes away is seen by the requests themselves."""
        while True:
            with suppress(httpx.HTTPError):
                values = (await worker_metrics(http)).get(DECODE, {})
                if values:
                    running, usage = values["deltaserve_num_running_reqs"], values['deltaserve_pages_usage{pool="0"}']
                    self.sights.append(Sight(self.num_done, running, usage))
            await asyncio.sleep(HEARTBEAT_S)

    def steady(self, load: SeedLoad) -> list[Sight]:
        """Without the first and the last answers, which meet a batch that fills or empties; all if nothing is left."""
        within = range(load.concurrency, load.num_requests - load.concurrency + 1)
        return [sight for sight in self.sights if sight.num_done in within] or self.sights


async def worker_metrics(http: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """Worker |-> name |-> value, as of its last report."""
    info = (await http.get("/server_info")).raise_for_status().json()
    workers = info["engine"]["workers"]
    return {worker["name"]: (worker["status"] or {}).get("metrics", {}) for worker in workers}


async def num_held(http: httpx.AsyncClient) -> int:
    """What stays with the workers for requests that are over: pages, leases, tickets, places in queue and batch."""
    await asyncio.sleep(3 * HEARTBEAT_S)  # a report made before the last answer ended must not count
    held = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while held := _held(await worker_metrics(http)):
                await asyncio.sleep(HEARTBEAT_S)
    return held


def _held(metrics: dict[str, dict[str, float]]) -> int:
    kinds = ("leases", "num_running_reqs", "num_queue_reqs", "tickets_open", "pages_protected")
    names = tuple(f"deltaserve_{kind}" for kind in kinds)
    states = ('state="granted"', 'state="owned"', 'state="quarantined"')
    every = (item for values in metrics.values() for item in values.items())
    return int(sum(value for key, value in every if key.startswith(names) or any(state in key for state in states)))


def cpu_seconds() -> dict[str, float]:
    """By front, prefill and decode, as their own processes; client: this one, with the supervisor's little part."""
    taken = {CLIENT: sum(psutil.Process().cpu_times()[:2])}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            name = Path(child.cmdline()[-1]).stem.partition("-")[0]  # prefill-0.json
            taken[name] = taken.get(name, 0.0) + sum(child.cpu_times()[:2])
    return taken


Histogram = dict[float, float]
"""Upper bound |-> how many values up to it."""


async def read_histogram(http: httpx.AsyncClient, name: str) -> Histogram:
    text = (await http.get("/metrics")).raise_for_status().text
    families = (family for family in text_string_to_metric_families(text) if family.name == name)
    samples = (sample for family in families for sample in family.samples if sample.name == f"{name}_bucket")
    return {float(sample.labels["le"]): sample.value for sample in samples}


def quantile(before: Histogram, after: Histogram, share: float) -> float | None:
    """Quantile of the values that came between; evenly spread within a bucket. None: there were none, or it is in
    the last."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted = share * max(counts.values(), default=0.0)
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if wanted and count >= wanted:
            return None if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return None


# ---------------------------------------------------------------- one row


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve a load."""

    num_prefill: int
    decode_cache: bool
    max_running: int
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.num_prefill}P1D, cache {'on' if self.decode_cache else 'off'}{self.note}"

    def settings(self, load: SeedLoad, model: Path) -> Settings:
        return Settings(
            model=ModelSettings(model_path=str(model), device="cpu", context_length=CONTEXT_LEN),
            memory=MemorySettings(
                page_size=PAGE_SIZE,
                num_pages=load.prefill_pages,
                disable_decode_radix_cache=not self.decode_cache,
            ),
            scheduling=SchedulingSettings(
                max_running_requests=load.concurrency,
                num_reserved_decode_tokens=int(load.output_len.mean),
                stream_interval=STREAM_INTERVAL,
            ),
            disaggregation=DisaggregationSettings(prefill=self.num_prefill, conditional_prefill="off"),
            network=NetworkSettings(port=free_port()),
        )

    def adjust(self, load: SeedLoad, spec: WorkerSpec) -> WorkerSpec:
        """Decode alone has the pool and the cap in question; all tell their load often, for the figures."""
        options = msgspec.structs.replace(spec.options, heartbeat_s=HEARTBEAT_S)
        if spec.role is not Role.DECODE:
            return msgspec.structs.replace(spec, options=options)
        return msgspec.structs.replace(
            spec, options=options, num_pages=(load.decode_pages,), max_running_requests=self.max_running
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one variant under one load. Times in seconds."""

    load: str
    variant: Variant
    summary: BenchSummary
    running: Distribution
    """Rows in decode's batch while the load is steady, as is the next."""
    usage: Distribution
    running_peak: int
    server_ttft: tuple[float | None, float | None]
    """p50 and p95, as is the next."""
    server_itl: tuple[float | None, float | None]
    retractions: int
    num_held: int
    cpu_s: dict[str, float]
    """Part |-> CPU time a request."""

    def latency(self, name: str) -> Distribution:
        return self.summary.latencies_s[name]

    @property
    def is_right(self) -> bool:
        """Every request answered, every answer right, nothing left behind."""
        summary = self.summary
        all_right = summary.answers_right == summary.answers_expected == summary.num_completed
        return summary.num_failed == 0 and all_right and self.num_held == 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured, before it is made into figures."""

    measurement: Measurement
    sights: Sequence[Sight]
    running_peak: int
    server_ttft: tuple[float | None, float | None]
    server_itl: tuple[float | None, float | None]
    retractions: int
    num_held: int
    cpu_s: dict[str, float]


async def drive(url: str, model: str, load: SeedLoad, on_record: Callable[[RequestRecord], None]) -> Seen:
    """Warm the server up, send the load, see what it reports."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
        dialect = ServerDialect(model, LENIENT)
        warm_up = RecallTraffic(1, 4, num_turns=2, answer_len=8, shape=DocumentShape(16)).generate(1)
        await Client(http, dialect).measure(warm_up, Load([0.0] * len(warm_up)))
        names = ("deltaserve_time_to_first_token_seconds", "deltaserve_inter_token_latency_seconds")
        before = [await read_histogram(http, name) for name in names]
        watch, cpu_before = Watch(), cpu_seconds()

        def note(record: RequestRecord) -> None:
            watch.num_done += 1
            on_record(record)

        watcher = asyncio.create_task(watch.keep_looking(http))
        try:
            client = Client(http, dialect, on_record=note)
            measurement = await client.measure(
                load.generate(), Load([0.0] * load.num_requests, max_concurrency=load.concurrency)
            )
        finally:
            watcher.cancel()
        cpu_after = cpu_seconds()
        cpu = {part: (cpu_after[part] - cpu_before[part]) / load.num_requests for part in PARTS}
        held = await num_held(http)
        after = [await read_histogram(http, name) for name in names]
        ttft, itl = (
            (quantile(then, now, 0.5), quantile(then, now, 0.95)) for then, now in zip(before, after, strict=True)
        )
        retractions = (await worker_metrics(http))[DECODE].get("deltaserve_retractions_total", 0.0)
        peak = int(max((sight.num_running for sight in watch.sights), default=0))
        return Seen(measurement, watch.steady(load), peak, ttft, itl, int(retractions), held, cpu)


def run_variant(load: SeedLoad, variant: Variant, model: Path, console: Console) -> Outcome:
    """One server from start to end."""
    console.print(f"{load.name}, {variant.title}: starting", markup=False)

    def work(url: str, stopping: Event) -> Seen:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("  requests", total=load.num_requests)
            try:
                return asyncio.run(drive(url, model.name, load, lambda record: progress.advance(task)))
            except httpx.HTTPError:
                if stopping.is_set():
                    raise KeyboardInterrupt from None
                raise

    seen = serve_while(
        variant.settings(load, model), partial(variant.adjust, load), work, lambda text: console.print(text)
    )
    summary = summarize(seen.measurement)
    running = distribution(sight.num_running for sight in seen.sights)
    usage = distribution(sight.usage for sight in seen.sights)
    if running is None or usage is None or not summary.num_completed:
        raise SystemExit(f"{variant.title}: nothing was answered")
    outcome = Outcome(
        load=load.name,
        variant=variant,
        summary=summary,
        running=running,
        usage=usage,
        running_peak=seen.running_peak,
        server_ttft=seen.server_ttft,
        server_itl=seen.server_itl,
        retractions=seen.retractions,
        num_held=seen.num_held,
        cpu_s=seen.cpu_s,
    )
    right = f"{summary.answers_right} of {load.num_requests} right, {summary.requests_per_s:.2f} requests/s"
    cpu = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in outcome.cpu_s.items())
    console.print(f"  {right}; running {running.p50:.0f}; CPU ms a request: {cpu}", markup=False)
    return outcome


# ---------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure, what it shall be, and what the public table has."""

    what: str
    measured: float
    relation: str
    wanted: float
    public: float

    @property
    def is_met(self) -> bool:
        return self.measured <= self.wanted if self.relation == "<=" else self.measured >= self.wanted


Outcomes = dict[str, Outcome]
OFF, ON, CAPPED = "off", "on", "capped"


def shared_documents(load: SeedLoad, prefill: Sequence[int], run: Callable[[Variant], Outcome]) -> Outcomes:
    """Cache off and on, the batch capped, and the other numbers of prefill workers."""
    first, *others = sorted(set(prefill), reverse=True)
    rows = {OFF: run(Variant(first, False, load.concurrency)), ON: run(Variant(first, True, load.concurrency))}
    cap = max(1, rows[ON].running_peak // 2)
    rows[CAPPED] = run(Variant(first, True, cap, f", batch <= {cap}"))
    for num_prefill in others:
        rows[f"{num_prefill} prefill"] = run(Variant(num_prefill, True, load.concurrency))
    return rows


def drawn_lengths(load: SeedLoad, prefill: Sequence[int], run: Callable[[Variant], Outcome]) -> Outcomes:
    """Cache off and on, with one prefill worker as in public."""
    return {name: run(Variant(1, name == ON, load.concurrency)) for name in (OFF, ON)}


def bars_of(load: SeedLoad, rows: Outcomes) -> list[Bar]:
    """Bars for a table's first rows."""
    off, on = rows[OFF], rows[ON]
    rate = on.summary.requests_per_s / off.summary.requests_per_s
    if load.name == DRAWN_LENGTHS:
        mean = on.latency("ttft").mean / off.latency("ttft").mean
        tpot = on.latency("tpot").mean / off.latency("tpot").mean
        return [
            Bar("requests/s, on over off", rate, ">=", 1.18, 1.18),
            Bar("TTFT mean, on over off", mean, "<=", 0.25, 0.23),
            Bar("TPOT mean, on over off", tpot, "<=", 1.1, 1.26),
        ]
    capped, c = rows[CAPPED], load.concurrency
    ttft = on.latency("ttft").p50 / off.latency("ttft").p50
    itl, capped_itl = on.latency("itl").p50 / off.latency("itl").p50, capped.latency("itl").p50 / on.latency("itl").p50
    capped_rate = capped.summary.requests_per_s / on.summary.requests_per_s
    return [
        Bar("running, off, of those at a time", off.running.p50 / c, "<=", 40 / 128, 37 / 128),
        Bar("running, on, of those at a time", on.running.p50 / c, ">=", 100 / 128, 104 / 128),
        Bar("pool usage, off", off.usage.p50, ">=", 0.95, 0.99),
        Bar("pool usage, on", on.usage.p50, "<=", 0.80, 0.75),
        Bar("requests/s, on over off", rate, ">=", 1.29, 1.31),
        Bar("TTFT p50, on over off", ttft, "<=", 0.2, 0.12),
        Bar("ITL p50, on over off", itl, "<=", 1.1, 2.0),
        Bar("ITL p50, capped over on", capped_itl, "<=", 0.65, 0.60),
        Bar("requests/s, capped over on", capped_rate, ">=", 0.95, 0.96),
    ]


def enough_prefill(rows: Outcomes) -> str:
    """The rule that the ratios give."""
    uncapped = [row for name, row in rows.items() if name not in (OFF, CAPPED)]
    best = max(row.summary.requests_per_s for row in uncapped)
    enough = min(row.variant.num_prefill for row in uncapped if row.summary.requests_per_s >= 0.95 * best)
    return f"{enough} prefill worker(s) for 1 decode worker make 0.95 of the best rate or more."


def in_ms(client: float, server: float | None) -> str:
    return f"{1e3 * client:,.0f} ({'-' if server is None else f'{1e3 * server:,.0f}'})"


def table_of(load: SeedLoad, rows: Outcomes) -> Table:
    title = f"{load.name}: {load.num_documents} x {load.requests_per_document}, {load.concurrency} at a time"
    table = Table(title=f"{title}, decode's pool {load.decode_pages} pages", title_justify="left")
    table.add_column("", no_wrap=True)
    headings = "req/s|running p50, peak|usage p50|TTFT p50, ms|p95|ITL p50, ms|p95|TPOT mean|E2E p50, s|CPU ms"
    for heading in (*headings.split("|"), "retracted", "right", "held"):
        table.add_column(heading, justify="right")
    for row in rows.values():
        ttft, itl, summary = row.latency("ttft"), row.latency("itl"), row.summary
        table.add_row(
            row.variant.title,
            f"{summary.requests_per_s:.2f}",
            f"{row.running.p50:.0f}, {row.running_peak}",
            f"{row.usage.p50:.2f}",
            in_ms(ttft.p50, row.server_ttft[0]),
            in_ms(ttft.p95, row.server_ttft[1]),
            in_ms(itl.p50, row.server_itl[0]),
            in_ms(itl.p95, row.server_itl[1]),
            f"{1e3 * row.latency('tpot').mean:.0f}",
            f"{row.latency('e2e').p50:.2f}",
            " ".join(f"{1e3 * row.cpu_s[part]:.0f}" for part in PARTS),
            str(row.retractions),
            f"{summary.answers_right}/{load.num_requests}",
            str(row.num_held),
        )
    return table


def bar_table(bars: Sequence[Bar]) -> Table:
    table = Table("", "measured", "bar", "", "public", title="against the bars", title_justify="left")
    for bar in bars:
        verdict = "met" if bar.is_met else "missed"
        wanted = f"{bar.relation} {bar.wanted:.2f}"
        table.add_row(bar.what, f"{bar.measured:.2f}", wanted, verdict, f"{bar.public:.2f}")
    return table


def show(console: Console, load: SeedLoad, rows: Outcomes, *, is_quick: bool) -> None:
    console.print(table_of(load, rows))
    if is_quick:
        console.print("--quick: too small a load to hold against the bars.", markup=False)
    else:
        console.print(bar_table(bars_of(load, rows)))
    if len({row.variant.num_prefill for row in rows.values()}) > 1:
        console.print(enough_prefill(rows), markup=False)
    for row in rows.values():
        lag = row.summary.client_lag_s
        if lag is not None and lag.p99 > MAX_LAG_S:
            late = f"the client itself ran up to {1e3 * lag.p99:.0f} ms late (p99)"
            console.print(f"{row.variant.title}: {late}; the machine was too busy for these latencies.", markup=False)


def attention_backend() -> str:
    """What the workers' --attention-backend auto comes to, but for its self-test."""
    try:
        return f"native, {NativeLibrary().instruction_sets[-1].name}"
    except NativeUnavailable as error:
        return f"torch ({error})"


class Report:
    """What was found so far, as JSON: written anew after each row, for whoever ends a long run."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[dict[str, object]] = []
        self._tables: list[dict[str, object]] = []

    def row(self, outcome: Outcome) -> None:
        self._rows.append(asdict(outcome) | {"title": outcome.variant.title})
        self._write()

    def table(self, load: SeedLoad, rows: Outcomes) -> None:
        bars = [asdict(bar) | {"is_met": bar.is_met} for bar in bars_of(load, rows)]
        self._tables.append({"load": asdict(load) | {"decode_pages": load.decode_pages}, "bars": bars})
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        machine = {"num_cores": os.cpu_count(), "load_average": os.getloadavg(), "attention": attention_backend()}
        self._path.write_text(json.dumps(machine | {"rows": self._rows, "tables": self._tables}, indent=1) + "\n")


def numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 prefill worker")
    return found


TABLES: dict[str, Callable[[SeedLoad, Sequence[int], Callable[[Variant], Outcome]], Outcomes]] = {
    SHARED_DOCUMENTS: shared_documents,
    DRAWN_LENGTHS: drawn_lengths,
}


def loads_of(args: argparse.Namespace) -> list[SeedLoad]:
    """Both, with what the options change."""
    given = {
        "requests_per_document": args.requests,
        "concurrency": args.concurrency,
        "num_copies": args.copies,
        "seed": args.seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return [replace(load, **changes) for load in (QUICK if args.quick else FULL)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(SHARED_DOCUMENTS, DRAWN_LENGTHS), help="one of the two tables")
    parser.add_argument(
        "--prefill", type=numbers, metavar="N,N", help="numbers of prefill workers (default 3,2,1; 1 with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="a small load: within a minute")
    parser.add_argument("--requests", type=int, metavar="N", help="requests about each document")
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests at a time")
    parser.add_argument("--copies", type=int, metavar="N", help="decode's pool, in requests that share nothing")
    parser.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal traffic")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "recall-micro", metavar="FOLDER")
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="times as many attention heads (default 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, anew after each row")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        try:
            return measure(args, widen(args.model, args.heads, Path(folder)))
        except KeyboardInterrupt:
            print("ended before its time", file=sys.stderr)
            return EXIT_INTERRUPTED


def measure(args: argparse.Namespace, model: Path) -> int:
    """The exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"attention: {attention_backend()}; load average {os.getloadavg()[0]:.1f}", markup=False)
    loads = [load for load in loads_of(args) if args.only in (None, load.name)]
    prefill = args.prefill or ((1,) if args.quick else (3, 2, 1))
    report, is_right = Report(args.json), True
    for load in loads:

        def run(variant: Variant, load: SeedLoad = load) -> Outcome:
            outcome = run_variant(load, variant, model, console)
            report.row(outcome)
            return outcome

        rows = TABLES[load.name](load, prefill, run)
        report.table(load, rows)
        show(Console(width=200, highlight=False), load, rows, is_quick=args.quick)
        is_right = is_right and all(row.is_right for row in rows.values())
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
