"""How a server behaves around its requests: overload, refusals, draining, clients that leave.

    python -m benchmarks.bench_service [--seconds S] [--json FILE]

One pair of workers on models/recall-micro. The load comes from this process over raw sockets, so as to take little from
the server's cores; on a small machine it takes something all the same, and the figures are lower for it. Every prompt
is new, answers have a fixed length. Peak is a closed loop of as many clients as the server admits; overload is ten
times the peak's requests per second, arriving whether or not others were answered.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from deltaserve.launch.compose import free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "recall-micro"
PATIENCE_S = 60.0
MAX_QUEUED = 32
PROMPT_LEN, OUTPUT_LEN = 256, 128
OVERLOAD = 10
NUM_TURNS = 4
WARM_UP_S = 3.0
NUM_LEAVING = 40
NUM_DRAINED = 2
FLAGS = ("--page-size", "16", "--num-pages", "2048", "--context-length", "2048", "--max-running-requests", "16")


class Served:
    """A running server."""

    def __init__(self, popen: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.popen = popen
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        self._log = log

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "all processes are ready" not in self._log.read_text() or not self._is_ready():
            if time.monotonic() > deadline or self.popen.poll() is not None:
                raise RuntimeError(self._log.read_text())
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == httpx.codes.OK

    def process(self, name: str) -> psutil.Process:
        """Process of the child's latest start."""
        marker = f"deltaserve: {name}: starting, process "
        lines = [line for line in self._log.read_text().splitlines() if line.startswith(marker)]
        return psutil.Process(int(lines[-1].removeprefix(marker)))

    def num_rooms(self) -> int:
        return int(self.http.get("/server_info").json()["engine"]["rooms"])


@contextmanager
def serving() -> Iterator[Served]:
    port = free_port()
    argv = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(MODEL), "--port", str(port), *FLAGS]
    argv += ["--conditional-prefill", "off"]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            popen = subprocess.Popen([*argv, "--max-queued-requests", str(MAX_QUEUED)], stderr=out)
        served = Served(popen, port, log)
        try:
            served.wait_ready()
            yield served
        finally:
            served.http.close()
            popen.terminate()
            popen.wait()


# ---------------------------------------------------------------- load


@dataclass(slots=True)
class Outcome:
    """What some runs of load got. Times in seconds."""

    seconds: float = 0.0
    done_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """How late this process itself sent each request: what the machine adds to every figure."""
    others: Counter[int] = field(default_factory=Counter)
    """Answers of any other kind, by status."""

    @property
    def goodput(self) -> float:
        """Complete answers per second."""
        return len(self.done_s) / self.seconds


class Generator:
    """Sends completions of new prompts over connections that are used again."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = Random(seed)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def closed_loop(self, num_clients: int, seconds: float, outcome: Outcome | None = None) -> None:
        """Each client asks again as soon as it is answered."""
        outcome, end = outcome or Outcome(), time.monotonic() + seconds
        outcome.seconds += seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self._ask(outcome, end)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def open_loop(self, rate: float, seconds: float, outcome: Outcome) -> None:
        """Poisson arrivals. Answers after the end are waited for, but do not count."""
        end = time.monotonic() + seconds
        outcome.seconds += seconds
        at, asked = time.monotonic(), set[asyncio.Task[None]]()
        while (at := at + self._random.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            outcome.late_s.append(time.monotonic() - at)
            task = asyncio.create_task(self._ask(outcome, end))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)

    async def _ask(self, outcome: Outcome, end: float) -> None:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        began = time.monotonic()
        writer.write(self.request())
        status = await _status_of_answer(reader)
        now = time.monotonic()
        self._idle.append((reader, writer))
        if now > end:
            return
        if status == 200:
            outcome.done_s.append(now - began)
        elif status == 429:
            outcome.refused_s.append(now - began)
        else:
            outcome.others[status] += 1

    def request(self, *, max_tokens: int = OUTPUT_LEN, stream: bool = False) -> bytes:
        prompt = [32 + byte % 90 for byte in self._random.randbytes(PROMPT_LEN)]
        fields = {"model": MODEL.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body = json.dumps({**fields, "ignore_eos": True, "stream": stream}, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        return head.encode() + b"\r\n\r\n" + body


async def _status_of_answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split(maxsplit=2)[1])


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    """Whether the bar is a lower one."""

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        met = self.value >= self.bar if self.at_least else self.value <= self.bar
        return f"{'>=' if self.at_least else '<='} {self.bar:g}: {'met' if met else 'MISSED'}"


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else float("nan")


def measure_overload(served: Served, seconds: float) -> Iterator[Figure]:
    """Peak and overload in turn, so that what else the machine does meets both."""
    asyncio.run(Generator(served.port, seed=0).closed_loop(MAX_QUEUED, WARM_UP_S))
    front = served.process("front")
    peak, over, cpu_s, own_s = Outcome(), Outcome(), [0.0, 0.0], 0.0
    for turn in range(NUM_TURNS):
        at = _cpu_s(front)
        asyncio.run(Generator(served.port, seed=1 + turn).closed_loop(MAX_QUEUED, seconds / NUM_TURNS, peak))
        between, own = _cpu_s(front), time.process_time()
        rate = OVERLOAD * peak.goodput
        asyncio.run(Generator(served.port, seed=50 + turn).open_loop(rate, seconds / NUM_TURNS, over))
        own_s += time.process_time() - own
        cpu_s = [cpu_s[0] + between - at, cpu_s[1] + _cpu_s(front) - between]
    per_answer = cpu_s[0] / max(1, len(peak.done_s))
    per_refusal = (cpu_s[1] - per_answer * len(over.done_s)) / max(1, len(over.refused_s))
    yield Figure("peak goodput", peak.goodput, "answers/s")
    yield Figure(f"goodput at {OVERLOAD}x", over.goodput, "answers/s")
    yield Figure("  of peak", 100 * over.goodput / peak.goodput, "%", 90, at_least=True)
    yield Figure("refusals", len(over.refused_s) / over.seconds, "per s")
    yield Figure("  p50", 1000 * statistics.median(over.refused_s or [float("nan")]), "ms")
    yield Figure("  p99", 1000 * p99(over.refused_s), "ms", 50)
    yield Figure("  late when sent, p99", 1000 * p99(over.late_s), "ms")
    yield Figure("front's CPU per refusal", 1000 * per_refusal, "ms")
    yield Figure("front's CPU per answer", 1000 * per_answer, "ms")
    yield Figure("the load's own CPU at 10x", 100 * own_s / over.seconds, "% of a core")
    others = peak.others + over.others
    yield Figure(f"other answers {dict(others) or ''}", others.total(), "", 0)


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def measure_leaving(served: Served) -> Iterator[Figure]:
    """From a client's disconnect to the end of its room on the front, which tells decode at once."""
    times = [_leave(served, seed) for seed in range(NUM_LEAVING)]
    yield Figure("client leaves, room gone, p50", 1000 * statistics.median(times), "ms")
    yield Figure("  max", 1000 * max(times), "ms", 100)


def _leave(served: Served, seed: int) -> float:
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as client:
        client.sendall(Generator(served.port, seed=100 + seed).request(max_tokens=1500, stream=True))
        received = b""
        while b"data: " not in received:
            received += client.recv(4096)
        began = time.monotonic()
    while served.num_rooms():
        pass
    return time.monotonic() - began


def measure_drain(served: Served) -> Iterator[Figure]:
    for name in ("prefill-0", "decode-0"):
        times = []
        for _ in range(NUM_DRAINED):
            process = served.process(name)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _wait_gone(process)
            times.append(time.monotonic() - began)
            time.sleep(1.0)
            served.wait_ready()
        yield Figure(f"SIGTERM of idle {name} to its end, max", max(times), "s", 1)
    began = time.monotonic()
    served.popen.terminate()
    served.popen.wait()
    yield Figure("SIGTERM of the idle server to its end", time.monotonic() - began, "s")


def _wait_gone(process: psutil.Process) -> None:
    """The supervisor reaps it."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.002)


def show(figures: Sequence[Figure], load: float) -> None:
    table = Table("", "", "", "bar", title=f"load average before: {load:.1f}")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.1f}", figure.unit, figure.verdict)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of peak, and of overload")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with serving() as served:
        figures = [*measure_overload(served, args.seconds), *measure_leaving(served), *measure_drain(served)]
    show(figures, load)
    if args.json:
        content = {"load_average": load, "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
