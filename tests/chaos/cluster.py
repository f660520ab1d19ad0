"""The processes of a server, each worker behind a proxy: what `deltaserve serve` starts, kept by this test instead.

The test stands in for the supervisor (the children's own end of that channel is the real one), so it decides whether a
death is told to the others, as on one machine, or is only noticed by silence, as between machines.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

import httpx
import msgspec

from deltaserve.launch.compose import Checkpoint, resolve_settings, worker_child, worker_names, worker_spec
from deltaserve.launch.serve import cluster_secret, front_spec
from deltaserve.process.children.child import Child, ChildSpec
from deltaserve.process.children.log_file import LogFile
from deltaserve.process.children.notices import PeerDown, Ready, Welcome
from deltaserve.process.front.front_spec import FrontWorker, front_child
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import DisaggregationSettings, MemorySettings, ModelSettings, NetworkSettings, Settings
from deltaserve.settings.config import SchedulingSettings as Scheduling
from tests.chaos.proxy import FAIR, Proxy
from tests.e2e.server import ROOT, is_held
from tests.patience import PATIENCE_S
from tests.ports import free_ports

TransferBackend = Literal["auto", "local", "nixl"]
Weighing = Literal["off", "auto"]
MODEL = ROOT / "models" / "recall-micro"
FRONT = "front"
MAX_QUEUE = 48
"""Requests the front admits at a time: an overload is refused, not queued for minutes."""
NUM_WORKERS = 4
"""Half of them prefill, half decode."""
NUM_PAGES = 256
"""Six documents: most questions find their document evicted on one side or the other, so pages move all the time."""
FILE_MIB = 32
_LOOK_S = 0.02


def settings(
    port: int,
    backend: TransferBackend = "auto",
    conditional_prefill: Weighing = "off",
    cache_dir: str | None = None,
) -> Settings:
    """`conditional_prefill`: off, every prompt is prefill's and its pages move, which is what most storms are about; on
    one machine's cores auto has decode compute nearly all. `cache_dir`: folder of a file under the cache of each
    worker, four times as large as its memory."""
    memory = MemorySettings(page_size=16, num_pages=NUM_PAGES)
    if cache_dir is not None:
        memory = memory.model_copy(update={"cache_dir": cache_dir, "cache_dir_mib": FILE_MIB})
    return Settings(
        model=ModelSettings(model_path=str(MODEL), device="cpu"),
        memory=memory,
        scheduling=Scheduling(
            max_queued_requests=MAX_QUEUE,
            max_running_requests=16,
            chunked_prefill_size=64,
            num_reserved_decode_tokens=32,
            num_threads=1,
        ),
        disaggregation=DisaggregationSettings(
            prefill=NUM_WORKERS // 2,
            decode=NUM_WORKERS // 2,
            verify="crc",
            conditional_prefill=conditional_prefill,
            disaggregation_transfer_backend=backend,
        ),
        network=NetworkSettings(port=port),
    )


@dataclass(slots=True)
class Process:
    """One child over all its starts."""

    spec: ChildSpec
    log_path: Path
    url: str
    """Where it listens; the same after a restart."""
    child: Child | None = None
    num_starts: int = 0
    is_ready: bool = False
    is_stopped: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        assert self.child is not None, f"{self.name} is dead"
        return self.child.pid

    def start(self) -> None:
        first = self.num_starts == 0
        self.child = Child(self.spec, LogFile(self.log_path), Welcome(None if first else self.url, ()))
        self.num_starts += 1
        self.is_ready = False

    async def wait_ready(self) -> None:
        """Raises AssertionError when it does not come up."""
        async with asyncio.timeout(PATIENCE_S):
            while self.child is not None and not any(isinstance(notice, Ready) for notice in self.child.hear()):
                self.assert_alive()
                await asyncio.sleep(_LOOK_S)
        self.is_ready = True

    def kill(self) -> None:
        """SIGKILL and reap. Nothing when it is dead already."""
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
            self.child.reap()
            self.child, self.is_ready, self.is_stopped = None, False, False

    def stop(self) -> None:
        if self.child is not None:
            self.child.signal(signal.SIGSTOP)
            self.is_stopped = True

    def resume(self) -> None:
        if self.child is not None:
            self.child.signal(signal.SIGCONT)
            self.is_stopped = False

    def assert_alive(self) -> None:
        """Nobody but this test ends a process."""
        assert not self.has_ended, f"{self.name} ended by itself: {self.tail()}"

    @property
    def has_ended(self) -> bool:
        """By itself: it is not reaped yet."""
        if self.child is None:
            return False
        return os.waitid(os.P_PIDFD, self.child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def tail(self, num_lines: int = 30) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
        return f"--- {self.name}\n" + "\n".join(lines)


class Cluster:
    """A front, two prefill and two decode workers; a proxy on the link port of each worker."""

    def __init__(
        self,
        folder: Path,
        draw: Random,
        adjust: Callable[[WorkerSpec], WorkerSpec] = lambda spec: spec,
        wanted: Callable[[int], Settings] = settings,
    ) -> None:
        """`adjust`: the last word about each worker. `wanted`: settings for a port."""
        self.port, *self._worker_ports = free_ports(1 + NUM_WORKERS)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.proxies: dict[str, Proxy] = {}
        self.processes: dict[str, Process] = {}
        self._folder = folder
        self._draw = draw
        self._adjust = adjust
        self._wanted = wanted

    async def start(self) -> None:
        """All processes are ready when this returns."""
        wanted = self._wanted(self.port)
        checkpoint = Checkpoint.open(wanted.model.model_path)
        names = worker_names(wanted)
        resolved = resolve_settings(wanted, checkpoint)
        secret = cluster_secret(wanted, self._folder)
        workers = []
        for (name, role), port in zip(names, self._worker_ports, strict=True):
            made = worker_spec(name, role, wanted, checkpoint, resolved[role], secret)
            spec = msgspec.structs.replace(self._adjust(made), port=port)
            workers.append(FrontWorker(name=name, role=role, url=await self._open_proxy(name, port)))
            self._add(worker_child(spec, self._folder), f"tcp://127.0.0.1:{port}")
        front = msgspec.structs.replace(front_spec(wanted, checkpoint, secret), workers=tuple(workers))
        self._add(front_child(front, self._folder), self.base_url)
        for process in self.processes.values():
            process.start()
        for process in self.processes.values():
            await process.wait_ready()

    def _add(self, spec: ChildSpec, url: str) -> None:
        own = replace(spec, env={**spec.env, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"})
        self.processes[spec.name] = Process(own, self._folder / f"{spec.name}.log", url)

    async def _open_proxy(self, name: str, port: int) -> str:
        proxy = self.proxies[name] = Proxy(port, Random(self._draw.random()))
        return f"tcp://127.0.0.1:{await proxy.open()}"

    async def close(self) -> None:
        """No process outlives it."""
        for process in self.processes.values():
            process.kill()
        for proxy in self.proxies.values():
            await proxy.close()

    def tell_death(self, name: str) -> None:
        """What a supervisor does when it has reaped a process."""
        for process in self.processes.values():
            if process.child is not None and process.name != name:
                process.child.tell(PeerDown(name))

    async def heal(self) -> None:
        """Nothing is disturbed any more, and whoever was dead is ready again."""
        for proxy in self.proxies.values():
            proxy.weather = FAIR
        for process in self.processes.values():
            if process.is_stopped:
                process.resume()
            if process.child is None:
                process.start()
                await process.wait_ready()

    def tails(self) -> str:
        return "\n".join(process.tail() for process in self.processes.values())


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A started cluster and a client of it; a failure is told with the ends of all logs."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=cluster.base_url, limits=limits, timeout=PATIENCE_S, trust_env=False) as http:
        try:
            await cluster.start()
            yield http
        except BaseException as error:
            error.add_note(cluster.tails())
            raise
        finally:
            await cluster.close()


# ---------------------------------------------------------------- what the server tells of itself


async def worker_metrics(http: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """Worker |-> its metrics; without any while it is not connected."""
    info = (await http.get("/server_info")).raise_for_status().json()
    workers = info["engine"]["workers"]
    return {w["name"]: (w["status"] or {}).get("metrics", {}) if w["state"] == "ready" else {} for w in workers}


async def wait_reports(http: httpx.AsyncClient) -> None:
    """Until every worker has reported what it has made since now: the first report that comes may have been under way.
    Raises AssertionError naming who has not."""

    async def count() -> dict[str, int]:
        workers = (await http.get("/server_info")).raise_for_status().json()["engine"]["workers"]
        return {worker["name"]: worker["reports"] for worker in workers}

    before, deadline = await count(), time.monotonic() + PATIENCE_S
    while late := [name for name, num in (await count()).items() if num < before.get(name, 0) + 2]:
        assert time.monotonic() < deadline, f"no reports: {late}"
        await asyncio.sleep(0.05)


async def wait_ready(http: httpx.AsyncClient) -> None:
    """Every worker is connected, not only enough of them. Raises AssertionError naming their states."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        info = (await http.get("/server_info")).json()
        states = {worker["name"]: worker["state"] for worker in info["engine"]["workers"]}
        if set(states.values()) == {"ready"} and (await http.get("/readyz")).status_code == 200:
            return
        assert time.monotonic() < deadline, f"not ready: {states}"
        await asyncio.sleep(0.1)


async def held(http: httpx.AsyncClient) -> dict[str, float]:
    """What is held for some request anywhere: empty when nothing runs and nothing leaked."""
    info = (await http.get("/server_info")).raise_for_status().json()
    found: dict[str, float] = {"front rooms": info["engine"]["rooms"], "front requests": info["requests"]}
    for name, values in (await worker_metrics(http)).items():
        found |= {f"{name} {key}": value for key, value in values.items() if is_held(key)}
        found |= {} if values else {f"{name} unreported": 1}
    return {key: value for key, value in found.items() if value}
