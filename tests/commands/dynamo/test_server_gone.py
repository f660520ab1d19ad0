"""When a server is taken for gone."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from deltaserve.commands.dynamo import asked_server
from deltaserve.commands.dynamo.asked_server import AskedServer
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
Look = Callable[[httpx.Request], httpx.Response]


async def looks_until_gone(answers: list[type[httpx.HTTPError] | None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of looks after which it is, where each meets one of these errors, or None; the last one for ever."""
    num_looks = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_looks
        error = answers[min(num_looks, len(answers) - 1)]
        num_looks += 1
        if error is not None:
            raise error("so")
        return httpx.Response(200)

    monkeypatch.setattr(asked_server, "_LOOK_S", 0.0)
    http = httpx.AsyncClient(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer), timeout=PATIENCE_S)
    monkeypatch.setattr(asked_server, "async_http_client", lambda *_: http)
    server = AskedServer("http://127.0.0.1:1", {})
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await server.until_gone() == "http://127.0.0.1:1: the server is gone"
    finally:
        await server.close()
    return num_looks


async def test_a_machine_that_does_not_answer_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await looks_until_gone([None, httpx.ConnectTimeout], monkeypatch) == 1 + 12


async def test_a_port_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await looks_until_gone([None, httpx.ConnectError], monkeypatch) == 1 + 3


async def test_who_lets_in_and_is_busy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [*[httpx.ConnectTimeout] * 11, httpx.ReadTimeout] * 3
    assert await looks_until_gone([*busy, *[httpx.ReadTimeout] * 50, httpx.ConnectTimeout], monkeypatch) == 36 + 50 + 12
