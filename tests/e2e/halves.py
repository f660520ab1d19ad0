"""A prefill and a decode worker that each take their half of every request by HTTP, as routers of others send them; and
a front of ours in front of the same two, whose answers are those to compare with."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.e2e.server import Api, Json, Process, Server, wait_until
from tests.patience import PATIENCE_S
from tests.ports import free_port, free_ports

AS_USERS_HAVE_IT = {"DELTASERVE_CONDITIONAL_PREFILL": "auto"}
"""Decode must ask for prefill's half of every prompt all the same."""
FLAGS = ("--page-size", "16", "--num-pages", "512", "--verify", "crc", "--shutdown-grace-s", "1")


class HalfWorker(Server):
    """`deltaserve ROLE MODEL --http PORT`."""

    def __init__(self, folder: Path, role: str, model: Path, key: Path) -> None:
        self.role = role
        self.link_port, self.port = free_ports(2)
        Api.__init__(self, f"http://127.0.0.1:{self.port}", model.name)
        link = ("--disaggregation-bootstrap-port", str(self.link_port), "--cluster-key-file", str(key))
        ports = ("--http", str(self.port), *link)
        Process.__init__(self, folder / role, role, str(model), *ports, *FLAGS, variables=AS_USERS_HAVE_IT)
        self._seen_lives: dict[str, int] = {}

    @property
    def worker(self) -> str:
        """Its name."""
        return f"{self.role}-127.0.0.1:{self.link_port}"

    @property
    def entry(self) -> str:
        """As `deltaserve router` names it."""
        return f"{self.role}@127.0.0.1:{self.link_port}"


class Halves:
    """Both of them, ready."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.model = model
        self.key = folder / "cluster.key"
        self.key.touch(mode=0o600)
        self.key.write_text(secrets.token_urlsafe(48))
        self.prefill, self.decode = (HalfWorker(folder, role, model, self.key) for role in ("prefill", "decode"))
        self._folder, self._stack = folder, stack
        self._threads = stack.enter_context(ThreadPoolExecutor(8))
        for each in (self.prefill, self.decode):
            stack.callback(each.kill)
            stack.callback(each.http.close)
        for each in (self.prefill, self.decode):
            each.wait_ready()

    def own_front(self) -> Api:
        """Ours, of the same two workers."""
        port = free_port()
        workers = f"{self.prefill.entry},{self.decode.entry}"
        argv = ("--port", str(port), "--cluster-key-file", str(self.key), "--page-size", "16", "--workers", workers)
        router = Process(self._folder / "router", "router", str(self.model), *argv)
        api = Api(f"http://127.0.0.1:{port}", self.model.name)
        self._stack.callback(api.http.close)
        self._stack.callback(router.kill)
        wait_until(api.is_ready, "readiness", router)
        return api

    def place(self, room: object = None, **fields: object) -> Json:
        """What a router adds to a body, for one prompt."""
        number = secrets.randbits(63) if room is None else room
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.link_port, "bootstrap_room": number}
        return {**place, **fields}

    def places(self, count: int) -> Json:
        """The same for several."""
        each = [self.place() for _ in range(count)]
        return {name: [one[name] for one in each] for name in each[0]}

    def both(self, path: str, body: Json, headers: dict[str, str] | None = None) -> tuple[httpx.Response, ...]:
        """The same body to both at once, as routers send it: prefill's answer, and decode's."""
        calls = [
            self._threads.submit(half.http.post, path, json=body, headers=headers)
            for half in (self.prefill, self.decode)
        ]
        prefill, decode = (call.result(PATIENCE_S) for call in calls)
        return prefill, decode


@contextmanager
def halves(folder: Path, model: Path) -> Iterator[Halves]:
    with ExitStack() as stack:
        found = Halves(folder, model, stack)
        try:
            yield found
        except BaseException as error:
            error.add_note(found.prefill.tail())
            error.add_note(found.decode.tail())
            raise
