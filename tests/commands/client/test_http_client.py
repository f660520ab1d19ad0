"""Local tools talk to local servers whatever the environment says of proxies; others are reached as it says."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from deltaserve.cli.main import main
from deltaserve.commands.chat.command import Wishes, talk
from deltaserve.commands.chat.screen import Screen
from deltaserve.commands.client.admin import ask_admin
from deltaserve.commands.client.completion_stream import ServerError
from deltaserve.commands.client.http_client import async_http_client, http_client
from deltaserve.commands.demo.chat import ChatExample, ask
from deltaserve.commands.doctor.machine import check_listener
from deltaserve.commands.doctor.server import check_server
from deltaserve.commands.verify.client import ServerClient, VerifyError
from deltaserve.core.errors import ConfigError
from tests.ports import free_port

NOBODY = "http://127.0.0.1:9"
VARIABLES = [
    ("HTTP_PROXY", NOBODY),
    ("http_proxy", NOBODY),
    ("ALL_PROXY", NOBODY),
    ("all_proxy", "socks5://127.0.0.1:9"),
    ("HTTPS_PROXY", "nonsense://127.0.0.1:9"),
]
HOSTS = ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", "0.0.0.0"]


class Asked(BaseHTTPRequestHandler):
    """Knows nothing, and remembers what it was asked for."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        content = json.dumps({"error": {"message": "not here"}}).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return


class SixServer(HTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def listening(host: str) -> Iterator[tuple[int, list[str]]]:
    """(port, what is asked there) of a server that listens on a host of this machine."""
    kind = SixServer if host == "[::1]" else HTTPServer
    with kind((host.strip("[]"), 0), Asked) as server:
        asked: list[str] = []
        server.asked = asked  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def verify(url: str) -> None:
    with suppress(VerifyError):
        ServerClient(url, None).connect()


def bench(url: str) -> None:
    assert main(["bench", "--base-url", url]) == 1


def chat(url: str) -> None:
    with suppress(ServerError):
        talk(url, {}, Wishes(), Screen())


def demo(url: str) -> None:
    with suppress(httpx.HTTPError):
        ask(url, "recall-micro", ChatExample(" a b", "?a", ("a", "b")))


def listener(url: str) -> None:
    parts = httpx.URL(url)
    check_listener(parts.host, parts.port or 0, "API")


TOOLS: dict[str, Callable[[str], object]] = {
    "doctor": lambda url: list(check_server(url)),
    "doctor's admin routes": lambda url: ask_admin("/server_info", "http://127.0.0.1:9", url, ()),
    "verify": verify,
    "bench": bench,
    "chat": chat,
    "demo": demo,
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("variable", "proxy"), VARIABLES, ids=[name for name, _ in VARIABLES])
def test_a_server_of_this_machine_is_asked_directly(
    tool: str, host: str, variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    with listening(host) as (port, asked):
        TOOLS[tool](f"http://{host}:{port}")
    assert asked


@pytest.mark.parametrize(("variable", "proxy"), VARIABLES, ids=[name for name, _ in VARIABLES])
def test_so_is_one_that_took_a_listener(variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, proxy)
    with listening("127.0.0.1") as (port, asked):
        listener(f"http://127.0.0.1:{port}")
    assert asked == ["/readyz"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_server_elsewhere_is_reached_by_the_proxy(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening("127.0.0.1") as (port, asked):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        TOOLS[tool]("http://model.example:30000")
    assert asked
    assert all(path.startswith("http://model.example:3000") for path in asked)


@pytest.mark.parametrize("make", [http_client, async_http_client])
@pytest.mark.parametrize(
    ("variable", "proxy", "said"),
    [("ALL_PROXY", "socks5://127.0.0.1:9", "socks"), ("HTTP_PROXY", "nonsense://127.0.0.1:9", "nonsense")],
)
def test_a_proxy_that_cannot_be_used_is_one_line(
    make: Callable[[str, float], object], variable: str, proxy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(
        ConfigError, match=f"http://model.example: the proxy of the environment cannot be used .*{said}.*NO_PROXY"
    ):
        make("http://model.example", 1.0)
    monkeypatch.setenv("NO_PROXY", "*")
    make("http://model.example", 1.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1"])
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        http_client(url, 1.0)
    assert str(refused.value).startswith(f"{url}: ")
    assert main(["verify", "models/none", "--base-url", url]) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_nobody_there_is_told_at_once_with_what_to_do(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://{host}:{free_port()}"
    said = ": no server is there (Connection refused); start one (`deltaserve serve MODEL`)"
    assert main(["bench", "--base-url", url]) == 1
    assert f"bench: {url}{said}" in capsys.readouterr().err
    assert main(["verify", "models/none", "--base-url", url]) == 1
    assert f"verify: {url}/model_info{said}" in capsys.readouterr().err
    (line,) = check_server(url)
    assert f"{url}{said}" in line.text
