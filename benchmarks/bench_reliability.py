"""How long a death hurts, and how long an abort holds memory: real processes on recall-micro.

    python -m benchmarks.bench_reliability [--rounds N] [--aborts N] [--json FILE]

Deaths: `deltaserve serve` with one worker of each kind, where the client can only be told, and with two of each, where
the request goes on elsewhere. The worker that has the request gets SIGKILL in the middle of it; the time runs from the
kill to the client's next event (an error, or the first token of the new attempt, for which the whole prompt is computed
again: its time undisturbed stands beside it), and until every process is ready again and the front says so.

Aborts: the client hangs up while pages are granted and on their way from a living prefill worker. The time runs from
there until decode has reported that nothing is granted, quarantined, owned or leased any more. For this part decode
reports every 10 ms instead of twice a second, and the report is asked for over HTTP: all of that is in the figure.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from threading import Event

import httpx
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.bench_serve import PATIENCE_S, ROOT, Served, serving
from benchmarks.serve_while import serve_while
from deltaserve.core.ids import Role
from deltaserve.launch.compose import free_port
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import (
    DisaggregationSettings,
    MemorySettings,
    ModelSettings,
    NetworkSettings,
    SchedulingSettings,
    Settings,
)

MODEL = ROOT / "models" / "recall-micro"
PAGE, CHUNK = 16, 16
PROMPT_LEN = 3000
"""188 chunks: some tenths of a second of prefill and transfer to be killed in."""
STREAM_LEN = 400
MOVING_S = 0.1
"""After so long a prompt is in its middle."""
KILLS = 2
"""Kills of each kind per server: more than five of one worker in a minute and the supervisor gives up, as it should."""
REPORT_S = 0.01


@dataclass(frozen=True, slots=True)
class Death:
    """One kill."""

    num_workers: int
    """Workers of each kind."""
    what: str
    outcome: str
    undisturbed_s: float
    """First token of such a request when nobody dies."""
    answered_s: float
    ready_s: float
    """Until the server was whole again."""


@dataclass(frozen=True, slots=True)
class Figures:
    load_average: float
    deaths: list[Death]
    reusable_ms: list[float]
    """Milliseconds of each abort until pages are reusable, sorted."""


# ---------------------------------------------------------------- deaths


class Asked:
    """A streamed request, sent by a thread of the pool."""

    def __init__(self, served: Served, pool: ThreadPoolExecutor, prompt: list[int]) -> None:
        self.events_at: list[float] = []
        """When each event with output came."""
        self.ended_at = 0.0
        self.outcome = "answered"
        self.done: Future[None] = pool.submit(self._ask, served.http, prompt)

    def _ask(self, http: httpx.Client, prompt: list[int]) -> None:
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": STREAM_LEN, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                self.outcome = f"HTTP {reply.status_code}"
            for line in reply.iter_lines():
                if '"error"' in line and reply.status_code == 200:
                    self.outcome = f"error event {json.loads(line.removeprefix('data: '))['error']['code']}"
                elif line.startswith("data: {"):
                    self.events_at.append(time.monotonic())
        self.ended_at = time.monotonic()

    def heard_after(self, moment: float) -> float:
        """When the client knew more: the error, or the first output of the new attempt. Waits for the end."""
        self.done.result(PATIENCE_S)
        later = [at for at in self.events_at if at > moment]
        return later[0] if later and self.outcome == "answered" else self.ended_at


def measure_deaths(num_workers: int) -> Iterator[Death]:
    flags = ["--prefill", str(num_workers), "--decode", str(num_workers), "--page-size", str(PAGE)]
    flags += ["--chunked-prefill-size", str(CHUNK), "--num-pages", "2048"]
    draw = Random(num_workers)
    with serving(MODEL, *flags) as served, ThreadPoolExecutor(1) as pool:
        served.wait_ready()
        undisturbed_s = min(first_token_s(served, pool, draw) for _ in range(3))
        for _ in range(KILLS):
            for role, num_events in (("prefill", 0), ("decode", 0), ("decode", 10)):
                asked = Asked(served, pool, random_prompt(draw))
                what, killed, whole_s = kill_one(served, asked, role, num_events)
                heard_s = asked.heard_after(killed) - killed
                yield Death(num_workers, what, asked.outcome, undisturbed_s, heard_s, whole_s)


def first_token_s(served: Served, pool: ThreadPoolExecutor, draw: Random) -> float:
    began = time.monotonic()
    return Asked(served, pool, random_prompt(draw)).heard_after(began) - began


def kill_one(served: Served, asked: Asked, role: str, num_events: int) -> tuple[str, float, float]:
    """After so many events; none: while pages move. What was done, when, and seconds until the server was whole."""
    if num_events == 0:
        time.sleep(MOVING_S)
    wait_until(lambda: asked.done.done() or len(asked.events_at) >= num_events, "the first tokens")
    victim = busy(served.http, role)
    state = f"{role}: {len(asked.events_at)} events, victim {victim}"
    if asked.done.done():
        asked.done.result()
        raise RuntimeError(f"{state}, {asked.outcome} before the kill")
    if victim is None or (num_events == 0 and asked.events_at):
        raise RuntimeError(f"{state}: too late; this machine may need longer prompts")
    os.kill(served.processes()[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    asked.done.result(PATIENCE_S)
    wait_until(lambda: is_whole(served, victim, killed), f"{victim} to be back")
    what = f"{role}, {'tokens streaming' if num_events else 'pages moving'}"
    return what, killed, time.monotonic() - killed


def busy(http: httpx.Client, role: str) -> str | None:
    """The worker of that role that has the request."""
    workers = http.get("/server_info").json()["engine"]["workers"]
    return next((w["name"] for w in workers if w["role"] == role and w["rooms"]), None)


def is_whole(served: Served, victim: str, killed: float) -> bool:
    """Started again, connected, and the front takes requests."""
    if time.monotonic() - killed < 0.3:  # the front may not have heard of the death yet
        return False
    workers = served.http.get("/server_info").json()["engine"]["workers"]
    state = next(w["state"] for w in workers if w["name"] == victim)
    return state == "ready" and served.http.get("/readyz").status_code == 200


def random_prompt(draw: Random) -> list[int]:
    """Nobody has cached it."""
    return [draw.randrange(32, 127) for _ in range(PROMPT_LEN)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited too long for {what}")
        time.sleep(0.01)


# ---------------------------------------------------------------- aborts


def measure_aborts(count: int) -> list[float]:
    """Milliseconds from the client's hanging up until decode's pages are free or cached again, sorted."""
    settings = Settings(
        model=ModelSettings(model_path=str(MODEL), device="cpu"),
        memory=MemorySettings(page_size=PAGE, num_pages=2048),
        scheduling=SchedulingSettings(chunked_prefill_size=CHUNK),
        disaggregation=DisaggregationSettings(conditional_prefill="off"),
        network=NetworkSettings(port=free_port()),
    )

    def often(spec: WorkerSpec) -> WorkerSpec:
        if spec.role is not Role.DECODE:
            return spec
        return replace(spec, options=replace(spec.options, heartbeat_s=REPORT_S))

    def work(url: str, stopping: Event) -> list[float]:
        draw = Random(1)
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            return sorted(1000 * abort_one(http, draw) for _ in range(count))

    return serve_while(settings, often, work, lambda text: print(text, file=sys.stderr))


def abort_one(http: httpx.Client, draw: Random) -> float:
    """Seconds. A bare socket: it can be closed before the reply begins."""
    url = http.base_url
    body = json.dumps({"model": MODEL.name, "prompt": random_prompt(draw), "max_tokens": 4, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: held(http) > 0, "granted pages")
    began = time.monotonic()
    wait_until(lambda: held(http) == 0, "free pages")
    return time.monotonic() - began


def held(http: httpx.Client) -> float:
    """Pages and leases that decode holds for a request."""
    workers = http.get("/server_info").json()["engine"]["workers"]
    status = next(w["status"] for w in workers if w["role"] == Role.DECODE.value)
    metrics: dict[str, float] = status["metrics"]
    states = ('state="granted"', 'state="owned"', 'state="quarantined"')
    return float(status["leases"]) + sum(n for key, n in metrics.items() if any(state in key for state in states))


# ---------------------------------------------------------------- the table


def show(console: Console, figures: Figures) -> None:
    table = Table(
        "death of",
        "workers of each kind",
        "outcomes",
        "undisturbed, s",
        "answered, p50 s",
        "max",
        "ready again, p50 s",
        "max",
    )
    for num_workers, what in sorted({(d.num_workers, d.what) for d in figures.deaths}):
        of_kind = [d for d in figures.deaths if (d.num_workers, d.what) == (num_workers, what)]
        outcomes = Counter(d.outcome for d in of_kind)
        answered, ready = [d.answered_s for d in of_kind], [d.ready_s for d in of_kind]
        table.add_row(
            what,
            str(num_workers),
            ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common()),
            f"{statistics.median(d.undisturbed_s for d in of_kind):.2f}",
            f"{statistics.median(answered):.2f}",
            f"{max(answered):.2f}",
            f"{statistics.median(ready):.2f}",
            f"{max(ready):.2f}",
        )
    table.title = f"load average {figures.load_average:.1f}"
    console.print(table)
    times = figures.reusable_ms
    console.print(
        f"abort -> pages reusable, {len(times)} aborts: p50 {statistics.median(times):.0f} ms, "
        f"p99 {times[int(0.99 * (len(times) - 1))]:.0f} ms, max {times[-1]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=2, help=f"servers of each size; {KILLS} kills of each kind in each"
    )
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    deaths = [death for _ in range(args.rounds) for size in (1, 2) for death in measure_deaths(size)]
    reusable_ms = measure_aborts(args.aborts)
    figures = Figures(os.getloadavg()[0], deaths, reusable_ms)
    show(Console(width=120), figures)
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")


if __name__ == "__main__":
    main()
