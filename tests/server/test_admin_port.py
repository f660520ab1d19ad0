"""Who asks the API's listener for an admin route is told which port has it."""

import httpx
import pytest

from deltaserve.server.app import create_app
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/metrics", "/flush_cache"])
async def test_the_port_is_named(codec: TextCodec, path: str) -> None:
    app = create_app(OracleEngine(), codec, ServerSettings("tiny", port=30000, admin_port=30001))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as client:
        reply = await client.get(path)
    assert reply.status_code == 404
    assert "port 30001" in reply.json()["error"]["message"]
