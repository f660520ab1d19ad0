"""A transport that cannot be opened is one line: which library, which memory, why, and what to do instead."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import TransportError
from deltaserve.process.worker import transports
from deltaserve.process.worker.worker_spec import read_spec
from deltaserve.transports.nixl.ucx_environment import ucx_environment
from deltaserve.transports.registry import cannot_open
from tests.fixtures.mooncake_engines import need_mooncake
from tests.process.worker.server import PROGRAMS
from tests.process.worker.workers import write_worker

_VERBS = "libibverbs.so.1: cannot open shared object file: No such file or directory"
_ELSEWHERE = "192.0.2.1"
"""An address for documentation: nobody here has it."""


class Case(NamedTuple):
    """One thing in the way of one transport."""

    transport: str
    device: str
    memory: str
    fields: dict[str, str]
    broken: dict[str, str]
    """Module |-> what its import raises."""
    words: tuple[str, ...]
    """Words of the line, in order."""


def case(transport: str, *words: str, device: str = "cpu", memory: str = "shared", **broken: str) -> Case:
    return Case(transport, device, memory, {}, broken, words)


_INSTALL_NIXL = "pip install nixl-cu12"
_INSTALL_MOONCAKE = "pip install 'deltaserve[mooncake]', and on Debian apt-get install libibverbs1"
CASES = {
    "nixl, missing": case(
        "nixl",
        "host memory",
        "No module named",
        _INSTALL_NIXL,
        "--disaggregation-transfer-backend local",
        nixl_cu12='ModuleNotFoundError("No module named")',
    ),
    "nixl, raises when imported": case(
        "nixl",
        "host memory",
        "the driver is too old",
        _INSTALL_NIXL,
        nixl_cu12='RuntimeError("the driver\\nis too old")',
    ),
    "nixl, a library of its own is missing": case(
        "nixl", "host memory", "libucp.so.0", _INSTALL_NIXL, nixl_cu12='OSError("libucp.so.0: cannot open")'
    ),
    "nixl, another version": case(
        "nixl", "host memory", "cannot import name", _INSTALL_NIXL, nixl_cu12='ImportError("cannot import name")'
    ),
    "nixl, missing on a GPU": case(
        "nixl",
        "cuda memory",
        _INSTALL_NIXL,
        "--disaggregation-transfer-backend local (workers of one serve), or --device cpu",
        device="cuda:0",
        nixl_cu12='ModuleNotFoundError("No module named")',
    ),
    "nixl, memory of a GPU that is not there": case(
        "nixl",
        "cuda memory",
        "does not register 4096 bytes of cuda:7",
        "--transfer-tls",
        "--device cpu",
        device="cuda:7",
    ),
    "nixl, memory of another kind": case("nixl", "cuda memory", "'npu:0' cannot be registered", device="npu:0"),
    "nixl, no such network device": case("nixl", "host memory", "--transfer-devices")._replace(
        fields={"transport_devices": "nosuch0"}
    ),
    "local, no folder": case("local", "host memory", "No such file", "backend nixl")._replace(
        fields={"transport_folder": "/nowhere/at/all"}
    ),
    "local, private memory": case("local", "host memory", "not memory that peers could map", "nixl", memory="private"),
    "local, memory of a GPU": case("local", "cuda memory", "register region 0", "backend nixl", device="cuda:0"),
    "mooncake, missing": case(
        "mooncake",
        "host memory",
        "No module named",
        _INSTALL_MOONCAKE,
        mooncake='ModuleNotFoundError("No module named")',
    ),
    "mooncake, without libibverbs": case(
        "mooncake", "host memory", _VERBS, "libibverbs1", "local", mooncake=f'ImportError("{_VERBS}")'
    ),
    "mooncake, raises when imported": case(
        "mooncake", "host memory", "a bad day", _INSTALL_MOONCAKE, mooncake='RuntimeError("a bad day")'
    ),
    "mooncake, private memory": case("mooncake", "host memory", "memory that processes can share", memory="private"),
    "mooncake, memory of a GPU": case(
        "mooncake",
        "cuda memory",
        "CPU memory",
        "--disaggregation-transfer-backend local (workers of one serve) or nixl, or --device cpu",
        device="cuda:0",
    ),
    "mooncake, an address of another machine": case("mooncake", "host memory", "--transfer-devices")._replace(
        fields={"transport_host": _ELSEWHERE, "transport_tls": "tcp"}
    ),
}


def broken_libraries(folder: Path, broken: dict[str, str]) -> Path:
    """A folder whose packages raise what they are said to when they are imported."""
    for name, what in broken.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise {what}\n")
    return folder


def as_asked(name: str, tried: Case, folder: Path) -> dict[str, Any]:
    own = folder / name.replace(" ", "_").replace(",", "")
    own.mkdir()
    tls = {"nixl": {"transport_tls": "tcp,self"}, "mooncake": {"transport_tls": "tcp"}}.get(tried.transport, {})
    fields = {"transport": tried.transport, "transport_folder": str(folder), **tls, **tried.fields}
    environ = {**ucx_environment("tcp,self", fields.get("transport_devices", "lo")), "UCX_LOG_LEVEL": "fatal"}
    path = str(broken_libraries(own, tried.broken))
    return {"fields": fields, "device": tried.device, "memory": tried.memory, "path": path, "environ": environ}


OPENING = {
    "local": case("local"),
    "local, without nixl": case("local", nixl_cu12='RuntimeError("nobody needs it")'),
    "nixl": case("nixl"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each case."""
    folder, every = tmp_path_factory.mktemp("transports"), {**CASES, **OPENING}
    asked = [as_asked(name, tried, folder) for name, tried in every.items()]
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "open_transport.py")],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(every, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_is_in_the_way_is_one_line(name: str, said: dict[str, str]) -> None:
    tried, line = CASES[name], said[name]
    if tried.transport == "mooncake" and not tried.broken:
        need_mooncake()
    assert "\n" not in line
    assert line.startswith(f"--disaggregation-transfer-backend {tried.transport} (")
    at = 0
    for words in tried.words:
        at = line.find(words, at)
        assert at >= 0, f"{words!r} is not there, or not in its place: {line}"


@pytest.mark.parametrize("name", OPENING)
def test_with_nothing_in_the_way_it_opens(name: str, said: dict[str, str]) -> None:
    """Also where the library of another transport cannot be loaded."""
    assert said[name] == "opened"


def test_memory_of_one_gpu_makes_it_cuda() -> None:
    assert "cannot move host memory" in cannot_open("nixl", ["cpu", "cpu"], TransportError("so"))
    assert "cannot move cuda memory" in cannot_open("nixl", ["cpu", "cuda:1"], TransportError("so"))


@dataclass
class Opening:
    """A transport that cannot be opened for want of something."""

    is_closed: bool = False

    def make(self, *_: object) -> "Opening":
        return self

    def open(self, peer: PeerName) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self) -> None:
        self.is_closed = True


def test_what_was_opened_in_part_is_closed_whatever_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening()
    monkeypatch.setattr(transports, "transport_kind", lambda name: opening)
    with pytest.raises(OSError, match="Too many open files"):
        transports.open_transport(read_spec(write_worker(tmp_path)), PeerName("decode-0.0"), Boot(1), [])
    assert opening.is_closed
