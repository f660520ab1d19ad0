"""A router whose workers come and go, each a process of its own."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import httpx

from tests.e2e.server import Api, Json, Process, wait_until
from tests.ports import free_port

FLAGS = ("--page-size", "16", "--chunked-prefill-size", "32", "--num-pages", "256", "--verify", "crc")


class Members:
    """A router and workers that are started one by one, and the list in which it finds them."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder, self.model, self._stack = folder, model, stack
        self._key = folder / "cluster.key"
        self._key.touch(mode=0o600)
        self._key.write_text(secrets.token_urlsafe(48))
        self.list = folder / "workers"
        self.list.write_text("")
        self.parts: dict[str, Process] = {}
        self.entries: dict[str, str] = {}
        """Worker |-> its entry in a list."""

    def route(self, *flags: str) -> Api:
        port = free_port()
        argv = ("--port", str(port), "--cluster-key-file", str(self._key), "--page-size", "16", *flags)
        self._start("router", "router", *argv)
        api = Api(f"http://127.0.0.1:{port}", self.model.name)
        self._stack.callback(api.http.close)
        return api

    def worker(self, name: str, *flags: str, port: int | None = None, model: Path | None = None) -> str:
        """Start a worker, of another model than the router's if told so; returns its entry in a list."""
        role, port = name.split("-")[0], free_port() if port is None else port
        link = ("--disaggregation-bootstrap-port", str(port), "--cluster-key-file", str(self._key))
        self._start(name, role, *link, *FLAGS, *flags, model=model)
        return f"{role}@127.0.0.1:{port}"

    def start(self, name: str, model: Path | None = None) -> None:
        """Start a worker that calls itself so."""
        self.entries[name] = f"{name}={self.worker(name, '--worker-name', name, model=model)}"

    def write(self, *names: str) -> None:
        self.list.write_text("# who is there\n" + "".join(f"{self.entries[name]}\n" for name in names))

    def _start(self, name: str, command: str, *argv: str, model: Path | None = None) -> None:
        self.parts[name] = Process(self.folder / name, command, str(model or self.model), *argv)
        self._stack.callback(self.parts[name].kill)


@contextmanager
def members(folder: Path, model: Path) -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(folder, model, stack)


def known(admin: httpx.Client) -> dict[str, Json]:
    """Workers of the router whose admin routes that client reaches, by name."""
    return {worker["name"]: worker for worker in admin.get("/admin/workers").json()["workers"]}


def wait_used(admin: httpx.Client, name: str, router: Process) -> None:
    def is_used() -> bool:
        worker = known(admin).get(name, {})
        return worker.get("state") == "ready" and worker["status"] is not None and not worker["leaving"]

    wait_until(is_used, f"{name} to be used", router)


def wait_forgotten(admin: httpx.Client, name: str, router: Process) -> None:
    wait_until(lambda: name not in known(admin), f"{name} to be forgotten", router)


@contextmanager
def asking(num_users: int, ask: Callable[[int, int], None], router: Process) -> Iterator[Callable[[int], None]]:
    """Users who ask one request after the other until the block ends. Raises what any of them has met.

    `ask`: user and number of a request, which it judges. What is yielded waits until each user has had so many more
    answers; it returns at once when one has failed.
    """
    is_over, num_right = Event(), [0] * num_users

    def use(user: int) -> None:
        while not is_over.is_set():
            ask(user, num_right[user])
            num_right[user] += 1

    with ThreadPoolExecutor(num_users) as pool:
        users = [pool.submit(use, user) for user in range(num_users)]

        def go_on(num_more: int) -> None:
            wanted = [count + num_more for count in num_right]

            def have_gone_on() -> bool:
                return any(user.done() for user in users) or all(map(int.__ge__, num_right, wanted))

            wait_until(have_gone_on, "answers", router)

        try:
            yield go_on
        finally:
            is_over.set()
        for user in users:
            user.result()
