"""The parts of bench_gpu.py. Each runs in a process of its own, so that what one does to the device or to itself is
over when it ends:

    python -m benchmarks.bench_gpu_parts PART --device cuda --size full --scratch FOLDER --figures FILE

Figures are written to FILE one by one as they are found, a JSON object on each line.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.bench_gpu_engine import TEMPERATURE, OwnEngine, Served
from benchmarks.bench_gpu_http import UNIFIED, Clients, ServedUrl, counted_bytes, last_words, refused, serving
from benchmarks.bench_gpu_loads import (
    FULL,
    SMALL,
    LoadSizes,
    agents_sessions,
    alike,
    conversations,
    g1,
    shared_prefixes,
)
from benchmarks.bench_gpu_model import SHAPES, ModelShape, make_model
from benchmarks.bench_gpu_pages import measured as measured_pages
from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.report import BenchSummary, summarize
from deltaserve.settings.config import SchedulingSettings
from deltaserve.settings.resolve import Device

ROOT = Path(__file__).resolve().parent.parent
RECALL_MODEL = ROOT / "models" / "recall-micro"
_WARM = 3
"""Repeats of what is asked alone; the median counts."""
_MANY_CORES = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured."""

    name: str
    value: float | str
    unit: str = ""
    bar: str = ""
    """What it is to be, in words."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a part works with."""

    device: Device
    sizes: LoadSizes
    small_model: ModelShape
    """The shape most parts run."""
    big_model: ModelShape
    scratch: Path
    add: Callable[[Figure], None]

    def told(self, name: str, value: float | str, unit: str = "", bar: str = "") -> None:
        self.add(Figure(name, value, unit, bar))

    def model(self, name: str, shape: ModelShape) -> Path:
        """Its folder; made once."""
        folder = self.scratch / name
        if not (folder / "config.json").exists():
            began = time.monotonic()
            make_model(shape, folder, torch.device(self.device))
            say(f"{shape.num_values / 1e9:.2f} B random weights made in {time.monotonic() - began:.1f} s")
        return folder

    def flags(self, *more: str) -> list[str]:
        """Flags of `deltaserve serve`."""
        memory = "0.85" if self.device == "cuda" else "0.2"
        length = str(self.sizes.context_len)
        return ["--device", self.device, "--context-length", length, "--mem-fraction-static", memory, *more]


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the card and the tests


def card(job: Job) -> None:
    """What this device copies and multiplies at best."""
    is_gpu = job.device == "cuda"
    num_bytes, width = (4 << 30, 8192) if is_gpu else (64 << 20, 512)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    seconds = _device_s(job.device, lambda: target.copy_(source))
    job.told("copy on the device, read and written", 2 * num_bytes / seconds / 1e9, "GB/s")
    a = torch.randn(width, width, dtype=torch.bfloat16, device=job.device)
    b = torch.randn(width, width, dtype=torch.bfloat16, device=job.device)
    seconds = _device_s(job.device, lambda: a @ b)
    job.told(f"bf16 product of {width} x {width}", 2 * width**3 / seconds / 1e12, "TFLOP/s")


def _device_s(device: Device, call: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of the quickest of some calls, by the device's own clock where it has one."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return min(times)


def tests(job: Job) -> None:
    """tests/gpu, with the failures by name."""
    found = job.scratch / "tests.xml"
    many = ["-n", "4", "--dist", "worksteal"] if (os.cpu_count() or 1) >= _MANY_CORES else ["-n", "0"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:benchmark",
        *many,
        "tests/gpu",
        f"--junitxml={found}",
    ]
    with (job.scratch / "tests.log").open("wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
    if not found.exists():
        raise RuntimeError(f"pytest ended with {code}: {last_words(job.scratch)}")
    cases = list(ElementTree.parse(found).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    job.told("passed", len(cases) - len(bad) - skipped)
    job.told("skipped", skipped)
    job.told("failed", len(bad), bar="0")
    for case in bad:
        told = case.find("failure") if case.find("failure") is not None else case.find("error")
        reason = "" if told is None else str(told.get("message", ""))
        name = f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
        job.told(f"failed {name}", " ".join(reason.split())[:240])


def recall(job: Job) -> None:
    """Whether a server answers what can be checked rightly, unified and with prefill and decode apart."""
    shape = DocumentShape(num_facts=64, num_noise=64)
    traffic = RecallTraffic(8, 8, 2, 16, shape) if job.sizes is FULL else RecallTraffic(2, 2, 1, 8, shape)
    with Clients(2) as clients:
        for name, flags in (("unified", UNIFIED), ("P/D", ())):
            memory = ["--device", job.device, "--mem-fraction-static", "0.1"]
            with serving(RECALL_MODEL, [*memory, *flags], job.scratch / f"recall-{len(flags)}") as served:
                done = clients.summary(served, traffic.generate(1), 16)
                right, asked = done.answers_right, done.answers_expected
                job.told(f"recall-micro {name}: right answers", f"{right} of {asked}", bar=f"{asked} of {asked}")
                _told_failures(job, name, done)
                if done.num_failed or right != asked:
                    say(last_words(served.log.parent))


def pages(job: Job) -> None:
    """Pages from one process to another one on this device, by the local transport."""
    for rate in measured_pages(job.device, job.sizes.pages_bytes, rounds=8):
        name = f"pages of another worker, runs of {rate.run_bytes >> 10} KiB"
        job.told(name, rate.gb_per_s, "GB/s", ">= 200 on one card")


def attention(job: Job) -> None:
    """The table of bench_attention_cuda.py."""
    if job.device != "cuda":
        raise RuntimeError("attention is compared on a GPU; on a CPU by benchmarks.bench_attention")
    on_gpu: Any = importlib.import_module("benchmarks.bench_attention_cuda")  # where triton can be had
    for line in on_gpu.measured():
        share = "" if line.share is None else f"{line.share:.0%} of the copy rate"
        host = "" if line.host_us is None else f"host {line.host_us:.0f} us"
        job.told(f"{line.name}, {line.by}", line.device_us, "us", ", ".join(filter(None, (share, host))))


# ---------------------------------------------------------------- an engine in this process


def engine(job: Job) -> None:
    """The small model without HTTP: alone, 64 at once, and G1."""
    sizes, shape = job.sizes, job.small_model
    worker = OwnEngine(job.model("small", shape), job.device, sizes.context_len, job.scratch, say)
    try:
        _warm_up(worker, sizes, shape)
        _alone(job, worker, shape, "TTFT, %d tokens alone", "15 ms", "1.0 ms")
        many = worker.serve(alike(sizes.num_many, sizes.short_prompt, sizes.many_output, shape.vocab_size, 5))
        job.told(f"{sizes.num_many} at once: output", many.tokens_per_s, "tokens/s", ">= 40K")
        _told_steps(job, f"{sizes.num_many} at once", many)
        load = worker.serve(g1(sizes, shape.vocab_size))
        job.told("G1 in process: output tokens", sum(answer.output_len for answer in load.answers))
        job.told("G1 in process: output", load.tokens_per_s, "tokens/s", ">= 20K; nano-vLLM on an A800: 10.0K")
        job.told("G1 in process: seconds", load.seconds, "s")
        _told_steps(job, "G1", load)
    finally:
        worker.close()


def unrecorded(job: Job) -> None:
    """The small model without CUDA graphs: each kernel is asked for from Python."""
    sizes, shape = job.sizes, job.small_model
    model, by_kernels = job.model("small", shape), SchedulingSettings(disable_cuda_graph=True)
    worker = OwnEngine(model, job.device, sizes.context_len, job.scratch, say, by_kernels)
    try:
        for length in (sizes.lone_prompt, sizes.short_prompt):
            worker.serve(alike(1, length, 8, shape.vocab_size, 1))
        _alone(job, worker, shape, "kernel by kernel: TTFT, %d tokens alone", "", "")
    finally:
        worker.close()


def big(job: Job) -> None:
    """The big model without HTTP, one request at a time."""
    shape = job.big_model
    worker = OwnEngine(job.model("big", shape), job.device, job.sizes.context_len, job.scratch, say)
    try:
        worker.serve(alike(1, job.sizes.lone_prompt, 4, shape.vocab_size, 11))
        _alone(job, worker, shape, "8B: TTFT, %d tokens alone", "40 ms", "4.8 ms")
    finally:
        worker.close()
        shutil.rmtree(job.scratch / "big", ignore_errors=True)


def _warm_up(worker: OwnEngine, sizes: LoadSizes, shape: ModelShape) -> None:
    """Kernels of all lengths, before anything is measured."""
    began = time.monotonic()
    worker.serve(alike(1, sizes.lone_prompt, 8, shape.vocab_size, 1))
    worker.serve(alike(sizes.num_many, sizes.short_prompt, 8, shape.vocab_size, 2))
    worker.serve(g1(sizes, shape.vocab_size, shift=1)[: sizes.num_g1 // 2])
    say(f"warm after {time.monotonic() - began:.1f} s")


def _alone(job: Job, worker: OwnEngine, shape: ModelShape, ttft: str, ttft_bar: str, tpot_bar: str) -> None:
    sizes, vocab = job.sizes, shape.vocab_size
    for length, bar, seed in ((sizes.lone_prompt, ttft_bar, 20), (sizes.short_prompt, "", 40)):
        lone = [worker.serve(alike(1, length, 2, vocab, seed + i)).ttft_s for i in range(_WARM)]
        job.told(ttft % length, 1e3 * sorted(lone)[_WARM // 2], "ms", f"<= {bar}" if bar else "")
    one = worker.serve(alike(1, sizes.short_prompt, sizes.one_output, vocab, 30))
    prefix = ttft.partition("TTFT")[0]
    job.told(f"{prefix}one at a time: TPOT", 1e3 * one.tpot_s, "ms", f"<= {tpot_bar}" if tpot_bar else "")
    _told_steps(job, f"{prefix}one at a time", one)


def _told_steps(job: Job, name: str, served: Served) -> None:
    for part, value in served.steps.medians_ms().items():
        job.told(f"{name}: decode steps, {part}", value, "" if part == "rows" else "ms")


# ---------------------------------------------------------------- servers


def http(job: Job) -> None:
    """A unified server of the small model: a burst at its start, one request, 64 at once, and G1."""
    sizes, vocab = job.sizes, job.small_model.vocab_size
    model = job.model("small", job.small_model)
    with (
        Clients() as clients,
        serving(model, job.flags(*UNIFIED, "--stream-interval", "16"), job.scratch / "http") as served,
    ):
        job.told("server: start to ready", served.ready_s, "s")
        burst = clients.measure(served, conversations(g1(sizes, vocab, shift=2)))
        _told_burst(job, burst)
        lone = clients.summary(served, conversations(alike(_WARM, sizes.lone_prompt, 2, vocab, 41)), 1)
        _told_latency(job, f"HTTP: TTFT, {sizes.lone_prompt} tokens alone", lone, "ttft")
        one = clients.summary(served, conversations(alike(1, sizes.short_prompt, sizes.one_output, vocab, 42)), 1)
        _told_latency(job, "HTTP: one at a time, TPOT", one, "tpot")
        many = alike(sizes.num_many, sizes.short_prompt, sizes.many_output, vocab, 43)
        done = clients.summary(served, conversations(many), temperature=TEMPERATURE)
        job.told(f"HTTP: {sizes.num_many} at once: output", done.output_tokens_per_s, "tokens/s")
        load = clients.summary(served, conversations(g1(sizes, vocab)), temperature=TEMPERATURE)
        job.told("G1 over HTTP: output", load.output_tokens_per_s, "tokens/s", ">= 0.9 of in process")
        job.told("G1 over HTTP: output tokens", load.output_len)
        _told_failures(job, "G1 over HTTP", load)


def _told_burst(job: Job, burst: Measurement) -> None:
    done = summarize(burst)
    job.told("cold burst: requests", len(burst.records))
    job.told("cold burst: refused", refused(burst), bar="0")
    job.told("cold burst: output", done.output_tokens_per_s, "tokens/s")
    _told_failures(job, "cold burst", done)
    errors = {record.error for record in burst.records if record.error}
    for error in sorted(errors)[:2]:
        say(error)


def shared(job: Job) -> None:
    """Groups of prompts that begin alike, by one unified worker, then with prefill and decode apart on this device."""
    sizes, vocab = job.sizes, job.small_model.vocab_size
    model, rates, ttfts = job.model("small", job.small_model), {}, {}
    with Clients() as clients:
        for name, flags in (("unified", UNIFIED), ("P/D", ())):
            folder = job.scratch / f"shared-{len(flags)}"
            with serving(model, job.flags(*flags, "--stream-interval", "16"), folder) as served:
                _warm_shared(job, clients, served)
                load = conversations(shared_prefixes(sizes, vocab, 7))
                done = clients.summary(served, load, sizes.shared_at_once)
                rates[name], ttfts[name] = done.requests_per_s, done.latencies_s["ttft"].p50
                job.told(f"8 x 32 {name}: requests", done.requests_per_s, "/s")
                job.told(f"8 x 32 {name}: output", done.output_tokens_per_s, "tokens/s")
                job.told(f"8 x 32 {name}: cached", 100 * (done.cached_len or 0) / max(1, done.input_len), "%")
                _told_latency(job, f"8 x 32 {name}: TTFT p50", done, "ttft")
                _told_latency(job, f"8 x 32 {name}: TPOT p50", done, "tpot")
                _told_failures(job, f"8 x 32 {name}", done)
    job.told("8 x 32: P/D over unified, requests", rates["P/D"] / rates["unified"], "x", ">= 0.9")
    job.told("8 x 32: P/D over unified, TTFT p50", ttfts["P/D"] / ttfts["unified"], "x", "<= 1.3")


AGENTS_VARIANTS = {"unified": UNIFIED, "P/D": (), "P/D, all by prefill": ("--conditional-prefill", "off")}


def agents(job: Job) -> None:
    """Agents' sessions by one unified worker, then with prefill and decode apart on this device, as it is by default
    and where prefill computes every prompt."""
    sizes, vocab = job.sizes, job.small_model.vocab_size
    model, rates, ttfts = job.model("small", job.small_model), {}, {}
    with Clients() as clients:
        for number, (name, flags) in enumerate(AGENTS_VARIANTS.items()):
            with serving(model, job.flags(*flags), job.scratch / f"agents-{number}") as served:
                warm_up = agents_sessions(sizes, vocab, 8)
                clients.measure(served, warm_up[: max(1, len(warm_up) // 4)], sizes.agents.max_concurrency)
                before = counted_bytes(served.url)
                load = agents_sessions(sizes, vocab, 7)
                measurement = clients.measure(served, load, sizes.agents.max_concurrency, {"timings": True})
                after = counted_bytes(served.url)
                moved = None if before is None or after is None else after.since(before)
                done = summarize(replace(measurement, moved=moved))
                rates[name], ttfts[name] = done.requests_per_s, done.latencies_s["ttft"].p50
                _told_agents(job, f"agents {name}", done)
    for name in [*AGENTS_VARIANTS][1:]:
        job.told(f"agents: {name} over unified, requests", rates[name] / rates["unified"], "x", ">= 1.0")
        job.told(f"agents: {name} over unified, TTFT p50", ttfts[name] / ttfts["unified"], "x", "<= 1.1")


def _told_agents(job: Job, name: str, done: BenchSummary) -> None:
    job.told(f"{name}: requests", done.requests_per_s, "/s")
    _told_latency(job, f"{name}: TTFT p50", done, "ttft")
    if (gaps := done.latencies_s.get("itl")) is not None:
        job.told(f"{name}: ITL p99", 1e3 * gaps.p99, "ms")
    if done.reuse is not None:
        for row, value in done.reuse.as_rows():
            job.told(f"{name}: {row}", value)
    _told_failures(job, name, done)


def _warm_shared(job: Job, clients: Clients, served: ServedUrl) -> None:
    asks = shared_prefixes(job.sizes, job.small_model.vocab_size, 8)
    clients.measure(served, conversations(asks[: len(asks) // 4]), job.sizes.shared_at_once)


def _told_latency(job: Job, name: str, done: BenchSummary, kind: str) -> None:
    found = done.latencies_s.get(kind)
    job.told(name, "no answer" if found is None else 1e3 * found.p50, "ms")


def _told_failures(job: Job, name: str, done: BenchSummary) -> None:
    if done.num_failed:
        job.told(f"{name}: requests that failed", done.num_failed, bar="0")


# ---------------------------------------------------------------- the process


PARTS: dict[str, Callable[[Job], None]] = {
    "card": card,
    "tests": tests,
    "recall": recall,
    "pages": pages,
    "engine": engine,
    "unrecorded": unrecorded,
    "http": http,
    "shared": shared,
    "agents": agents,
    "attention": attention,
    "big": big,
}


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    """Servers are ended on the way out."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--size", choices=("full", "small"), required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end_on_signal)

    def add(figure: Figure) -> None:
        with args.figures.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")

    is_full = args.size == "full"
    small, large = (SHAPES["0.6b"], SHAPES["8b"]) if is_full else (SHAPES["tiny"], SHAPES["tiny"])
    PARTS[args.part](Job(args.device, FULL if is_full else SMALL, small, large, args.scratch, add))


if __name__ == "__main__":
    main()
