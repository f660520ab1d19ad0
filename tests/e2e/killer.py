"""A worker that dies while streams of it are under way."""

import signal
from threading import Lock

from tests.e2e.server import Server


class Killer:
    """Kills the first decode worker that has requests once so many events of streams came."""

    def __init__(self, server: Server, after: int) -> None:
        self.victim: str | None = None
        self._server = server
        self._left = after
        self._lock = Lock()

    def heard(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left <= 0 and self.victim is None and (name := self._busy()):
                self.victim = name
                self._server.signal(name, signal.SIGKILL)

    def _busy(self) -> str | None:
        workers = self._server.workers().values()
        return next((str(worker["name"]) for worker in workers if worker["role"] == "decode" and worker["rooms"]), None)
