"""Prefill, decode and router as a chart or a compose file starts them, here on loopback."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.e2e.server import PLAIN_HTTP, ROOT, Process, wait_until
from tests.patience import PATIENCE_S

MODEL = ROOT / "models" / "recall-micro"
_HTTP = httpx.Client(verify=PLAIN_HTTP, limits=httpx.Limits(max_keepalive_connections=0), timeout=PATIENCE_S)
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 3


@dataclass(frozen=True, slots=True)
class Keys:
    """Files of secrets, and the secrets in them."""

    folder: Path
    user: str
    admin: str

    @property
    def cluster(self) -> Path:
        return self.folder / "cluster.key"

    @property
    def api(self) -> Path:
        return self.folder / "api.keys"


def make_keys(folder: Path) -> Keys:
    """As the pages of deploy/ say to make them."""
    keys = Keys(folder, secrets.token_urlsafe(32), secrets.token_urlsafe(32))
    content = {keys.cluster: secrets.token_urlsafe(48), keys.api: f"{keys.user} team-a\n{keys.admin} ops admin\n"}
    for path, text in content.items():
        path.touch(mode=0o600)
        path.write_text(text)
    return keys


@dataclass(frozen=True, slots=True)
class Release:
    """Parts that run, and where they listen."""

    parts: Mapping[str, Process]
    keys: Keys
    api_url: str
    admin_url: str

    def ask(self, text: str = PROMPT, **fields: object) -> httpx.Response:
        """A completion, by a key of the API."""
        body = {"prompt": text, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {self.keys.user}"}
        return _HTTP.post(f"{self.api_url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)

    def metrics(self) -> str:
        """What a Prometheus reads that has the admin key."""
        headers = {"Authorization": f"Bearer {self.keys.admin}"}
        return _HTTP.get(f"{self.admin_url}/metrics", headers=headers, timeout=PATIENCE_S).raise_for_status().text

    def listening(self, part: str) -> set[int]:
        """TCP ports on which it and its children listen."""
        whole = psutil.Process(self.parts[part].popen.pid)
        all_of_it = [whole, *whole.children(recursive=True)]
        found = [each for process in all_of_it for each in process.net_connections("tcp")]
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


@contextmanager
def running(folder: Path, lines: Mapping[str, Sequence[str]], keys: Keys, ports: tuple[int, int]) -> Iterator[Release]:
    """All parts of `lines`, part |-> argv, until they are ready; ended by SIGTERM, each with exit code 0.

    `ports`: of the API and of the admin routes.
    """
    parts = {name: Process(folder / name, *argv) for name, argv in lines.items()}
    api, admin = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        wait_until(lambda: _is_ready(api) or _has_ended(parts), "readiness", parts["router"])
        assert not _has_ended(parts)
        yield Release(parts, keys, api, admin)
        for name in ("router", "decode", "prefill", *(parts.keys() - {"router", "decode", "prefill"})):
            assert parts[name].end() == 0, parts[name].log()
    except BaseException as error:
        error.add_note("\n".join(part.tail() for part in parts.values()))
        raise
    finally:
        for part in parts.values():
            part.kill()


def _has_ended(parts: Mapping[str, Process]) -> bool:
    return any(part.popen.poll() is not None for part in parts.values())


def _is_ready(url: str) -> bool:
    try:
        return _HTTP.get(f"{url}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
