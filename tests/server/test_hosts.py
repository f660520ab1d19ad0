"""The Host header on loopback: without keys only names of this machine are answered (DNS rebinding)."""

import httpx
import pytest

from deltaserve.core.ids import Namespace
from deltaserve.server.app import create_admin_app, create_app
from deltaserve.server.settings import ApiKey, Right, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, live, served
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import parse

pytestmark = pytest.mark.anyio
OWN = (
    "localhost",
    "LocalHost:8000",
    "localhost.:8000",
    "chat.localhost",
    "127.0.0.1",
    "127.0.0.1:30000",
    "127.8.9.1:1",
    "[::1]",
    "[::1]:30000",
)
FOREIGN = (
    "evil.com",
    "evil.com:8000",
    "localhost.evil.com",
    "notlocalhost",
    "127.0.0.1.evil.com",
    "127.0.0.1.evil.com:80",
    "10.0.0.1",
    "0.0.0.0",
    "[::2]",
    "[::1].evil.com",
    "localhost@evil.com",
    "evil.com/localhost",
    "",
    ":8000",
    "[",
    "\xe9vil.com",
)
LOOPBACK = ServerSettings(MODEL, port=0)
KEY = ApiKey("k" * 40, Namespace("ops"), frozenset(Right))


async def _ask(
    client: httpx.AsyncClient, host: str, method: str = "POST", path: str = "/flush_cache"
) -> httpx.Response:
    return await client.request(method, path, headers=[(b"host", host.encode("latin-1"))])


@pytest.mark.parametrize("host", OWN)
async def test_names_of_this_machine_are_answered(codec: TextCodec, host: str) -> None:
    async with served(codec, OracleEngine(), LOOPBACK) as case:
        assert (await _ask(case.client, host)).status_code == 202


@pytest.mark.parametrize("host", FOREIGN)
async def test_other_names_get_421_and_do_nothing(codec: TextCodec, host: str) -> None:
    engine = OracleEngine()
    async with served(codec, engine, LOOPBACK) as case:
        for method, path in (("POST", "/flush_cache"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/docs")):
            reply = await _ask(case.client, host, method, path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (421, "wrong_host")
            assert "--allowed-hosts" in reply.json()["error"]["message"]
        assert (await _ask(case.client, host, "GET", "/livez")).status_code == 200, "a probe may use any name"
        counted = 'deltaserve_http_responses_total{path="/flush_cache",status="421"} 1.0'
        assert counted in case.front.metrics.text().decode()
    assert engine.num_flushes == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ServerSettings(MODEL, port=0, allowed_hosts=("Evil.com",)), id="named"),
        pytest.param(ServerSettings(MODEL, port=0, api_keys=(KEY,)), id="keys"),
        pytest.param(ServerSettings(MODEL, port=0, host="0.0.0.0"), id="beyond-loopback"),
    ],
)
async def test_any_name_where_it_is_allowed_or_does_not_protect(codec: TextCodec, settings: ServerSettings) -> None:
    async with served(codec, OracleEngine(), settings) as case:
        headers = {"host": "evil.com:80", "authorization": f"Bearer {KEY.secret}"}
        assert (await case.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil.com", 421)])
async def test_the_admin_listener_asks_as_well(codec: TextCodec, host: str, status: int) -> None:
    settings = ServerSettings(MODEL, port=0, host="0.0.0.0", admin_host="127.0.0.1", admin_port=0)
    admin = create_admin_app(create_app(OracleEngine(), codec, settings))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(admin), base_url="http://localhost", timeout=PATIENCE_S
    ) as client:
        assert (await _ask(client, host, "GET", "/metrics")).status_code == status


async def test_http_1_0_without_a_host_is_no_browser(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), LOOPBACK) as server:
        assert parse(await server.talk(b"GET /v1/models HTTP/1.0\r\n\r\n"))[0] == 200
        assert parse(await server.talk(b"GET /v1/models HTTP/1.1\r\nHost: evil.com\r\n\r\n"))[0] == 421
