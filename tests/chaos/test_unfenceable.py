"""A transport that cannot be fenced (shared memory): what a dead writer might still reach is never used again."""

import asyncio
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import msgspec

from deltaserve.process.worker.worker_spec import WorkerSpec
from tests.chaos.cluster import MODEL, NUM_PAGES, Cluster, running, worker_metrics
from tests.chaos.traffic import ANSWER_LEN, Clients, Question, make_questions
from tests.patience import PATIENCE_S

PREFILLS = ("prefill-0", "prefill-1")
SEED = 5
ATTEMPTS = 8
REPORTED_S = 3.0
"""Workers report twice a second, and decode has missed a dead writer long before."""


def over_shared_memory(spec: WorkerSpec) -> WorkerSpec:
    return msgspec.structs.replace(spec, transport="nixl", transport_tls="posix,cma,tcp,self")


async def quarantined(http: httpx.AsyncClient) -> dict[str, float]:
    """Decode worker |-> pages in quarantine, and that the books agree."""
    found = {}
    for name, metrics in (await worker_metrics(http)).items():
        if name.startswith("decode") and metrics:
            pages = {key: n for key, n in metrics.items() if key.startswith("deltaserve_pages{")}
            assert sum(pages.values()) == NUM_PAGES, f"{name}: {pages}"
            found[name] = sum(n for key, n in pages.items() if 'state="quarantined"' in key)
    return found


async def revive(cluster: Cluster) -> None:
    """Whoever has ended is started again: for pages in quarantine for long, or as UCX itself crashes on shared memory
    whose writer is gone (seen once). As safe as waiting."""
    for process in cluster.processes.values():
        if process.has_ended:
            process.kill()
            cluster.tell_death(process.name)
    await cluster.heal()


async def connected(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Every worker talks to the front. Ready for requests it need not be: much in quarantine is a reason not to."""
    async with asyncio.timeout(PATIENCE_S):
        while not all((await worker_metrics(http)).values()):
            await revive(cluster)  # a drain may end at any moment
            await asyncio.sleep(0.1)


async def lose_writers(cluster: Cluster, http: httpx.AsyncClient, questions: list[Question], after_s: float) -> float:
    """Kill both prefill workers in the middle of many transfers and start them again; pages in quarantine then."""
    clients = Clients(http, MODEL.name, lambda began: 0.0)
    asked = [asyncio.create_task(clients.ask(question, 4, 20.0)) for question in questions]
    await asyncio.sleep(after_s)
    for name in PREFILLS:
        cluster.processes[name].kill()
        cluster.tell_death(name)
    await asyncio.gather(*asked)  # rightly answered, or with an error that says that it may be sent again
    await revive(cluster)
    await connected(cluster, http)
    await asyncio.sleep(REPORTED_S)
    return sum((await quarantined(http)).values())


async def scene(folder: Path) -> None:
    draw = Random(SEED)
    cluster = Cluster(folder, draw, over_shared_memory)
    async with running(cluster) as http:
        questions = make_questions(SEED)
        for _ in range(ATTEMPTS):
            if await lose_writers(cluster, http, draw.sample(questions, 24), draw.uniform(0.1, 0.4)):
                break
        before = await quarantined(http)
        assert sum(before.values()) > 0, "no writer was killed in the middle of a transfer"
        clients = Clients(http, MODEL.name, lambda began: 0.0)
        for question in questions[::6]:
            await clients.stream(question, ANSWER_LEN, 20.0)  # right, or an honest error: decode may give that peer up
        await asyncio.sleep(REPORTED_S)
        after = await quarantined(http)
        for name, num_pages in before.items():  # too many for too long: then it ends, to be started anew
            assert cluster.processes[name].has_ended or after[name] == num_pages


def test_pages_that_cannot_be_fenced_stay_quarantined_and_no_answer_is_wrong() -> None:
    with TemporaryDirectory(prefix="chaos-") as folder:
        asyncio.run(scene(Path(folder)))
