"""`deltaserve serve --cluster ray`, by the line of docs/deploy.md and with the keys that the page makes."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.questions import RECALL_MODEL
from tests.e2e.server import Api, Json, Process
from tests.patience import PATIENCE_S
from tools.clients.page_lines import block_with, here, line_with

LINE = line_with("Ray", "deltaserve", "--prefill")
HOST = LINE[LINE.index("--host") + 1]
NETWORK = LINE[LINE.index("--trusted-data-network") + 1]


@dataclass(frozen=True, slots=True)
class Stand:
    """Where the command runs, and how a client reaches it there."""

    host: str
    port: int
    """The admin routes have the next one, on loopback."""
    wrap: Sequence[str]
    transport: Callable[[], httpx.BaseTransport]


class PageServer(Process, Api):
    """Paths of the model and of the cluster key are others than on the page."""

    def __init__(self, folder: Path, stand: Stand, addresses: Mapping[str, object], *flags: str) -> None:
        """`addresses`: those that are others, too. `flags`: beside the page's."""
        subprocess.run(["bash", "-ec", block_with("Install", "> cluster.key")], cwd=folder, check=True)
        paths = {"/models/MODEL": RECALL_MODEL, "/etc/deltaserve/cluster.key": folder / "cluster.key"}
        program, *argv = here(LINE, {**paths, **addresses})
        assert program == "deltaserve"
        Api.__init__(self, f"http://{stand.host}:{stand.port}", RECALL_MODEL.name)
        Process.__init__(self, folder / "run", *argv, *flags, wrap=stand.wrap, cwd=folder)
        self.http.close()
        key = (folder / "api.keys").read_text().split()[0]
        self.http = self._client(stand, self.base_url, key)
        self._admin = self._client(stand, f"http://127.0.0.1:{stand.port + 1}", key)

    @staticmethod
    def _client(stand: Stand, url: str, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=url, transport=stand.transport(), headers=headers, timeout=PATIENCE_S)

    def info(self) -> Json:
        found: Json = self._admin.get("/server_info").json()
        return found

    def is_used(self, name: str) -> bool:
        worker = self.worker(name)
        return worker.get("state") == "ready" and worker["status"] is not None

    def worker(self, name: str) -> Json:
        return self.workers().get(name, {})

    def node(self, name: str) -> str:
        """Address of a worker's node."""
        return str(self.worker(name)["url"]).removeprefix("tcp://").rpartition(":")[0]

    def close(self) -> None:
        """Leave nothing."""
        self.http.close()
        self._admin.close()
        self.kill()
