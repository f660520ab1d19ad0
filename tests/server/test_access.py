"""Keys, rights, the two listeners, and what is reachable without either."""

import httpx
import pytest

from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, Right, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.settings.host_and_port import is_loopback
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, live, served
from tests.server.corpus import completion
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
USER = ApiKey("u" * 32, Namespace("acme"))
ADMIN = ApiKey("a" * 40, Namespace("ops"), frozenset(Right))
KEYED = ServerSettings(MODEL, port=0, api_keys=(USER, ADMIN))
JSON = {"content-type": "application/json"}


def _bearer(secret: str) -> dict[str, str]:
    return JSON | {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Basic " + "u" * 32, "u" * 32, "Bearer x", "Bearer " + "u" * 31, "Bearer " + "u" * 5000],
)
async def test_a_wrong_key_gets_401(codec: TextCodec, authorization: str) -> None:
    engine = OracleEngine()
    async with served(codec, engine, KEYED) as case:
        headers = JSON | {"authorization": authorization} if authorization else JSON
        reply = await case.client.post("/v1/completions", content=completion({}), headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]
        assert (await case.client.get("/v1/nothing")).status_code == 401, "paths are not told to strangers"
    assert engine.opened == []


async def test_a_key_that_is_not_ascii_gets_401(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), KEYED) as case:
        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer \xff\xfe\xe4")]
        reply = await case.client.post("/v1/completions", content=completion({}), headers=headers)
        assert reply.status_code == 401


async def test_a_key_names_the_tenant(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, KEYED) as case:
        for secret in (USER.secret, ADMIN.secret):
            for salt in (None, "s"):
                body = completion({"cache_salt": salt})
                reply = await case.client.post("/v1/completions", content=body, headers=_bearer(secret))
                assert reply.status_code == 200
        lower = JSON | {"authorization": f"bearer {USER.secret}"}
        assert (await case.client.post("/v1/completions", content=completion({}), headers=lower)).status_code == 200
    namespaces = [generation.namespace for generation in engine.opened]
    assert namespaces[:4] == ["acme", "4:acme+s", "ops", "3:ops+s"]
    assert len(set(namespaces)) == 4


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": USER.secret}, 200),
        ({"x-api-key": USER.secret, "anthropic-version": "2023-06-01"}, 200),
        ({"x-api-key": USER.secret, "authorization": f"Bearer {USER.secret}"}, 200),
        ({"x-api-key": USER.secret, "authorization": f"Bearer {ADMIN.secret}"}, 400),
        ({"x-api-key": USER.secret, "authorization": "Bearer x"}, 400),
        ({"x-api-key": "x", "authorization": f"Bearer {USER.secret}"}, 400),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "x"}, 401),
        ({"x-api-key": f"Bearer {USER.secret}"}, 401),
    ],
)
async def test_a_key_may_come_as_anthropics_clients_send_it(
    codec: TextCodec, headers: dict[str, str], status: int
) -> None:
    engine = OracleEngine()
    async with served(codec, engine, KEYED) as case:
        reply = await case.client.post("/v1/completions", content=completion({}), headers=JSON | headers)
        assert reply.status_code == status
    assert [generation.namespace for generation in engine.opened] == ["acme"] * (status == 200)


@pytest.mark.parametrize(
    "name", ["authorization", "x-api-key", "content-type", "content-encoding", "x-deadline-seconds"]
)
async def test_a_header_that_two_readers_could_take_differently_is_refused(codec: TextCodec, name: str) -> None:
    """A proxy may have looked at the first key, and this server at the last."""
    values = {"authorization": f"Bearer {USER.secret}", "content-type": "application/json", "x-deadline-seconds": "9"}
    good = {"authorization": values["authorization"], "content-type": values["content-type"]}
    twice = [*good.items(), (name, values.get(name, "identity")), (name, values.get(name, "identity"))]
    async with served(codec, OracleEngine(), KEYED) as case:
        reply = await case.client.post("/v1/completions", content=completion({}), headers=twice)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, f"the header {name} is there twice")
        assert (await case.client.post("/v1/completions", content=completion({}), headers=good)).status_code == 200


async def test_probes_need_no_key(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), KEYED) as case:
        for path in ("/health", "/livez", "/readyz"):
            assert (await case.client.get(path)).status_code == 200


async def test_admin_routes_have_a_listener_of_their_own(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), KEYED) as server, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        assert server.where.admin is not None
        host, port = server.where.admin
        assert host == "127.0.0.1"
        facts = await client.get(server.url + "/server_info", headers=_bearer(USER.secret))
        assert facts.json().keys() == {"version", "model", "served_model_name", "model_path", "tokenizer_path"}
        assert (await client.get(server.url + "/server_info")).status_code == 401
        for path in ("/metrics", "/server_info"):
            public = await client.get(server.url + path, headers=_bearer(ADMIN.secret))
            assert (public.status_code, "engine" in public.text) == (200 if path == "/server_info" else 404, False)
            admin = f"http://{host}:{port}{path}"
            assert (await client.get(admin)).status_code == 401
            refused = await client.get(admin, headers=_bearer(USER.secret))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            assert (await client.get(admin, headers=_bearer(ADMIN.secret))).status_code == 200
        for path in (
            "/flush_cache",
            "/reset_prefix_cache",
            "/admin/drain",
            "/admin/role",
            "/admin/workers/join",
            "/admin/workers/leave",
        ):
            assert (await client.post(server.url + path, headers=_bearer(ADMIN.secret))).status_code == 404
            assert (await client.post(f"http://{host}:{port}{path}", headers=_bearer(USER.secret))).status_code == 403
        wrong = await client.post(f"http://{host}:{port}/v1/completions", headers=_bearer(ADMIN.secret))
        assert wrong.status_code == 404


async def test_admin_calls_from_a_browser_are_refused(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post("/admin/drain", headers={"origin": "http://evil.example"})
        assert reply.status_code == 403
        assert (await case.client.get("/readyz")).status_code == 200
        assert (await case.client.delete("/admin/drain", headers={"origin": "http://x"})).status_code in (403, 405)


@pytest.mark.parametrize(
    ("host", "keys", "separate"),
    [
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("127.0.0.1", (USER,), True),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("example.org", (), True),
    ],
)
def test_when_the_admin_listener_is_separate(host: str, keys: tuple[ApiKey, ...], separate: bool) -> None:
    settings = ServerSettings(MODEL, host=host, api_keys=keys)
    assert settings.admin_address == (("127.0.0.1", 8001) if separate else None)
    assert is_loopback(host) == (host in ("127.0.0.1", "::1", "localhost"))


def test_the_admin_listener_can_be_elsewhere() -> None:
    """For what collects metrics from other machines; it also has one when the API alone would have none."""
    assert ServerSettings(MODEL, api_keys=(USER,), admin_host="10.0.0.1").admin_address == ("10.0.0.1", 8001)
    assert ServerSettings(MODEL, api_keys=(USER,), admin_port=9100).admin_address == ("127.0.0.1", 9100)
    assert ServerSettings(MODEL, admin_host="127.0.0.1").admin_address == ("127.0.0.1", 8001)
    assert ServerSettings(MODEL, port=65534, admin_port=9100).admin_address == ("127.0.0.1", 9100)


def test_secrets_are_not_shown() -> None:
    assert USER.secret not in repr(KEYED)
