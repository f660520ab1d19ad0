"""Where a server listens beside an IPv4 port: IPv6, a Unix socket, TLS."""

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, HttpLimits, ServerSettings, TlsFiles
from deltaserve.server.sockets import check_certificate
from deltaserve.server.text.text_codec import TextCodec
from tests.event_loops import on_both_loops
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, events, live
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
PEM = Path(__file__).resolve().parent.parent / "fixtures" / "localhost.pem"
"""A certificate of localhost that signs itself, and its key: valid for a hundred years, and nowhere else."""
BODY = {"prompt": "hi", "max_tokens": 3, "stream": True}


async def _talk(client: httpx.AsyncClient) -> None:
    """A whole exchange: a stream, an error, a large body that is refused while it is on its way."""
    reply = await client.post("/v1/completions", json=BODY)
    assert (reply.status_code, len(events(reply.text))) == (200, 4)
    assert (await client.post("/v1/completions", json=BODY | {"n": 0})).status_code == 400
    large = b"x" * (9 * 1024 * 1024)
    headers = {"content-type": "application/json"}
    assert (await client.post("/v1/completions", content=large, headers=headers)).status_code == 413
    assert (await client.get("/readyz")).status_code == 200


async def test_ipv6(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), ServerSettings(MODEL, host="::1", port=0)) as server:
        assert server.url == f"http://[::1]:{server.address[1]}"
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            await _talk(client)


async def test_every_address_of_both_kinds(codec: TextCodec) -> None:
    limits = HttpLimits(max_connections_per_address=1)
    settings = ServerSettings(MODEL, host="::", port=0, admin_port=0, http=limits)
    async with live(codec, OracleEngine(), settings) as server:
        for host in ("127.0.0.1", "[::1]"):
            async with httpx.AsyncClient(base_url=f"http://{host}:{server.address[1]}", timeout=PATIENCE_S) as client:
                await _talk(client)


@on_both_loops
async def test_a_unix_socket(codec: TextCodec, tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    async with live(codec, OracleEngine(), ServerSettings(MODEL, uds=str(path))) as server:
        assert server.url == f"http://unix:{path}:"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://anything.example", timeout=PATIENCE_S
        ) as client:
            await _talk(client)
            assert (await client.get("/metrics")).status_code == 200
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with live(codec, OracleEngine(), ServerSettings(MODEL, uds=str(path))):
                pass
        assert path.exists()
    assert not path.exists()


async def test_a_unix_socket_that_was_left_behind_is_taken_over_and_a_file_is_not(
    codec: TextCodec, tmp_path: Path
) -> None:
    path = tmp_path / "llm.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with live(codec, OracleEngine(), ServerSettings(MODEL, uds=str(path))):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen there"):
        async with live(codec, OracleEngine(), ServerSettings(MODEL, uds=str(path))):
            pass
    assert path.read_text() == "mine"


@on_both_loops
async def test_tls(codec: TextCodec) -> None:
    """On both listeners: keys are sent to both."""
    key = ApiKey("u" * 32, Namespace("acme"))
    settings = ServerSettings(MODEL, port=0, tls=TlsFiles(str(PEM), None), api_keys=(key,))
    trust = ssl.create_default_context(cafile=str(PEM))
    headers = {"x-api-key": key.secret}
    async with live(codec, OracleEngine(), settings) as server:
        assert server.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=server.url, verify=trust, headers=headers, timeout=PATIENCE_S) as client:
            await _talk(client)
            assert server.where.admin is not None
            admin = f"https://127.0.0.1:{server.where.admin[1]}/metrics"
            assert (await client.get(admin)).status_code == 403
        reader, writer = await server.connect()
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.read() == b"", "plain HTTP is not answered"
        writer.close()


@on_both_loops
async def test_a_refusal_before_the_application_arrives_over_tls(codec: TextCodec) -> None:
    """TLS has no half of a connection to end: the answer is sent all the same."""
    settings = ServerSettings(MODEL, port=0, tls=TlsFiles(str(PEM), None))
    trust = ssl.create_default_context(cafile=str(PEM))
    async with live(codec, OracleEngine(), settings) as server:
        reader, writer = await asyncio.open_connection(*server.address, ssl=trust, server_hostname="localhost")
        writer.write(b"not HTTP\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()


def _files(folder: Path) -> Mapping[str, tuple[str, str | None]]:
    text = PEM.read_text()
    certificate, key = text[: text.index("-----BEGIN PRIVATE")], text[text.index("-----BEGIN PRIVATE") :]
    for name, content in {"certificate": certificate, "key": key, "junk": "hello"}.items():
        (folder / name).write_text(content)
    given = {
        "both in one": (PEM, None),
        "apart": (folder / "certificate", folder / "key"),
        "no key": (folder / "certificate", None),
        "a missing key": (folder / "certificate", folder / "missing"),
        "junk": (folder / "junk", None),
        "a folder": (folder, None),
    }
    return {name: (str(first), None if second is None else str(second)) for name, (first, second) in given.items()}


@pytest.mark.parametrize("case", ["both in one", "apart", "no key", "a missing key", "junk", "a folder"])
def test_certificates_are_looked_at_before_anything_starts(tmp_path: Path, case: str) -> None:
    files = TlsFiles(*_files(tmp_path)[case])
    if case in ("both in one", "apart"):
        check_certificate(files)
        return
    with pytest.raises(ConfigError, match=r"--ssl-(cert|key)file .*(no such file|not PEM files)") as caught:
        check_certificate(files)
    assert "\n" not in str(caught.value)
    assert os.sep in str(caught.value)
