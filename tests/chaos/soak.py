"""Calm, storm, calm again: real processes under faults, and everything they promise checked at every answer.

    python -m tests.chaos.soak --minutes 30 [--seed N] [--conditional-prefill off] [--cache-dir off]

1. Calm: every question once; what the model reads wrongly is dropped. Descriptors and threads are counted.
2. Storm: users of every kind, and events from `storm.py`. A wrong token, an answer more than 1 s after its deadline
   (longer where more processes have work than there are cores, and 10 s in tests), an error other than those a client
   may repeat, a process that ends by itself: the run has failed.
3. Healed: canaries are all right, nothing is held for anybody, descriptors and threads of the processes that were never
   killed are those of the beginning, and their resident memory grew steadily by less than 1 MiB a minute after the
   warm-up (8 in a storm of less than ten minutes), in all by less than 64 MiB.
"""

import argparse
import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import get_args

import httpx

from deltaserve.settings.config import Settings
from tests.chaos.cluster import (
    MODEL,
    Cluster,
    TransferBackend,
    Weighing,
    held,
    running,
    settings,
    wait_ready,
    wait_reports,
    worker_metrics,
)
from tests.chaos.storm import CHANGELINGS, VICTIMS, Storm, make_storm
from tests.chaos.traffic import (
    ANSWER_LEN,
    LATE_S,
    OWN_MACHINE_LATE_S,
    Clients,
    Question,
    Tally,
    WrongToken,
    make_questions,
)
from tests.chaos.watch import Counts, Growth, Lag, Memory, counts_again, difference, settled_counts
from tests.patience import PATIENCE_S

NUM_USERS = 10
NUM_CANARIES = 48
CALM_AT_ONCE = 8
WARM_UP_S = 60.0
"""Warm-up of the storm: pools of threads, arenas of the allocator and caches fill. Resident memory counts from then
on."""
MAX_GROWTH_MIB = 64.0
"""Most growth of a process after the warm-up, however long the storm: steps, which are no leak as long as they are
few."""
_OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
_LOADED = "deltaserve_tier_tokens_loaded_total"
_BACK = "deltaserve_write_back_pages_total"
_PULLS = "deltaserve_pulls_total"


@dataclass(slots=True)
class Report:
    """What a run came to."""

    seed: int
    storm_s: float
    events: Counter[str] = field(default_factory=Counter)
    num_questions: int = 0
    num_misread: int = 0
    tally: Tally = field(default_factory=Tally)
    growth: dict[str, Growth] = field(default_factory=dict)
    """Growth of resident memory of processes that lived through the storm."""
    counts: dict[str, tuple[Counts, Counts]] = field(default_factory=dict)
    """Counts of these processes, before and after."""
    num_loaded: int = 0
    """Tokens that came from files under the caches, of those that workers tell of at the end."""
    num_back: int = 0
    """Pages that came from decode to prefill, of those that workers tell of at the end."""
    num_pulls: int = 0
    """Prompts for which such pages were asked, of the same."""
    own_lag_s: float = 0.0

    def __str__(self) -> str:
        tally = self.tally
        lines = [
            f"seed {self.seed}: storm of {self.storm_s:.0f} s, load average {os.getloadavg()[0]:.1f}",
            f"  {self.events.total()} events: " + ", ".join(f"{n} x {what}" for what, n in self.events.most_common()),
            f"  {tally.num_requests} requests: {tally.num_right} right, none wrong, {tally.num_errors} errors, "
            f"{tally.num_left} clients left; {tally.num_near} prompts computed on decode, {tally.num_moved} moved; "
            f"{self.num_loaded} tokens from files, {self.num_back} pages back to prefill, {self.num_pulls} pulls; "
            f"{self.num_misread} of {self.num_questions} questions misread in the calm",
            "  hints: " + ", ".join(f"{count} x {what}" for what, count in sorted(tally.hints.items())),
            *(f"    {count:6} {what}" for what, count in sorted(tally.outcomes.items())),
            f"  latest answer {tally.worst_late_s:+.2f} s from its deadline, own lag {self.own_lag_s:.2f} s",
            "  resident memory: "
            + ", ".join(f"{n} {g.mib_per_min:+.2f} MiB/min, {g.mib:+.1f} MiB in all" for n, g in self.growth.items()),
            "  descriptors/threads: "
            + ", ".join(f"{n} {before} -> {after}" for n, (before, after) in self.counts.items()),
        ]
        return "\n".join(lines)


class Run:
    """One soak, from the start of the processes to their end."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, seed: int, storm_s: float, late_s: float) -> None:
        self.report = Report(seed, storm_s)
        self.log: list[str] = []
        """What was done to the cluster, for a failure's reader."""
        self._cluster = cluster
        self._http = http
        self._lag = Lag()
        self._clients = Clients(http, MODEL.name, self._lag.since, late_s)
        self._storm = make_storm(seed, storm_s)
        self._draw = Random(f"soak {seed}")
        self._questions: list[Question] = []
        self._users: asyncio.TaskGroup | None = None
        self._is_over = False

    async def go(self, say: Callable[[str], None]) -> Report:
        """Raises AssertionError (or a group of them) when a promise is broken."""
        report = self.report
        async with beside(self._lag.watch()):
            self._questions = await self._calm()
            survivors = {n: p.pid for n, p in self._cluster.processes.items() if n not in VICTIMS}
            await self._wait_quiet()
            before = {name: await settled_counts(pid) for name, pid in survivors.items()}
            memory = Memory(survivors)
            say(f"calm is over: {len(self._questions)} questions; the storm has {len(self._storm)} events")
            async with beside(memory.watch(), self._tell_progress(say, memory)):
                await self._rage()
                self.note("healed")
                await self._cluster.heal()
                await wait_ready(self._http)
                await self._restore_roles()
                await self._canaries()
                await self._wait_quiet()
        for name, pid in survivors.items():
            report.counts[name] = before[name], await counts_again(pid, before[name])
        told = (await worker_metrics(self._http)).values()
        report.num_loaded, report.num_back, report.num_pulls = (
            int(sum(metrics.get(name, 0.0) for metrics in told)) for name in (_LOADED, _BACK, _PULLS)
        )
        report.growth = memory.growth(warm_up_s(report.storm_s))
        report.own_lag_s = self._lag.worst()
        return report

    def note(self, text: str) -> None:
        self.log.append(f"{time.strftime('%H:%M:%S')} {text}")

    # ------------------------------------------------------------ calm

    async def _calm(self) -> list[Question]:
        """Every question, some at a time; those whose answers are right."""
        questions = make_questions(self.report.seed)
        gate = asyncio.Semaphore(CALM_AT_ONCE)

        async def is_read_rightly(question: Question) -> bool:
            async with gate:
                try:
                    assert await self._clients.ask(question, ANSWER_LEN, PATIENCE_S), "an error in the calm"
                except WrongToken:
                    return False
            return True

        right = await asyncio.gather(*map(is_read_rightly, questions))
        self.report.num_questions, self.report.num_misread = len(questions), right.count(False)
        assert right.count(False) <= len(questions) / 20, f"{right.count(False)} of {len(questions)} wrong in the calm"
        self._clients.tally = self.report.tally
        return [question for question, ok in zip(questions, right, strict=True) if ok]

    # ------------------------------------------------------------ storm

    async def _rage(self) -> None:
        storm = Storm(self._cluster, self.note, self._burst, self._change_role)
        async with asyncio.TaskGroup() as users:
            self._users = users
            for number in range(NUM_USERS):
                users.create_task(self._use(Random(f"user {self.report.seed} {number}")))
            guard = users.create_task(self._watch_processes())
            await storm.rage(self._storm)
            self._is_over = True
            guard.cancel()
        self.report.events = Counter(event.kind.name.lower().replace("_", " ") for event in self._storm)

    async def _use(self, draw: Random) -> None:
        while not self._is_over:
            await self._one_request(draw)
            await asyncio.sleep(draw.uniform(0.0, 0.1))

    async def _one_request(self, draw: Random) -> None:
        question, num_tokens = draw.choice(self._questions), draw.randint(1, ANSWER_LEN)
        deadline_s = draw.uniform(4.0, 12.0)
        kind = draw.choices(("ask", "stream", "leave", "slow", "bad"), (30, 35, 15, 8, 12))[0]
        async with asyncio.timeout(deadline_s + PATIENCE_S):
            match kind:
                case "ask":
                    came = await self._clients.ask(question, num_tokens, deadline_s)
                case "stream":
                    came = await self._clients.stream(question, num_tokens, deadline_s)
                case "slow":
                    came = await self._clients.stream(question, num_tokens, deadline_s, draw.uniform(0.02, 0.2))
                case "leave":
                    await self._clients.leave(question, num_tokens, draw.uniform(0.0, 1.0), draw.randint(1, 40))
                    came = True
                case _:
                    await self._clients.misbehave(draw)
                    came = True
        if not came:
            await asyncio.sleep(draw.uniform(0.05, 0.3))

    def _burst(self) -> None:
        assert self._users is not None
        for _ in range(10 * NUM_USERS):
            self._users.create_task(self._one_request(Random(self._draw.random())))

    async def _change_role(self, worker: str) -> None:
        workers = (await self._http.get("/server_info")).json()["engine"]["workers"]
        role = next(known["role"] for known in workers if known["name"] == worker)
        self.note(f"           {worker}: {await self._ask_role(worker, _OTHER_ROLE[role])}")

    async def _ask_role(self, worker: str, role: str) -> str:
        """What the front says to it. Half a second of grace: answers move, too."""
        reply = await self._http.post("/admin/role", json={"worker": worker, "role": role, "grace_s": 0.5})
        assert reply.status_code in (200, 202, 409), reply.text
        return "refused" if reply.is_error else "changing" if reply.json()["changing"] else "held"

    async def _restore_roles(self) -> None:
        """All are again what they were started as. Raises AssertionError when that takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        for worker in CHANGELINGS:
            while (said := await self._ask_role(worker, worker.split("-")[0])) != "held":
                assert time.monotonic() < deadline, f"{worker}: its role is not restored: {said}"
                await asyncio.sleep(0.25)

    async def _watch_processes(self) -> None:
        """Until cancelled. Raises AssertionError when one ended that nobody killed."""
        while True:
            for process in self._cluster.processes.values():
                if process.is_ready:
                    process.assert_alive()
            await asyncio.sleep(0.5)

    async def _tell_progress(self, say: Callable[[str], None], memory: Memory) -> None:
        """Once a minute, until cancelled."""
        for minute in range(1, 10**6):
            await asyncio.sleep(60.0)
            tally = self._clients.tally
            done = f"{tally.num_requests} requests, {tally.num_right} right, {tally.num_errors} errors"
            rss = ", ".join(f"{name} {mib:.0f}" for name, mib in memory.last().items())
            say(f"{minute} min: {done}; resident MiB: {rss}")

    # ------------------------------------------------------------ calm again

    async def _canaries(self) -> None:
        gate = asyncio.Semaphore(CALM_AT_ONCE)

        async def sing(question: Question) -> None:
            async with gate:
                assert await self._clients.stream(question, ANSWER_LEN, PATIENCE_S), "a canary was not answered"

        await asyncio.gather(*map(sing, self._draw.choices(self._questions, k=NUM_CANARIES)))

    async def _wait_quiet(self) -> None:
        """Nothing is held for any request, by reports made after now. Raises AssertionError naming what stays."""
        await wait_reports(self._http)
        deadline = time.monotonic() + PATIENCE_S
        while found := await held(self._http):
            assert time.monotonic() < deadline, f"still held: {found}"
            await asyncio.sleep(0.25)
        info = (await self._http.get("/server_info")).json()["engine"]
        assert info["integrity"] is None and info["internal_errors"] == 0, info


@asynccontextmanager
async def beside(*watchers: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run these as long as the block; a watcher that fails is told of afterwards."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        assert isinstance(end, asyncio.CancelledError), f"a watcher ended: {end!r}"


async def soak(
    seed: int,
    storm_s: float,
    say: Callable[[str], None],
    wanted: Callable[[int], Settings] = settings,
    late_s: float = LATE_S,
) -> Report:
    """One run, checked. `wanted`: settings for a port. `late_s`: how long after its deadline an answer may come. On
    failure the event log and the ends of all logs are noted on the exception."""
    with TemporaryDirectory(prefix="chaos-") as folder:
        cluster = Cluster(Path(folder), Random(f"cluster {seed}"), wanted=wanted)
        async with running(cluster) as http:
            run = Run(cluster, http, seed, storm_s, late_s)
            try:
                return await run.go(say)
            except BaseException as error:
                error.add_note(f"seed {seed}; what was done:\n" + "\n".join(run.log[-60:]))
                raise


def warm_up_s(storm_s: float) -> float:
    return min(WARM_UP_S, storm_s / 3)


def max_slope(storm_s: float) -> float:
    """MiB a minute. A small leak shows in ten minutes, nothing does in one.

    What shows in three is a leak per token: 8 MiB a minute are some 200 bytes for each.
    """
    return 1.0 if storm_s >= 600 else 8.0 if storm_s >= 150 else math.inf


def assert_kept(report: Report) -> None:
    """What can only be judged in the end."""
    for name, (before, after) in report.counts.items():
        assert after == before, f"{name}: {before} became {after}\n{difference(before, after)}"
    most, minutes = max_slope(report.storm_s), (report.storm_s - warm_up_s(report.storm_s)) / 60
    for name, growth in report.growth.items():
        told = f"{name} grows by {growth.mib_per_min:.2f} MiB a minute, by {growth.mib:.1f} MiB in all"
        # a leak does both: half of the spans may rise on a busy machine, and what rose is given back
        assert growth.mib_per_min < most or growth.mib < most * minutes / 2, told
        assert growth.mib < MAX_GROWTH_MIB, f"{name} grew by {growth.mib:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the storm")
    parser.add_argument("--seed", type=int, default=None, help="by default another one each time; it is printed")
    parser.add_argument(
        "--transfer-backend", choices=get_args(TransferBackend), default="auto", help="what moves pages"
    )
    parser.add_argument(
        "--conditional-prefill", choices=get_args(Weighing), default="auto", help="who computes a prompt"
    )
    parser.add_argument(
        "--cache-dir", default="auto", help="folder of files under the caches, off; auto is one that goes with the run"
    )
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with TemporaryDirectory(prefix="chaos-files-") as own:
        wanted = partial(
            settings,
            backend=args.transfer_backend,
            conditional_prefill=args.conditional_prefill,
            cache_dir={"auto": own, "off": None}.get(args.cache_dir, args.cache_dir),
        )
        told = partial(print, flush=True)
        report = asyncio.run(soak(seed, 60 * args.minutes, told, wanted, OWN_MACHINE_LATE_S))
    print(report, flush=True)
    assert_kept(report)


if __name__ == "__main__":
    main()
