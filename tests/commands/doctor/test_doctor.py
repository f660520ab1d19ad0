"""Each check on this machine, with and without something in its way."""

import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import torch

from deltaserve.cli.main import main
from deltaserve.commands.client.admin import admin_places
from deltaserve.commands.doctor import machine as doctor_machine
from deltaserve.commands.doctor.machine import check_device, check_listeners, check_software
from deltaserve.commands.doctor.model import check_model
from deltaserve.commands.doctor.server import check_server
from deltaserve.core.findings import Level, Line
from deltaserve.core.quantization import Quantization
from deltaserve.process.front.secrets import read_api_keys
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.merge import load
from deltaserve.transports.local import checks as local_checks
from deltaserve.transports.mooncake import kind as mooncake_kind
from deltaserve.transports.nixl import checks as nixl_checks
from deltaserve.transports.registry import LibraryError, TransportOptions
from tests.compute.native.native_build import compiled_library
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant
from tests.ports import free_port


def settings_of(folder: Path) -> Settings:
    return load("serve", "", [str(folder)], {}).settings


def levels(lines: Iterable[Line]) -> list[Level]:
    return [line.level for line in lines]


def test_here_everything_is_there(tiny_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tiny_models / "llama"), "--port", str(free_port())]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "library", "cpu", "listener", "transfer", "model", "pages", "tokenizer", "template"):
        assert f"ok    {subject}" in out
    assert out.endswith("nothing stands in the way\n")


def test_weights_are_counted_as_they_will_be_kept(tmp_path: Path) -> None:
    """The bytes of a file in four bits, dequantised and not."""
    compiled_library()
    wide = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 16, "intermediate_size": 1024}
    file, _ = write_gguf(Variant(VARIANTS["llama"].build, wide), tmp_path, Kind.Q4_1)

    def mib(quantization: Quantization) -> int:
        settings = settings_of(file)
        settings = settings.model_copy(
            update={"model": settings.model.model_copy(update={"quantization": quantization, "device": "cpu"})}
        )
        (line,) = [line for line in check_model(settings) if line.subject == "pages"]
        assert " bytes" not in line.text  # but as people read them
        found = re.search(r"; weights (\d+\.\d) MiB$", line.text)
        assert found is not None
        return round(float(found[1]))

    assert mib("none") == 15
    assert mib("auto") == mib("a8") == 4


def test_a_failure_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none"), "--port", str(free_port())]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 failed"
    assert lines[-2].startswith(f"fail  model         {tmp_path / 'none'}: not a folder")


def test_memory_is_planned_with_the_sizes_that_serve_would_get(
    tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["doctor", str(tiny_models / "llama"), "--port", str(free_port()), "--page-size", "16", "--num-pages", "40"]
    assert main(argv) == 0
    assert "pages         a new server would have 40 of 16 tokens" in capsys.readouterr().out
    assert main(["doctor", "--page-size", "16"]) == 2
    assert main([*argv[:2], "--page-size", "48"]) == 2
    assert "power of two" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "65535", "x"])
def test_a_wrong_port_is_exit_code_2(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", port]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_LIBRARIES", ("no-such-library",))
    monkeypatch.setattr(doctor_machine, "_FOR_VERIFY", "and-not-that")
    lines = list(check_software())
    assert levels(lines) == [Level.OK, Level.FAIL, Level.OK, Level.OK]
    assert lines[2].text.endswith("pip install 'deltaserve[verify]'")


def test_device() -> None:
    lines = {line.subject: line for line in check_device()}
    assert lines.keys() == {"cpu", "network", "gpu"}
    assert lines["network"].text.startswith("devices for page transfers (--transfer-devices): ")
    assert "lo" in lines["network"].text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By something that does not even answer."""
    monkeypatch.setattr(doctor_machine, "_ASK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lines = list(check_listeners("127.0.0.1", taken.getsockname()[1]))
    assert lines[0].level is Level.FAIL
    assert "in use" in lines[0].text


def test_a_port_that_another_http_server_took() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.handle_request).start()
        assert next(check_listeners("127.0.0.1", other.server_port)).level is Level.FAIL


def test_ports_that_a_deltaserve_server_took() -> None:
    port = free_port()
    with answering(200, {}, None, port) as url, answering(404, {}, None, port + 1):
        lines = list(check_listeners("127.0.0.1", port))
    assert [line.level for line in lines[:2]] == [Level.WARN, Level.WARN]
    assert all(f"doctor --base-url {url}`" in line.text for line in lines[:2])


def test_a_port_to_the_world_is_pointed_out() -> None:
    assert list(check_listeners("0.0.0.0", free_port()))[-1].level is Level.WARN


def test_transfer_that_cannot_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children say why; none is left."""
    monkeypatch.setattr(nixl_checks, "silent_ucx_environment", lambda tls, devices: {"UCX_TLS": "self"})
    *_, line = nixl_checks.check(None)
    assert line.level is Level.FAIL
    assert "UCX_TLS" in line.text


@pytest.mark.parametrize("level", [None, "warn"], ids=["unset", "warn"])
def test_what_the_library_says_of_its_variables_is_no_obstacle(
    level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes to stdout, where the children answer."""
    monkeypatch.setenv("UCX_NO_SUCH_THING", "1")
    monkeypatch.delenv("UCX_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("UCX_LOG_LEVEL", level)
    lines = list(nixl_checks.check(None))
    assert (lines[1].level, lines[1].text[:8]) == (Level.OK, "nixl ove"), lines


def test_a_transfer_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[str]] = []

    def start(*_: object) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(["sleep", "3600"], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return children[-1]

    monkeypatch.setattr(nixl_checks, "_start", start)
    monkeypatch.setattr(nixl_checks, "_LIMIT_S", 0.2)
    line = list(nixl_checks.check(None))[1]
    assert line.level is Level.FAIL
    assert "nothing came of it within 0.2 s" in line.text
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("asked", "level"), [(None, Level.WARN), (TransportOptions(tls="tcp,self", devices="lo"), Level.FAIL)]
)
def test_a_library_that_is_missing_is_named(
    asked: TransportOptions | None, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An obstacle where it was asked for; nothing is tried without it."""
    monkeypatch.setattr(nixl_checks, "fitting_packages", lambda major: ("no-such-package",))
    (line,) = nixl_checks.check(asked)
    assert line.level is level
    assert line.text.startswith("no-such-package is not installed; workers between which pages move by nixl need it")
    assert "pip install nixl-cu" in line.text


def test_local_transfers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = local_checks.check(None)
    assert line.level is Level.OK
    assert "bytes equal" in line.text
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (line,) = local_checks.check(None)
    assert line.level is Level.WARN
    assert "aarch64" in line.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize(
    ("check", "checks", "words"),
    [
        (nixl_checks.check, nixl_checks, ("nixl", "cuda memory", "torch has no memory of cuda:0", "backend local")),
        (local_checks.check, local_checks, ("local", "cuda memory", "CUDA", "backend nixl")),
    ],
    ids=["nixl", "local"],
)
def test_a_page_of_a_gpu_is_tried(
    check: Callable[[TransportOptions | None], Iterator[Line]],
    checks: ModuleType,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a process that loads torch; its error is one line. Where there is no GPU none is tried."""
    without = list(check(None))
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    *others, line = check(None)
    assert len(others) == len(without)
    assert line.level is Level.WARN and "\n" not in line.text
    assert all(word in line.text for word in words), line.text


def test_what_mooncake_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an obstacle only where it was asked for."""
    missing = LibraryError("libibverbs.so.1: cannot open shared object file")
    monkeypatch.setattr(mooncake_kind, "engine_problem", lambda options: missing)
    for options, level in ((None, Level.OK), (TransportOptions(tls="tcp"), Level.FAIL)):
        (line,) = mooncake_kind.check(options)
        assert line.level is level
        assert str(missing) in line.text
        assert "apt-get install libibverbs1" in line.text


def broken(tiny_models: Path, out: Path, file: str, content: str | None) -> Path:
    """A copy of a model folder with one file replaced or gone."""
    folder = Path(shutil.copytree(tiny_models / "llama", out / "model"))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("file", "subject"),
    [("config.json", "model"), ("model.safetensors", "model"), ("tokenizer.json", "tokenizer")],
)
def test_a_folder_that_lacks_something(tiny_models: Path, tmp_path: Path, file: str, subject: str) -> None:
    lines = list(check_model(settings_of(broken(tiny_models, tmp_path, file, None))))
    assert [line.subject for line in lines if line.level is Level.FAIL] == [subject]
    assert file in lines[-1].text


def test_a_folder_without_a_template(tiny_models: Path, tmp_path: Path) -> None:
    lines = list(check_model(settings_of(broken(tiny_models, tmp_path, "chat_template.jinja", None))))
    assert [(line.subject, line.level) for line in lines][-1] == ("template", Level.WARN)


@contextmanager
def answering(ready: int, reasons: dict[str, str], info: Any, port: int = 0, key: str = "") -> Iterator[str]:
    """A server with fixed answers to the two questions; None: the info is elsewhere. `key`: what it wants to see."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = (ready, {"reasons": reasons}) if self.path == "/readyz" else (200 if info else 404, info)
            if key and self.path != "/readyz" and self.headers.get("authorization") != f"Bearer {key}":
                status, body = 401, {"error": {"code": "invalid_api_key"}}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.send_header("x-request-id", "req-" + "0a" * 12)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def worker(**changes: object) -> dict[str, object]:
    status = {
        "num_pages": [100],
        "quarantined_pages": [0],
        "free_pages": [60],
        "evictable_pages": [40],
        "num_running": 2,
        "draining": False,
        "metrics": {},
    }
    status |= {key: value for key, value in changes.items() if key in status}
    plain = {"name": "decode-0", "refusal": None, "state": "ready", "status": status, "breaker": "closed"}
    return plain | {key: value for key, value in changes.items() if key in plain}


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, Level.OK),
        ({"refusal": "page_size: ours 16, theirs 64"}, Level.FAIL),
        ({"state": "greeting"}, Level.FAIL),
        ({"status": None}, Level.FAIL),
        ({"quarantined_pages": [26]}, Level.FAIL),
        ({"draining": True}, Level.WARN),
        ({"breaker": "open"}, Level.WARN),
        ({"metrics": {"deltaserve_tier_slots": 9}}, Level.OK),
        ({"metrics": {"deltaserve_tier_slots": 0}}, Level.WARN),
    ],
)
def test_workers_of_a_server(changes: dict[str, object], level: Level) -> None:
    with answering(200, {}, {"engine": {"workers": [worker(**changes)]}}) as url:
        assert levels(check_server(url + "/v1")) == [Level.OK, level]


def test_a_server_that_is_not_ready_and_hides_its_workers() -> None:
    with answering(503, {"engine": "prefill-0: lost"}, None) as url:
        lines = list(check_server(url))
    assert [line.level for line in lines] == [Level.FAIL, Level.SKIP]
    assert "prefill-0: lost" in lines[0].text
    assert "--admin-url" in lines[1].text


ADMIN_KEY = "admin-" + "x" * 32
USER_KEY = "user-" + "x" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"{USER_KEY} tenant\n{ADMIN_KEY} operator admin\n")
    return path


@contextmanager
def guarded_pair() -> Iterator[str]:
    """A server with keys: the API does not know the info, the admin port one above does."""
    port = free_port()
    info = {"engine": {"workers": [worker()]}}
    with answering(200, {}, None, port, key=ADMIN_KEY) as url, answering(200, {}, info, port + 1, key=ADMIN_KEY):
        yield url


def test_with_an_admin_key_the_workers_are_found_one_port_above(key_file: Path) -> None:
    with guarded_pair() as url:
        assert levels(check_server(url, None, read_api_keys(key_file))) == [Level.OK, Level.OK]


def test_the_admin_port_may_be_named(key_file: Path) -> None:
    keys = read_api_keys(key_file)
    with answering(200, {}, None) as url, answering(200, {}, {"engine": {"workers": [worker()]}}) as admin_url:
        assert levels(check_server(url, admin_url, keys)) == [Level.OK, Level.OK]
        assert levels(check_server(url, f"http://127.0.0.1:{free_port()}", keys)) == [Level.OK, Level.SKIP]


def test_what_was_not_looked_at_stands_in_the_last_line(capsys: pytest.CaptureFixture[str], key_file: Path) -> None:
    with guarded_pair() as url:
        assert main(["doctor", "--base-url", url]) == 0
        out = capsys.readouterr().out
        assert out.endswith("\n0 failed, 1 not looked at\n")
        assert "--api-key-file" in out
        assert main(["doctor", "--base-url", url, "--api-key-file", str(key_file)]) == 0
    assert capsys.readouterr().out.endswith("\nnothing stands in the way\n")


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-url"])
def test_what_needs_a_server_is_refused_without_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", flag, "x"]) == 2
    assert "--base-url" in capsys.readouterr().err


def test_admin_routes_of_something_else() -> None:
    with answering(200, {}, None) as url, answering(200, {}, {"engine": "steam"}) as other:
        assert levels(check_server(url, other)) == [Level.OK, Level.SKIP]


def test_a_url_that_is_none() -> None:
    assert levels(check_server("http://127.0.0.1:port")) == [Level.FAIL]


def test_no_server() -> None:
    assert levels(check_server(f"http://127.0.0.1:{free_port()}")) == [Level.FAIL]


def test_doctor_suggests_no_flag_where_none_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--bogus"]) == 2
    assert capsys.readouterr().err == "deltaserve: --bogus: unknown flag\n"


def test_doctor_rejects_a_second_folder() -> None:
    assert main(["doctor", "a", "b"]) == 2


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("http://10.0.0.3:30000/v1", ["http://10.0.0.3:30000", "http://10.0.0.3:30001", "http://127.0.0.1:30001"]),
        ("http://10.0.0.4:30000", ["http://10.0.0.4:30000", "http://10.0.0.4:30001"]),
        ("http://127.0.0.1:30000", ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]),
        ("http://10.0.0.3", ["http://10.0.0.3"]),
    ],
)
def test_admin_routes_of_a_server_that_listens_elsewhere_are_on_this_machines_loopback(
    url: str, places: list[str]
) -> None:
    assert admin_places(url, {"127.0.0.1", "10.0.0.3"}) == places
