"""Streams that outlive their connection and their worker: real processes, every token compared.

    python -m tests.chaos.streams [--streams N] [--kinds KIND ...]

Every prompt is answered once undisturbed, all of them at the same time; then again, and in the middle of it

- reset: the connections between the front and one of two decode workers are reset, and for 0.3 s there is none;
- kill: one of two decode workers gets SIGKILL, and the others are told, as by the supervisor of one machine;
- silent kill: the same, and nobody is told: broken connections and silence say it, as between machines.

Printed: how many answers were complete and equal to the undisturbed ones, and the longest time a client waited for its
next token, beside the longest of the undisturbed round.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx

from deltaserve.settings.config import MemorySettings, SchedulingSettings, Settings
from tests.chaos.cluster import MODEL, Cluster, running, settings, wait_ready
from tests.chaos.proxy import FAIR
from tests.patience import PATIENCE_S

RESET_S = 0.3
OUTPUT_LEN = 400
_PROMPT_LEN = 48
_MIDDLE = 20
"""Every stream has so many tokens when the fault strikes."""


class Fault(Enum):
    RESET = "reset"
    KILL = "kill"
    SILENT_KILL = "silent kill"


@dataclass(slots=True)
class Stream:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each event came."""
    error: str | None = None
    is_complete: bool = False

    @property
    def longest_gap_s(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round under a fault."""

    fault: Fault
    num_streams: int
    num_struck: int
    """Streams of the worker that was struck."""
    num_right: int
    """Complete, and equal to the undisturbed answers."""
    errors: tuple[str, ...]
    longest_gap_s: float
    undisturbed_gap_s: float


def wanted(port: int) -> Settings:
    """Room for all streams on one decode worker."""
    usual = settings(port)
    memory = MemorySettings(page_size=16, num_pages=2048)
    scheduling = SchedulingSettings(
        max_queued_requests=512,
        max_running_requests=64,
        chunked_prefill_size=256,
        num_reserved_decode_tokens=32,
        num_threads=1,
    )
    return usual.model_copy(update={"memory": memory, "scheduling": scheduling})


def random_prompts(count: int, seed: int) -> list[list[int]]:
    draw = Random(f"streams {seed}")
    return [[draw.randrange(32, 127) for _ in range(_PROMPT_LEN)] for _ in range(count)]


async def stream(http: httpx.AsyncClient, prompt: list[int], output_len: int, into: Stream) -> None:
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        if reply.status_code != 200:
            into.error = f"HTTP {reply.status_code}"
            return
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                into.is_complete = into.error is None
            elif line.startswith("data: {"):
                _take(json.loads(line.removeprefix("data: ")), into)


def _take(event: dict[str, object], into: Stream) -> None:
    if "error" in event:
        into.error = str(event["error"])
        return
    choices = event["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        into.tokens += choice.get("token_ids") or []
    into.times.append(time.monotonic())


async def ask_all(
    http: httpx.AsyncClient, prompts: list[list[int]], output_len: int, strike: Callable[[], Awaitable[None]] | None
) -> list[Stream]:
    """All at the same time; `strike` once each is in its middle."""
    streams = [Stream() for _ in prompts]
    async with asyncio.TaskGroup() as tasks:
        for prompt, into in zip(prompts, streams, strict=True):
            tasks.create_task(stream(http, prompt, output_len, into))
        while strike is not None:
            await asyncio.sleep(0.01)
            if all(len(s.tokens) >= _MIDDLE or s.error for s in streams):
                await strike()
                break
    return streams


class Striker:
    """Does a fault to a cluster, and undoes it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.num_struck = 0

    async def strike(self, fault: Fault, http: httpx.AsyncClient) -> None:
        """At the decode worker with most streams."""
        workers = (await http.get("/server_info")).raise_for_status().json()["engine"]["workers"]
        decodes = [worker for worker in workers if worker["role"] == "decode"]
        busiest = max(decodes, key=lambda worker: int(worker["rooms"]))
        self.num_struck = int(busiest["rooms"])
        if fault is Fault.RESET:
            await self._reset(busiest["name"])
            return
        self._cluster.processes[busiest["name"]].kill()
        if fault is Fault.KILL:
            self._cluster.tell_death(busiest["name"])

    async def _reset(self, name: str) -> None:
        proxy = self._cluster.proxies[name]
        proxy.weather = replace(FAIR, refuses=True)
        proxy.cut()
        await asyncio.sleep(RESET_S)
        proxy.weather = FAIR

    async def heal(self, http: httpx.AsyncClient) -> None:
        await self._cluster.heal()
        await wait_ready(http)


async def measure(num_streams: int, faults: list[Fault], output_len: int = OUTPUT_LEN) -> list[Outcome]:
    """One cluster, one round per fault, each of prompts of its own."""
    outcomes = []
    with TemporaryDirectory(prefix="streams-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), Random(0), wanted=wanted)
        async with running(cluster) as http:
            striker = Striker(cluster)
            for round_number, fault in enumerate(faults):
                prompts = random_prompts(num_streams, round_number)
                calm = await ask_all(http, prompts, output_len, None)
                assert all(s.is_complete for s in calm), [s.error for s in calm if s.error]
                struck = await ask_all(http, prompts, output_len, partial(striker.strike, fault, http))
                await striker.heal(http)
                outcomes.append(judge(fault, calm, struck, striker.num_struck))
    return outcomes


def judge(fault: Fault, calm: list[Stream], struck: list[Stream], num_struck: int) -> Outcome:
    pairs = list(zip(calm, struck, strict=True))
    return Outcome(
        fault,
        len(pairs),
        num_struck,
        sum(after.is_complete and after.tokens == before.tokens for before, after in pairs),
        tuple(sorted({after.error for _, after in pairs if after.error})),
        max(after.longest_gap_s for _, after in pairs),
        max(before.longest_gap_s for before, _ in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", type=Fault, default=list(Fault))
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    for outcome in asyncio.run(measure(args.streams, args.kinds)):
        print(
            f"{outcome.fault.value}: {outcome.num_right} of {outcome.num_streams} complete and right, "
            f"{outcome.num_struck} on that worker, "
            f"longest gap {outcome.longest_gap_s:.2f} s (undisturbed {outcome.undisturbed_gap_s:.2f} s)",
            *outcome.errors,
        )


if __name__ == "__main__":
    main()
