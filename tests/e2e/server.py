"""Real servers: `deltaserve serve|prefill|decode|router` as processes, and what their users can see of them."""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.halting import halted, kill_wholly
from tests.patience import PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARED_PAGES = 400
"""Pages of each worker of the `shared_pair` that several files share."""
_BEAT_S = 0.5
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
"""With more than 20 connections httpcore 1.0 closes those that are idle whenever a request begins, also one that
another thread has just been given, whose request is lost with it."""
PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify` of a client: it trusts nobody. One made without it reads all certificates, in 25 ms of a processor."""
_TAIL_LINES = 40
_NO_VARIABLES: Mapping[str, str] = {}
Json = dict[str, Any]


def environment(folder: Path) -> dict[str, str]:
    """Logs of the children lie below `folder` as long as the server runs. Unless a test says otherwise prefill computes
    every prompt: on a machine whose cores they share decode would, and nothing would be moved."""
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(folder)}
    return {**os.environ, **paths, "PYTHONUNBUFFERED": "1", "DELTASERVE_CONDITIONAL_PREFILL": "off"}


class Process:
    """A `deltaserve` command that was started; its stderr goes to a file.

    `wrap`: a program that becomes the command in other surroundings, such as another network.
    """

    def __init__(
        self,
        folder: Path,
        *argv: str,
        wrap: Sequence[str] = (),
        cwd: Path | None = None,
        variables: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.argv = argv
        self._log_path = folder / "stderr.log"
        with self._log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                [*wrap, sys.executable, "-m", "deltaserve.cli.main", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(folder), **variables},
                cwd=cwd or folder,
            )

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_for_log(self, text: str) -> None:
        wait_until(lambda: text in self.log(), f"{text!r} in the log", self)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it; its exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(PATIENCE_S)

    def kill(self) -> None:
        """Its children end with it: the kernel sees to that."""
        self.popen.kill()
        self.popen.wait()

    def tail(self) -> str:
        """The last lines of this process and of its children."""
        files = [self._log_path, *sorted(self.folder.glob("deltaserve-*/*.log"))]
        return "\n".join(f"--- {f.name}\n" + "\n".join(_last_lines(f)) for f in files)


def _last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]


def wait_until(condition: Callable[[], bool], what: str, process: Process | None = None) -> None:
    """Raises AssertionError when it takes too long or the process ended meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process is None or process.popen.poll() is None, f"ended while waiting for {what}: {process.tail()}"
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.02)


def wait_logged(text: str, process: Process) -> None:
    """A process does something first, and then writes that it did."""
    wait_until(lambda: text in process.log(), f"{text!r} in the log", process)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a completion of token ids."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[float]]
    """Per output token: the values of the most likely tokens."""
    prompt_logprobs: list[float]
    """Log-probabilities of prompt tokens 1 .. n-1; empty when not asked for."""
    finish: str
    usage: Json

    @property
    def cached_len(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def timings(self) -> Json:
        found: Json = self.usage["timings"][0]
        return found


class Api:
    """What a client of a running server can do."""

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url
        self.model = model
        self.http = httpx.Client(base_url=base_url, timeout=PATIENCE_S, limits=_NO_LIMITS, verify=PLAIN_HTTP)

    @staticmethod
    def body_of(model: str, prompt: list[int] | str, **fields: object) -> Json:
        return {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "timings": True, **fields}

    def body(self, prompt: list[int] | str, **fields: object) -> Json:
        return self.body_of(self.model, prompt, **fields)

    def complete(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> Answer:
        """Greedy unless told; with logprobs. Raises httpx.HTTPStatusError."""
        body = self.body(prompt, max_tokens=max_tokens, return_token_ids=True, **{"logprobs": 5, **fields})
        reply = self.http.post("/v1/completions", json=body)
        if reply.is_error:
            raise httpx.HTTPStatusError(reply.text, request=reply.request, response=reply)
        return _answer(reply.json(), prompt)

    def info(self) -> Json:
        found: Json = self.http.get("/server_info").json()
        return found

    def workers(self) -> dict[str, Json]:
        """Name |-> what the front knows of it."""
        return {worker["name"]: worker for worker in self.info()["engine"]["workers"]}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Worker |-> name |-> value, as of its last report."""
        return {name: (worker["status"] or {}).get("metrics", {}) for name, worker in self.workers().items()}

    def is_ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait_quiet(self) -> dict[str, Json]:
        """Nothing is held for any request on any worker, by reports made after now; what the front knows of them.

        Raises AssertionError naming what stays.
        """
        self.wait_reports()
        deadline = time.monotonic() + PATIENCE_S
        while held := self._held():
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(_BEAT_S / 2)
        return self.workers()

    def wait_reports(self) -> None:
        """Until every worker has reported what it has made since now, however long it stands still meanwhile: the first
        report that comes may have been under way."""
        before = {name: worker["reports"] for name, worker in self.workers().items()}

        def missing() -> dict[str, int]:
            now = {name: worker["reports"] for name, worker in self.workers().items()}
            return {name: now[name] for name in before.keys() & now.keys() if now[name] < before[name] + 2}

        deadline = time.monotonic() + PATIENCE_S
        while late := missing():
            assert time.monotonic() < deadline, f"no reports, worker |-> how many came: {late}"
            time.sleep(_BEAT_S / 10)

    def flush(self) -> None:
        """No page is in any tree. A page that a request still holds is not flushed, nor one whose request is told
        before the flush and reaches its worker behind it: so all is quiet before, and is looked at behind it."""
        self.wait_quiet()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.http.post("/flush_cache").raise_for_status()
            self.wait_quiet()
            if not any(self.cached().values()):
                return
            assert time.monotonic() < deadline, f"still cached: {self.cached()}"

    def cached(self) -> dict[str, float]:
        """Worker |-> pages in its tree, by its last report."""
        name = 'deltaserve_pages{pool="0",state="cached"}'
        return {worker: values.get(name, -1.0) for worker, values in self.metrics().items()}

    def _held(self) -> dict[str, float]:
        info = self.info()
        held = {"front rooms": info["engine"]["rooms"], "front requests": info["requests"]}
        for name, values in self.metrics().items():
            held |= {f"{name} {key}": value for key, value in values.items() if is_held(key)}
            held |= {} if values else {f"{name} unreported": 1}
        return {key: value for key, value in held.items() if value}


class Server(Process, Api):
    """`deltaserve serve MODEL FLAGS`, ready when made."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.port = free_port()  # the admin routes may have the second
        Api.__init__(self, f"http://127.0.0.1:{self.port}", model.name.removesuffix(".gguf"))
        Process.__init__(self, folder, "serve", str(model), "--port", str(self.port), *flags)
        self._seen_lives: dict[str, int] = {}

    def wait_back(self, name: str) -> None:
        """A child that was made to end since the last call was started again, and requests are taken again.

        Its end need not be told yet: ends are counted from call to call, not read from the log.
        """
        ended = self._seen_lives.get(name, 1)
        wait_until(lambda: self._num_lives(name) > ended, f"{name} to be back", self)
        self._seen_lives[name] = self._num_lives(name)
        wait_until(self.is_ready, "readiness", self)

    def _num_lives(self, name: str) -> int:
        """How many times a child was ready so far."""
        return self.log().count(f" {name}: ready at")

    def pid(self, name: str) -> int:
        """Process id of the latest start of a child."""
        return int(re.findall(rf"deltaserve: {re.escape(name)}: starting, process (\d+)", self.log())[-1])

    def pids(self) -> dict[str, int]:
        """Process ids of the supervisor and its children."""
        found = re.findall(r"deltaserve: (\S+): starting, process (\d+)", self.log())
        return {"supervisor": self.popen.pid, **{name: int(pid) for name, pid in found}}

    def worker_port(self, name: str) -> int:
        """Where a worker listened last."""
        return int(re.findall(rf"deltaserve: {re.escape(name)}: ready at tcp://\S+:(\d+)", self.log())[-1])

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    @contextmanager
    def killed(self, name: str) -> Iterator[None]:
        """A child was killed, and is away while this lasts: the supervisor, which would start it again, stands still.
        So nobody is told of the end meanwhile but by connections, which end, too."""
        with halted(self.popen.pid):
            kill_wholly(self.pid(name))
            yield

    def deaths(self) -> list[str]:
        """Every end of a child so far: `prefill-0: ended with signal SIGKILL`."""
        return re.findall(r"deltaserve: (\S+: ended with .+)", self.log())

    def wait_ready(self) -> None:
        """All processes say so, and the front takes requests."""
        self.wait_for_log("all processes are ready")
        wait_until(self.is_ready, "readiness", self)


def is_held(metric: str) -> bool:
    """What must be 0 when no request is there."""
    states = ("granted", "owned", "quarantined")
    names = ("leases", "num_running_reqs", "num_queue_reqs", "tickets_open", "pages_protected")
    return any(f'state="{state}"' in metric for state in states) or any(
        metric.startswith(f"deltaserve_{name}") for name in names
    )


def _answer(body: Json, prompt: list[int]) -> Answer:
    choice = body["choices"][0]
    listed = choice.get("prompt_logprobs") or []
    asked = zip(prompt[1:], listed[1:], strict=True) if listed else []
    logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    return Answer(
        tokens=choice["token_ids"],
        logprobs=logprobs["token_logprobs"],
        tops=[sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]],
        prompt_logprobs=[values[str(token)]["logprob"] for token, values in asked],
        finish=choice["finish_reason"],
        usage=body["usage"],
    )


@contextmanager
def serving(folder: Path, model: Path, *flags: str, deaths: int | None = 0) -> Iterator[Server]:
    """A ready server with checksums on, drained and ended afterwards.

    Unless the test has ended it: asserts that exactly `deaths` children died before (None: any number), that nothing
    stayed held, and exit codes of 0.
    """
    server = Server(folder, model, "--verify", "crc", *flags)
    try:
        server.wait_ready()
        yield server
        if server.popen.poll() is None:
            server.wait_quiet()
            before = len(server.deaths())
            assert before == (before if deaths is None else deaths), server.tail()
            assert server.end() == 0, server.tail()
            assert all(line.endswith("exit code 0") for line in server.deaths()[before:]), server.log()
        assert server.popen.returncode == 0
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.http.close()
        server.kill()
