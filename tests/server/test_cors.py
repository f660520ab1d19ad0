"""Pages of other origins: those that are named may call the API and read all of its answers, others may not."""

from collections.abc import Mapping

import httpx
import pytest

from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
PAGE, OTHER = "https://chat.example", "https://evil.example"
KEY = ApiKey("u" * 32, Namespace("acme"))
ASKS = {"origin": PAGE, "access-control-request-method": "POST"}
ALLOWED = "access-control-allow-origin"


def _settings(*origins: str, keys: bool = False) -> ServerSettings:
    return ServerSettings(MODEL, allowed_origins=origins, api_keys=(KEY,) if keys else ())


async def _responses(client: httpx.AsyncClient) -> list[str]:
    lines = (await client.get("/metrics")).text.splitlines()
    return [line for line in lines if line.startswith("deltaserve_http_responses_total")]


@pytest.mark.parametrize("keys", [False, True], ids=["open", "keys"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing"])
async def test_a_browser_asks_first_without_a_key(codec: TextCodec, path: str, keys: bool) -> None:
    async with served(codec, OracleEngine(), _settings(PAGE, keys=keys)) as case:
        names = "authorization, content-type, x-api-key, x-stainless-lang"
        reply = await case.client.options(path, headers=ASKS | {"access-control-request-headers": names})
        assert (reply.status_code, reply.headers[ALLOWED]) == (200, PAGE)
        assert set(names.split(", ")) <= set(reply.headers["access-control-allow-headers"].lower().split(", "))
        if not keys:
            assert not any("OPTIONS" in line for line in await _responses(case.client))
            assert case.front.metrics.text().count(b"deltaserve_http_responses_total{") == 1, "of /metrics alone"


async def test_other_origins_are_not_allowed(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), _settings(PAGE, "http://localhost:3000")) as case:
        for origin in (OTHER, "http://chat.example", "http://localhost:3001", "null"):
            reply = await case.client.options("/v1/models", headers=ASKS | {"origin": origin})
            assert (reply.status_code, ALLOWED in reply.headers) == (400, False)
            assert ALLOWED not in (await case.client.get("/v1/models", headers={"origin": origin})).headers
        for origin in (PAGE, "http://localhost:3000"):
            reply = await case.client.get("/v1/models", headers={"origin": origin})
            assert reply.headers[ALLOWED] == origin


BODIES: Mapping[str, tuple[dict[str, object], int]] = {
    "whole": ({}, 200),
    "stream": ({"stream": True}, 200),
    "bad field": ({"temperature": 9}, 400),
    "unknown model": ({"model": "x"}, 404),
}


@pytest.mark.parametrize("body", BODIES)
async def test_answers_and_errors_can_be_read(codec: TextCodec, body: str) -> None:
    fields, status = BODIES[body]
    asked = {"prompt": "hi", "max_tokens": 2} | fields
    async with served(codec, OracleEngine(), _settings("*")) as case:
        reply = await case.client.post("/v1/completions", json=asked, headers={"origin": OTHER})
        assert (reply.status_code, reply.headers[ALLOWED]) == (status, "*")
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


async def test_a_refused_key_can_be_read(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), _settings(PAGE, keys=True)) as case:
        reply = await case.client.get("/v1/models", headers={"origin": PAGE})
        assert (reply.status_code, reply.headers[ALLOWED]) == (401, PAGE)


async def test_by_default_no_page_is_allowed(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        assert (await case.client.options("/v1/models", headers=ASKS)).status_code == 405
        assert ALLOWED not in (await case.client.get("/v1/models", headers={"origin": PAGE})).headers


async def test_a_page_that_is_allowed_still_does_not_operate_the_server(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), _settings("*")) as case:
        assert (await case.client.post("/admin/drain", headers={"origin": PAGE})).status_code == 403


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", ["/v1/models", "/nothing"])
async def test_a_trace_comes_back(codec: TextCodec, path: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.get(path, headers={"traceparent": TRACE})
        assert reply.headers["traceparent"] == TRACE
        for wrong in ("", "00-0-0-01", TRACE.upper(), TRACE + "-x", "x" * 5000):
            assert "traceparent" not in (await case.client.get(path, headers={"traceparent": wrong})).headers
