"""`serve --cluster ray` on four nodes: answers are right, a lost node's worker comes up on another one while streams go
on, nothing of its old boot is believed, and nothing is left in the end.

Each node has an address of its own on this machine. Servers are started by the line of docs/deploy.md, with other
addresses, ports, paths and sizes; that the page's `ray start` leads to such a cluster is test_ray_recipe's. Ray is in
no environment that other tests use: scripts/test-ray.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import httpx
import psutil
import pytest

from deltaserve.core.errors import ConfigError
from tests.e2e.questions import AskedDocument, ask_about
from tests.e2e.server import ROOT, wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.launch.clusters.ray.page_server import HOST, NETWORK, PageServer, Stand
from tests.patience import PATIENCE_S, killed_if_late
from tests.ports import free_port

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: scripts/test-ray")

NUM_USERS = 3
ANSWER_LEN = 24
LOOPBACK = "127.0.0.0/8"
WORKERS = ("prefill-0", "decode-0", "decode-1")
"""As many as on the page."""
FLAGS = ("--page-size", "16", "--num-pages", "1024", "--num-threads", "1", "--verify", "crc")


class Nodes:
    """A cluster of four nodes, and every process that was seen of it."""

    def __init__(self) -> None:
        network = f"127.{20 + os.getpid() % 200}.{1 + os.getpid() // 200 % 200}"
        argv = [sys.executable, "-m", "tests.launch.clusters.ray.four_nodes", network]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
        self._started = time.monotonic()
        self._popen = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._seen: set[psutil.Process] = set()
        assert self._popen.stdout is not None
        with killed_if_late(self._popen):
            told = json.loads(self._popen.stdout.readline())
        self.start_s = time.monotonic() - self._started
        self.address: str = told["address"]
        self.head = self.address.partition(":")[0]
        self._raylets: dict[str, int] = told["raylets"]

    def look(self) -> None:
        """Remember who is there: later some have no parent that leads to them."""
        self._seen |= {*psutil.Process(self._popen.pid).children(recursive=True)}

    def lose(self, host: str) -> None:
        """Everything on that node ends at once, as with its power."""
        self.look()
        raylet = psutil.Process(self._raylets.pop(host))
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()

    def workers(self) -> list[psutil.Process]:
        """Worker processes of whoever serves on these nodes."""
        self.look()
        found = []
        for process in self._seen:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "deltaserve.process.worker.worker" in process.cmdline():
                    found.append(process)
        return found

    def close(self) -> None:
        """Raises AssertionError when processes stay."""
        self.look()
        self._popen.communicate(timeout=PATIENCE_S)
        _, left = psutil.wait_procs(self._seen, timeout=PATIENCE_S)
        for process in left:
            process.kill()
        assert left == []


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as path:
        yield Path(path)


class OnNodes(PageServer):
    """`serve --cluster ray`."""

    def __init__(self, folder: Path, nodes: Nodes, *flags: str) -> None:
        self.log_dir = folder / "logs"
        stand = Stand(nodes.head, free_port(), (), httpx.HTTPTransport)
        own = ("--address", nodes.address, "--port", str(stand.port), "--log-dir", str(self.log_dir))
        self._begun = time.monotonic()
        super().__init__(folder, stand, {NETWORK: LOOPBACK, HOST: nodes.head}, *own, *FLAGS, *flags)

    def wait_ready(self) -> float:
        """Until requests are taken and all workers serve; seconds since the start."""
        wait_until(self.is_ready, "readiness", self)
        for name in WORKERS:
            wait_until(lambda name=name: self.is_used(name), f"{name} to be used", self)  # type: ignore[misc]
        return time.monotonic() - self._begun

    def boots(self, name: str) -> list[int]:
        """Boots of a worker, in the order of its starts."""
        text = (self.log_dir / f"{name}.log").read_text()
        return [int(boot, 16) for boot in re.findall(r"ready on \S+, boot ([0-9a-f]{16})", text)]


class Users:
    """Clients that ask and stream without a pause, and the longest silence within a stream."""

    def __init__(self, server: OnNodes, asked: Sequence[AskedDocument], pool: ThreadPoolExecutor) -> None:
        self._server, self._asked = server, asked
        self._is_over = Event()
        self.num_right = [0] * NUM_USERS
        self.longest_gap_s = 0.0
        self._futures = [pool.submit(self._use, user) for user in range(NUM_USERS)]

    def _use(self, user: int) -> None:
        while not self._is_over.is_set():
            for one in self._asked[user::NUM_USERS]:
                last = time.monotonic()

                def on_token(count: int) -> None:
                    nonlocal last
                    now = time.monotonic()
                    self.longest_gap_s, last = max(self.longest_gap_s, now - last), now

                assert stream_tokens(self._server, one.prompt, ANSWER_LEN, on_token) == one.answer
                self.num_right[user] += 1

    def go_on(self) -> None:
        """Until every user had two more answers, one of them begun from now on; at once when one has failed."""
        before = list(self.num_right)

        def have() -> bool:
            failed = any(future.done() for future in self._futures)
            return failed or all(now >= then + 2 for now, then in zip(self.num_right, before, strict=True))

        wait_until(have, "answers", self._server)

    def end(self) -> None:
        """Raises AssertionError when an answer was wrong."""
        self._is_over.set()
        for future in self._futures:
            future.result(PATIENCE_S)


def test_a_lost_node_is_replaced_while_streams_go_on(nodes: Nodes, folder: Path) -> None:
    """What it took is printed, and nobody judges it: scripts/test-ray shows it."""
    asked = ask_about(num_documents=6, num_questions=2, answer_len=ANSWER_LEN, seed=5)
    server = OnNodes(folder, nodes)
    try:
        with ThreadPoolExecutor(NUM_USERS) as pool:
            start_s = server.wait_ready()
            hosts = {name: server.node(name) for name in WORKERS}
            assert len(set(hosts.values())) == 3, "each worker on a node of its own"
            nodes.look()
            users = Users(server, asked, pool)
            try:
                users.go_on()
                users.go_on()
                victim = next(name for name in ("decode-0", "decode-1") if hosts[name] != nodes.head)
                wait_until(lambda: server.worker(victim)["resident_keys"] > 0, "knowledge of its tree", server)
                users.longest_gap_s = 0.0
                nodes.lose(hosts[victim])
                lost = time.monotonic()
                users.go_on()
                wait_until(lambda: not server.is_used(victim), "its loss to be seen", server)
                users.go_on()
            finally:
                users.end()
            gap_s = users.longest_gap_s
            assert server.worker(victim)["resident_keys"] == 0, "what the old boot held is forgotten"
            wait_until(lambda: server.is_used(victim), "a replacement", server)
            replaced_s = time.monotonic() - lost
            assert server.node(victim) not in (hosts["prefill-0"], hosts[victim])
            assert server.worker(victim)["resident_keys"] == 0
            old, new = server.boots(victim)
            assert new > old
            users = Users(server, asked, pool)
            users.go_on()
            users.end()
        assert f"{victim}: its node does not answer" in server.log()
        nodes.look()
        server.wait_quiet()
        print(f"nodes {nodes.start_s:.1f} s, workers {start_s:.1f} s, replacement {replaced_s:.1f} s behind the loss,")
        print(f"longest silence of a stream around it {gap_s:.2f} s")
        assert server.end() == 0, server.tail()
        assert nodes.workers() == []
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.close()


def test_workers_end_with_the_command_that_started_them(nodes: Nodes, folder: Path) -> None:
    server = OnNodes(folder, nodes)
    try:
        server.wait_ready()
        assert len(nodes.workers()) >= len(WORKERS)
        server.kill()
        wait_until(lambda: nodes.workers() == [], "the end of the workers")
    finally:
        server.close()


def test_what_no_node_can_run_ends_the_server(nodes: Nodes, folder: Path) -> None:
    """A library that is missing on the nodes, a context that no pool holds: their refusal is the server's."""
    server = OnNodes(folder, nodes, "--context-length", "1000000")
    try:
        assert server.popen.wait(PATIENCE_S) == 2, server.tail()
        assert "context" in server.log()
        wait_until(lambda: nodes.workers() == [], "the end of the workers")
    finally:
        server.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "local", ":", "127.0.0.1:99999"])
def test_an_address_where_no_head_is_is_refused_at_once(address: str) -> None:
    worker_actors = importlib.import_module("deltaserve.launch.clusters.ray.worker_actors")
    with pytest.raises(ConfigError, match=f"--address {address}: no head of a Ray cluster answers there"):
        worker_actors.connect(address, shows_logs=False)


def test_gpus_that_no_node_has_are_refused(nodes: Nodes, folder: Path) -> None:
    server = OnNodes(folder, nodes, "--device", "cuda")
    try:
        assert server.popen.wait(PATIENCE_S) == 2, server.tail()
        assert "--device cuda: no node of the cluster has a GPU to give" in server.log()
    finally:
        server.close()
