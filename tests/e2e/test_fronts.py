"""Several fronts on one port."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.e2e.server import PLAIN_HTTP, Answer, Api, Server
from tests.patience import PATIENCE_S
from tests.ports import free_port

NUM_FRONTS = 2
ADMIN_PORT = free_port()
"""The one above it is free, too."""
PAGE_SIZE = 16
PROMPT_LEN = 96


@pytest.fixture(scope="module")
def fronts(tiny_models: Path) -> Iterator[Server]:
    flags = ("--fronts", str(NUM_FRONTS), "--prefill", "2", "--page-size", str(PAGE_SIZE))
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path:
        server = Server(Path(path), tiny_models / "llama", *flags, "--admin-port", str(ADMIN_PORT))
        try:
            server.wait_ready()
            yield server
            assert server.end() == 0, server.tail()
        finally:
            server.http.close()
            server.kill()


def ask(server: Server, prompt: list[int]) -> Answer:
    """On a connection of its own, which the kernel gives to any front."""
    api = Api(server.base_url, server.model)
    try:
        return api.complete(prompt, max_tokens=4)
    finally:
        api.http.close()


def of_admin(index: int, path: str) -> httpx.Response:
    """What a front's own admin routes answer."""
    return httpx.get(f"http://127.0.0.1:{ADMIN_PORT + index}{path}", verify=PLAIN_HTTP, timeout=PATIENCE_S)


def num_answers(index: int) -> float:
    """Completions that a front has answered, by its own admin routes."""
    metrics = of_admin(index, "/metrics").text
    found = [line for line in metrics.splitlines() if 'path="/v1/completions"' in line and 'status="200"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found if not line.startswith("#"))


def test_every_front_serves_and_finds_what_the_others_have_computed(fronts: Server) -> None:
    draw = Random(1)
    prompts = [[draw.randrange(3, 200) for _ in range(PROMPT_LEN)] for _ in range(8)]
    first = [ask(fronts, prompt) for prompt in prompts]
    cached = []
    for _ in range(6):
        for prompt, answer in zip(prompts, first, strict=True):
            again = ask(fronts, prompt)
            assert again.tokens == answer.tokens
            cached.append(again.cached_len)
    assert all(num_answers(index) for index in range(NUM_FRONTS))
    assert sum(cached) >= 0.95 * len(cached) * (PROMPT_LEN - PAGE_SIZE)


def test_admin_routes_are_each_fronts_own(fronts: Server) -> None:
    reply = fronts.http.get("/metrics")
    assert reply.status_code == 404
    assert "the admin routes have one of their own" in reply.json()["error"]["message"]
    for index in range(NUM_FRONTS):
        assert of_admin(index, "/server_info").status_code == 200


def test_while_one_is_down_the_others_take_all_requests(fronts: Server) -> None:
    """The kernel gives no connection to a socket whose process is gone."""
    draw = Random(2)
    with fronts.killed("front-1"):
        for _ in range(12):
            assert len(ask(fronts, [draw.randrange(3, 200) for _ in range(20)]).tokens) == 4
    fronts.wait_back("front-1")
    for index in range(NUM_FRONTS):
        assert of_admin(index, "/server_info").status_code == 200
