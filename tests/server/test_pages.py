"""GET /docs and GET /view: pages that need nothing from elsewhere and run no script but their own."""

import base64
import hashlib
import re

import pytest

from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
KEYED = ServerSettings(MODEL, api_keys=(ApiKey("k" * 40, Namespace("team")),))


@pytest.mark.parametrize("settings", [ServerSettings(MODEL), KEYED], ids=["open", "keyed"])
async def test_the_page_is_there_for_a_browser(codec: TextCodec, settings: ServerSettings) -> None:
    """Also where keys are asked for: a browser sends none with an address; the page asks for it."""
    async with served(codec, OracleEngine(), settings) as case:
        reply = await case.client.get("/", follow_redirects=True)
        assert (reply.status_code, reply.url.path) == (200, "/docs")
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        asked = await case.client.get("/openapi.json")
        assert asked.status_code == (401 if settings.api_keys else 200)


@pytest.mark.parametrize("page", ["/docs", "/view"])
async def test_nothing_comes_from_elsewhere_and_no_other_script_runs(codec: TextCodec, page: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.get(page)
    assert not re.findall(r"(?:https?:)?//[a-z]", reply.text, re.IGNORECASE)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=|style=", reply.text)
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_what_the_page_reads_is_what_the_server_describes(codec: TextCodec) -> None:
    """The names its script takes from the description are there, and an example of each body, which is served."""
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        described = (await case.client.get("/openapi.json")).json()
        schemas = described["components"]["schemas"]
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                assert method.upper() in ("GET", "POST") and operation["summary"]
                if "requestBody" in operation:
                    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
                    assert schemas[name]["properties"], path
                    (example,) = schemas[name]["examples"]
                    assert (await case.client.post(path, json=example)).status_code == 200
