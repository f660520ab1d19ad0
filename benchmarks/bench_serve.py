"""What a server costs and answers on this machine: start, idle CPU, memory, first token of a cached prompt, wire bytes.

    python -m benchmarks.bench_serve [--model FOLDER] [--page-size N] [--json FILE]

Three servers, one after the other: prefill and decode apart, the same where decode computes short deltas itself
(--conditional-prefill auto), and unified. Then the first and the last at once, asked in turn for the same
cached prompt: what P/D takes longer, question by question. Figures of a busy machine mean little, and the load average
is printed with them; where it may be had, `chrt -r 1 python ...` gives the servers the cores as soon as they want them.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.launch.compose import Checkpoint, free_port

ROOT = Path(__file__).resolve().parent.parent
APART, UNIFIED = "prefill and decode", "unified"
IDLE_S = 20.0
SETTLE_S = 2.0
REPORT_S = 1.2
"""Workers report twice a second."""
NUM_ASKED = 60
NUM_WARM, NUM_PAIRS = 8, 200
PROMPT_LEN = 2048
TURN_LEN = 16
"""New tokens of a further turn of a chat."""
PATIENCE_S = 120.0
MODES: dict[str, list[str]] = {
    APART: [],
    "P/D, conditional": ["--conditional-prefill", "auto"],
    UNIFIED: ["--disaggregation-mode", "null"],
}
"""Name |-> flags."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One request's transfer."""

    request: str
    delta_pages: int
    bytes_sent: int
    """By prefill's own count."""
    page_share: float | None
    """Bytes sent over bytes of the delta's pages; None when there are none."""
    other_bytes: int
    """Beside pages: the first token's record. 0 where decode computed the delta itself."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one server."""

    mode: str
    ready_s: float
    idle_cpu_percent: float
    """Share of one core, all processes together."""
    rss_mib: dict[str, float]
    ttft_ms_p50: float
    ttft_ms_p95: float
    first_token_ms_p50: float
    """The server's own account, without HTTP."""
    turn_ttft_ms_p50: float
    """TTFT of a prompt that repeats PROMPT_LEN cached tokens and adds TURN_LEN."""
    wire: tuple[Wire, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Milliseconds to the first token of a cached prompt, of two servers asked in turn."""

    apart_p50: float
    unified_p50: float
    more_p50: float
    """What P/D took longer, question by question."""
    more_p5: float
    more_p95: float


class Served:
    """A running server."""

    def __init__(self, process: psutil.Process, url: str, log: Path) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._log = log

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "all processes are ready" not in self._log.read_text():
            if time.monotonic() > deadline or not self.process.is_running():
                raise RuntimeError(self._log.read_text())
            time.sleep(0.01)

    def processes(self) -> dict[str, psutil.Process]:
        """Name |-> process, the supervisor included."""
        lines = (line.split() for line in self._log.read_text().splitlines() if ": starting, process" in line)
        pids = {line[1].rstrip(":"): int(line[-1]) for line in lines}  # of each, the latest start
        return {"supervisor": self.process} | {name: psutil.Process(pid) for name, pid in pids.items()}

    def cpu_s(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.processes().values())

    def sent_bytes(self) -> int:
        """By all prefill workers so far."""
        return self.prefill_count("transfer_bytes_sent")

    def prefill_count(self, name: str) -> int:
        """The counter `deltaserve_NAME_total` of all prefill workers."""
        time.sleep(REPORT_S)
        workers = self.http.get("/server_info").json()["engine"]["workers"]
        of_all = (worker["status"]["metrics"] for worker in workers if worker["role"] == "prefill")
        return int(sum(metrics[f"deltaserve_{name}_total"] for metrics in of_all))

    def ask(self, model: str, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the first event with output, and the timings of the usage."""
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "timings": True}
        usage: dict[str, Any] = {}
        began, first = time.perf_counter(), None
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - began
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
        if first is None:
            raise RuntimeError("no output")
        timings: dict[str, Any] = usage["timings"][0]
        return first, timings


@contextmanager
def serving(model: Path, *flags: str, program: Sequence[str] | None = None) -> Iterator[Served]:
    """`deltaserve serve`, ended afterwards. `program`: what stands for `deltaserve`."""
    port = free_port()
    program = program or (sys.executable, "-m", "deltaserve.cli.main")
    argv = [*program, "serve", str(model), "--port", str(port), "--conditional-prefill", "off", *flags]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(argv, stderr=out)
        served = Served(psutil.Process(process.pid), f"http://127.0.0.1:{port}", log)
        try:
            yield served
        finally:
            served.http.close()
            process.send_signal(signal.SIGTERM)
            process.wait()


def prompt_of(length: int, seed: int) -> list[int]:
    """Byte tokens; prompts of two seeds differ from the first one on."""
    return [32 + (seed * 7 + i * (seed + 3)) % 90 for i in range(length)]


def flags_of(mode: str, page_size: int) -> list[str]:
    flags = ["--page-size", str(page_size), "--num-pages", str(8 * PROMPT_LEN // page_size)]
    return [*flags, *MODES[mode]]


def compare(model: Path, page_size: int) -> Comparison:
    """Both servers at once, asked in turn."""
    prompt = prompt_of(PROMPT_LEN, seed=50)
    with (
        serving(model, *flags_of(APART, page_size)) as apart,
        serving(model, *flags_of(UNIFIED, page_size)) as unified,
    ):
        for served in (apart, unified):
            served.wait_ready()
            for _ in range(NUM_WARM):
                served.ask(model.name, prompt)
        of_apart, of_unified, more = [], [], []
        for _ in range(NUM_PAIRS):
            of_apart.append(1000 * apart.ask(model.name, prompt)[0])
            of_unified.append(1000 * unified.ask(model.name, prompt)[0])
            more.append(of_apart[-1] - of_unified[-1])
    more.sort()
    edge = NUM_PAIRS // 20
    return Comparison(
        apart_p50=statistics.median(of_apart),
        unified_p50=statistics.median(of_unified),
        more_p50=statistics.median(more),
        more_p5=more[edge],
        more_p95=more[-edge],
    )


def measure(mode: str, model: Path, page_size: int) -> Figures:
    flags = flags_of(mode, page_size)
    began = time.monotonic()
    with serving(model, *flags) as served:
        served.wait_ready()
        ready_s = time.monotonic() - began
        time.sleep(SETTLE_S)
        before, since = served.cpu_s(), time.monotonic()
        time.sleep(IDLE_S)
        idle = 100 * (served.cpu_s() - before) / (time.monotonic() - since)
        wire = () if mode == UNIFIED else tuple(measure_wire(served, model, page_size))
        prompt = prompt_of(PROMPT_LEN, seed=50)
        served.ask(model.name, prompt)
        asked = [served.ask(model.name, prompt) for _ in range(NUM_ASKED)]
        times = sorted(1000 * seconds for seconds, _ in asked)
        turns = [[*prompt, *prompt_of(TURN_LEN, seed)] for seed in range(100, 100 + NUM_ASKED)]
        turn_times = [1000 * served.ask(model.name, turn)[0] for turn in turns]
        rss = {name: process.memory_info().rss / 2**20 for name, process in served.processes().items()}
        return Figures(
            mode=mode,
            ready_s=ready_s,
            idle_cpu_percent=idle,
            rss_mib=rss,
            ttft_ms_p50=statistics.median(times),
            ttft_ms_p95=times[int(0.95 * len(times))],
            first_token_ms_p50=statistics.median(1000 * timings["first_token_s"] for _, timings in asked),
            turn_ttft_ms_p50=statistics.median(turn_times),
            wire=wire,
        )


def measure_wire(served: Served, model: Path, page_size: int) -> Iterator[Wire]:
    """Cold, half of the prompt resident on decode, all of it."""
    spec = Checkpoint.open(str(model)).spec
    page_bytes = sum(pool_page_bytes(spec.cache_spec(page_size, spec.dtype)))
    whole, half = prompt_of(PROMPT_LEN, seed=1), PROMPT_LEN // 2
    prompts = {"cold": whole, "half resident": [*whole[:half], *prompt_of(half, seed=2)], "all resident": whole}
    for name, prompt in prompts.items():
        before = served.sent_bytes()
        _, timings = served.ask(model.name, prompt)
        sent = served.sent_bytes() - before
        num_pages = -(-len(prompt) // page_size) - timings["decode_cached_tokens"] // page_size
        share = sent / (num_pages * page_bytes) if num_pages else None
        yield Wire(name, num_pages, sent, share, max(0, sent - num_pages * page_bytes))


def show(console: Console, all_figures: list[Figures], pairs: Comparison) -> None:
    table = Table("", *(figures.mode for figures in all_figures), title=f"load average {os.getloadavg()[0]:.1f}")
    table.add_row("start to ready, s", *(f"{f.ready_s:.1f}" for f in all_figures))
    table.add_row(f"idle CPU over {IDLE_S:.0f} s, % of a core", *(f"{f.idle_cpu_percent:.1f}" for f in all_figures))
    table.add_row(f"TTFT, {PROMPT_LEN} cached tokens, p50 ms", *(f"{f.ttft_ms_p50:.1f}" for f in all_figures))
    table.add_row("  p95 ms", *(f"{f.ttft_ms_p95:.1f}" for f in all_figures))
    table.add_row("  without HTTP, p50 ms", *(f"{f.first_token_ms_p50:.1f}" for f in all_figures))
    turns = (f"{f.turn_ttft_ms_p50:.1f}" for f in all_figures)
    table.add_row(f"TTFT, {PROMPT_LEN} cached + {TURN_LEN} new tokens, p50 ms", *turns)
    for name in dict.fromkeys(name for f in all_figures for name in f.rss_mib):
        table.add_row(
            f"RSS of {name}, MiB", *(f"{f.rss_mib[name]:.0f}" if name in f.rss_mib else "" for f in all_figures)
        )
    console.print(table)
    wire = Table("request", "delta pages", "bytes sent", "of its pages", "other bytes", title="wire")
    for w in (w for f in all_figures for w in f.wire):
        share = "-" if w.page_share is None else f"{w.page_share:.4f}"
        wire.add_row(w.request, str(w.delta_pages), str(w.bytes_sent), share, str(w.other_bytes))
    console.print(wire)
    console.print(f"TTFT of {PROMPT_LEN} cached tokens, {NUM_PAIRS} times in turn: ", end="")
    console.print(
        f"P/D {pairs.apart_p50:.1f} ms, unified {pairs.unified_p50:.1f} ms; P/D took {pairs.more_p50:+.1f} ms", end=""
    )
    console.print(f" (p5 {pairs.more_p5:+.1f}, p95 {pairs.more_p95:+.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "recall-micro", metavar="FOLDER")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    all_figures = [measure(mode, args.model, args.page_size) for mode in MODES]
    pairs = compare(args.model, args.page_size)
    show(Console(width=100), all_figures, pairs)
    if args.json:
        told = {"servers": [asdict(figures) for figures in all_figures], "in turn": asdict(pairs)}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
