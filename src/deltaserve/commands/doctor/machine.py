"""Checks of this machine: Python, libraries, device, and every address a server would listen on."""

import errno
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import httpx

from deltaserve.commands.client.http_client import http_client
from deltaserve.compute.attention.registry import attention_kinds
from deltaserve.core.findings import Level, Line
from deltaserve.core.sizes import size
from deltaserve.launch.cgroup import read_limits, usable_cores
from deltaserve.launch.compose import cpu_bytes
from deltaserve.launch.net_devices import interface_addresses, net_devices
from deltaserve.settings.config import Settings
from deltaserve.settings.host_and_port import authority, is_loopback
from deltaserve.settings.urls import url_of

_MIN_PYTHON = (3, 11)
_LIBRARIES = ("torch", "pyzmq", "msgspec", "starlette", "uvicorn", "tokenizers", "safetensors", "xxhash")
_FOR_VERIFY = "transformers"
_LITTLE_MEMORY = 2 << 30
_ASK_S = 2.0
_REQUEST_ID = re.compile("req-[0-9a-f]{24}")
"""What every answer of a deltaserve server carries as x-request-id."""


def check_software() -> Iterator[Line]:
    """Python and the libraries a server needs."""
    is_new = sys.version_info[:2] >= _MIN_PYTHON
    wanted = "" if is_new else f"; at least {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} is needed"
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}{wanted}"
    yield Line(Level.OK if is_new else Level.FAIL, "python", text)
    for name in _LIBRARIES:
        yield _library(name, Level.FAIL, "a server needs it")
    yield _library(_FOR_VERIFY, Level.OK, "only `deltaserve verify MODEL` needs it: pip install 'deltaserve[verify]'")
    for kind in attention_kinds().values():
        yield from kind.checks()


def _library(name: str, if_missing: Level, why: str) -> Line:
    try:
        return Line(Level.OK, "library", f"{name} {version(name)}")
    except PackageNotFoundError:
        return Line(if_missing, "library", f"{name} is not installed; {why}")


def check_device() -> Iterator[Line]:
    """Cores, memory, network devices, GPUs."""
    free, _ = cpu_bytes()
    text = f"{usable_cores(read_limits())} cores, {size(free)} of memory available"
    yield Line(Level.WARN if free < _LITTLE_MEMORY else Level.OK, "cpu", text)
    devices = ", ".join(net_devices()) or "the kernel does not tell"
    yield Line(Level.OK, "network", f"devices for page transfers (--transfer-devices): {devices}")
    if shutil.which("nvidia-smi") is None:
        yield Line(Level.OK, "gpu", "none: models run on the CPU")
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.free,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError) as error:
        yield Line(Level.WARN, "gpu", f"nvidia-smi fails: {type(error).__name__}; models run on the CPU")
        return
    for text in filter(None, found):
        yield Line(Level.OK, "gpu", text)


def check_listeners(host: str, port: int) -> Iterator[Line]:
    """What `serve --host --port` would listen on, and whether it can."""
    yield check_listener(host, port, "API; without keys on this machine only, the admin routes too")
    yield check_listener("127.0.0.1", port + 1, "admin routes, when keys are set")
    yield Line(Level.OK, "listener", "127.0.0.1, any free port: links of each worker")
    yield Line(Level.OK, "listener", "127.0.0.1 (UCX_NET_DEVICES=lo), any free port: page transfers of each worker")
    by_hand = Settings().disaggregation.disaggregation_bootstrap_port
    text = "links of a worker that `deltaserve prefill` or `decode` starts, for members of the cluster"
    yield Line(Level.OK, "listener", f"127.0.0.1:{by_hand}: {text}")
    if not is_loopback(host):
        yield Line(Level.WARN, "listener", f"{host} is reachable from elsewhere: keys are needed (--api-key-file)")


def check_listener(host: str, port: int, purpose: str) -> Line:
    """Whether anybody could listen there now."""
    where = authority(host, port)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except (OSError, OverflowError) as error:
        url = _server_at(host, port) if getattr(error, "errno", None) == errno.EADDRINUSE else None
        if url is not None:
            text = f"a deltaserve server is there: `deltaserve doctor --base-url {url}` looks at it"
            return Line(Level.WARN, "listener", f"{where}: {text}; another one needs another --port")
        return Line(
            Level.FAIL, "listener", f"{where}: {getattr(error, 'strerror', None) or error}{_hint(error)} ({purpose})"
        )
    return Line(Level.OK, "listener", f"{where}: {purpose}")


def _hint(error: Exception) -> str:
    if getattr(error, "errno", None) != errno.EADDRNOTAVAIL:
        return ""
    own = ", ".join(address for addresses in interface_addresses().values() for address in addresses)
    return f"; this machine has {own}"


def _server_at(host: str, port: int) -> str | None:
    """Base URL of the deltaserve server whose API or admin routes answer there. Probes are open to all: no key."""
    try:
        with http_client(url_of(host, port), _ASK_S) as http:
            reply = http.get("/readyz")
    except httpx.HTTPError:
        return None
    if not _REQUEST_ID.fullmatch(reply.headers.get("x-request-id", "")):
        return None
    is_admin = reply.status_code == httpx.codes.NOT_FOUND  # probes are answered where the API is
    return url_of(host, port - 1 if is_admin else port)
