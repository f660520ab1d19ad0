"""How a server behaves around its requests: listeners, secrets, draining, life and readiness, emptying the caches."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from tests.e2e.server import ROOT, Server, serving, wait_until
from tests.halting import halted, losing_its_port
from tests.patience import PATIENCE_S
from tests.process.worker.server import is_alive

MODEL = ROOT / "models" / "recall-micro"
FLAGS = ("--page-size", "16", "--num-pages", "2048", "--context-length", "8192")
PROMPT = list(range(32, 112))
LONG, NUM_SAMPLES = 7900, 2
"""Output that takes many seconds on any machine: nobody waits for its end."""
MANY = 1900
"""Output of one sample that takes a second, and is waited for."""
MAX_TRIES = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), MODEL, *FLAGS, "--log-dir", f"{folder}/logs", deaths=None) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def mortal(server: Server) -> Server:
    """The same, for those tests at the end whose workers die one after the other; until then none has."""
    assert server.deaths() == []
    return server


class Stream(threading.Thread):
    """A long answer, read in a thread."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__()
        self.events: list[str] = []
        self.begun = threading.Event()
        self._server = server
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        self._body = server.body(PROMPT, max_tokens=max_tokens, n=NUM_SAMPLES, **fields)
        self.start()

    def run(self) -> None:
        url = f"{self._server.base_url}/v1/completions"
        with suppress(httpx.TransportError), httpx.stream("POST", url, json=self._body, timeout=PATIENCE_S) as reply:
            for line in filter(None, reply.iter_lines()):
                self.events.append(line.removeprefix("data: "))
                self.begun.set()


@contextmanager
def stream_in_its_middle(server: Server, max_tokens: int) -> Iterator[Stream]:
    """No token of the stream is computed while this lasts, and some are still to come: decode stands still."""
    for _ in range(MAX_TRIES):
        stream = Stream(server, max_tokens)
        assert stream.begun.wait(PATIENCE_S)
        with halted(server.pid("decode-0")):
            if stream.is_alive():
                yield stream
                return
        stream.join(PATIENCE_S)
    raise AssertionError("no stream takes long enough here to be met in its middle")


# ---------------------------------------------------------------- logs


def test_the_operator_sees_warnings_and_finds_the_logs(server: Server) -> None:
    server.complete(PROMPT, 1, temprature=1)
    warning = "WARNING request field 'temprature' is unknown and ignored; did the client mean 'temperature'?"
    wait_until(lambda: warning in server.log(), "the warning", server)
    logs = server.folder / "logs"
    assert f"logs of all processes: {logs}" in server.log()
    assert {path.name for path in logs.iterdir()} == {"front.log", "preload.log", "prefill-0.log", "decode-0.log"}
    assert warning.partition("WARNING ")[2] in (logs / "front.log").read_text()


def test_a_worker_comes_back_after_everything_of_the_start_was_removed(tmp_path: Path) -> None:
    """As somebody does who clears /tmp: its spec and the key of the cluster are there again."""
    with serving(tmp_path, MODEL, *FLAGS, "--disaggregation-mode", "null", deaths=1) as server:
        (folder,) = tmp_path.glob("deltaserve-*")
        shutil.rmtree(folder)
        os.kill(server.pid("unified-0"), signal.SIGKILL)
        wait_until(lambda: server.log().count("all processes are ready") == 2, "the second start", server)
        server.wait_ready()
        assert len(server.complete(PROMPT, 4).tokens) == 4
    assert not list(tmp_path.glob("deltaserve-*"))


def test_a_container_has_all_logs_on_one_stream_each_line_an_object(tmp_path: Path) -> None:
    flags = ("--disaggregation-mode", "null", "--log-format", "json", "--log-to", "stdout")
    with serving(tmp_path, MODEL, *FLAGS, *flags) as server:
        server.complete(PROMPT, 1, temprature=1)
        wait_until(lambda: "is unknown and ignored" in server.log(), "the warning", server)
        assert not list(tmp_path.rglob("deltaserve-*/*.log"))
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert {line["process"] for line in lines} == {"serve", "front", "unified-0"}
    assert sum("is unknown and ignored" in line.get("message", "") for line in lines) == 1
    requests = [line["fields"] for line in lines if line.get("logger") == "deltaserve.server.requests"]
    assert [sample["prompt_tokens"] for request in requests for sample in request["samples"]] == [len(PROMPT)]


# ---------------------------------------------------------------- listeners and secrets


def test_every_listener_of_every_process_is_on_this_machine_only(server: Server) -> None:
    """The supervisor and nobody else has none; the front one, as it has no keys."""
    ports: dict[str, list[int]] = {}
    for name, pid in server.pids().items():
        listening = [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1"}, (name, listening)
        ports[name] = [address.port for address in listening]
    assert ports["supervisor"] == []
    assert ports["front"] == [server.port]
    assert len(ports["prefill-0"]) >= 1
    assert len(ports["decode-0"]) >= 1


def test_no_secret_is_in_an_argument_the_environment_or_a_file_of_others(server: Server) -> None:
    (folder,) = server.folder.glob("deltaserve-*")
    secret = (folder / "cluster.key").read_bytes().strip()
    assert folder.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
    for pid in server.pids().values():
        for place in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{place}").read_bytes()
    assert all(secret not in file.read_bytes() for file in folder.glob("*.log"))


def test_ps_tells_workers_apart(server: Server) -> None:
    """Though both are forks of one process, which loaded torch for them."""
    for name in ("prefill-0", "decode-0"):
        command = psutil.Process(server.pid(name)).cmdline()
        assert command[1:3] == ["-m", "deltaserve.process.worker.worker"]
        assert Path(command[3]).name == f"{name}.json"
    (preload,) = (
        process
        for process in psutil.Process(server.popen.pid).children()
        if "deltaserve.process.worker.worker_forks" in process.cmdline()
    )
    assert preload.num_threads() == 1


def test_no_process_shares_memory_by_name(server: Server) -> None:
    for name, pid in server.pids().items():
        mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        assert not [path for path in mapped if path.startswith("/dev/shm")], name


# ---------------------------------------------------------------- caches


def test_flush_empties_both_trees_and_the_next_answer_is_the_same(server: Server) -> None:
    answer = server.complete(PROMPT)
    assert server.complete(PROMPT).cached_len > 0
    server.wait_quiet()  # a page that a request holds is not flushed
    assert all(pages > 0 for pages in server.cached().values())
    reply = server.http.post("/flush_cache")
    assert reply.status_code == 202
    assert reply.json()["evictable_pages"].keys() == {"prefill-0", "decode-0"}
    wait_until(lambda: all(pages == 0 for pages in server.cached().values()), "empty trees")
    again = server.complete(PROMPT)
    assert (again.cached_len, again.tokens) == (0, answer.tokens)


def test_a_request_without_cache_leaves_and_finds_nothing(server: Server) -> None:
    """What warm-up, probes and benchmarks may say; there is no magic prompt or host."""
    server.flush()
    for _ in range(2):
        assert server.complete(PROMPT, no_cache=True).cached_len == 0
    server.wait_quiet()
    assert set(server.cached().values()) == {0.0}


# ---------------------------------------------------------------- life


def test_a_client_that_leaves_takes_its_room_with_it(server: Server) -> None:
    body = server.body(PROMPT, max_tokens=LONG, n=NUM_SAMPLES, stream=True)
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)  # kept: an iterator that is dropped closes the connection
        assert server.info()["engine"]["rooms"] == NUM_SAMPLES, "asked too late to show anything"
    wait_until(lambda: server.info()["engine"]["rooms"] == 0, "the room to end")
    server.wait_quiet()


def test_a_prefill_death_is_about_readiness_not_life(mortal: Server) -> None:
    """Front and decode live on as the processes they were; readiness names who is missing, and comes back."""
    before, deaths = mortal.pids(), len(mortal.deaths())
    with mortal.killed("prefill-0"):
        wait_until(lambda: not mortal.is_ready(), "the death to be noticed")
        reply = mortal.http.get("/readyz")
        assert reply.status_code == 503
        assert "prefill-0" in reply.json()["reasons"]["engine"]
        assert mortal.http.get("/livez").status_code == 200
    while not mortal.is_ready():
        assert mortal.http.get("/livez").status_code == 200
    mortal.wait_back("prefill-0")
    assert {name for name, pid in mortal.pids().items() if pid != before[name]} == {"prefill-0"}
    mortal.complete(PROMPT)
    assert len(mortal.deaths()) == deaths + 1


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_whose_port_was_taken_meanwhile_is_found_elsewhere(mortal: Server, name: str) -> None:
    answer, deaths = mortal.complete(PROMPT), len(mortal.deaths())
    port = mortal.worker_port(name)
    with losing_its_port(mortal.pid(name), port, mortal.popen.pid):
        wait_until(lambda: mortal.worker_port(name) != port, "another port", mortal)
        wait_until(mortal.is_ready, "readiness", mortal)
        assert mortal.complete(PROMPT, no_cache=True).tokens == answer.tokens
    assert len(mortal.deaths()) == deaths + 1


def reasons(server: Server) -> dict[str, str]:
    """Why it is not ready, by source; empty when it is."""
    found: dict[str, str] = server.http.get("/readyz").json().get("reasons", {})
    return found


def test_sigterm_refuses_what_is_new_and_finishes_what_is_there(folder: Path) -> None:
    """Readiness ends at once, the stream is finished, every exit code is 0."""
    with serving(folder, MODEL, *FLAGS, "--shutdown-grace-s", str(PATIENCE_S)) as server:
        with stream_in_its_middle(server, MANY) as stream:
            os.kill(server.popen.pid, signal.SIGTERM)
            wait_until(lambda: "draining" in reasons(server), "draining")
            told = reasons(server)
            assert "decode-0" in told.pop("engine", "decode-0 stands still")
            assert told.keys() == {"draining"}
            refused = server.http.post("/v1/completions", json=server.body(PROMPT, max_tokens=1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert told["draining"] in refused.json()["error"]["message"]
            assert server.http.get("/livez").status_code == 200
            assert stream.is_alive(), "asked too late to show anything"
        stream.join(PATIENCE_S)
        assert stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["usage"]["completion_tokens"] == MANY * NUM_SAMPLES
        assert server.popen.wait(PATIENCE_S) == 0
        assert all(line.endswith("exit code 0") for line in server.deaths())
        assert not any(is_alive(pid) for pid in server.pids().values())


def test_a_second_signal_ends_the_grace(folder: Path) -> None:
    """The stream does not end well, nothing outlives the supervisor, and nobody waits for either."""
    with serving(folder, MODEL, *FLAGS) as server:
        pids = server.pids()
        with stream_in_its_middle(server, LONG) as stream:
            os.kill(server.popen.pid, signal.SIGTERM)
            told = "stopping: requests in flight may end within 30 s (again: at once)"
            wait_until(lambda: told in server.log(), "the first signal")
            os.kill(server.popen.pid, signal.SIGTERM)
            stream.join(PATIENCE_S)
        assert server.popen.wait(PATIENCE_S) == 0
        assert stream.events[-1] != "[DONE]" or '"error"' in stream.events[-2]
        assert not any(psutil.pid_exists(pid) for pid in pids.values())
