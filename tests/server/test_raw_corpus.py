"""Every case of the raw corpus is answered as it must be, the connection closes, nothing behind it is served."""

import asyncio
import json

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, Live, live
from tests.server.corpus import CASES, Case
from tests.server.corpus_more import ADMIN, KEY_CASES, MORE_CASES, USER
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import BODY, RAW_CASES, RawCase, parse, post
from tests.server.test_corpus import check_error

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL, port=0, grace_s=5.0)
LARGE_BYTES = 1 << 20
"""Larger ones are sent once, by test_corpus: most of their time is the client's."""


async def _canary(server: Live, *headers: str) -> None:
    status, _, body = parse(await server.talk(post(BODY, "Connection: close", *headers)))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "olleh"


@pytest.mark.parametrize("case", RAW_CASES, ids=[case.name for case in RAW_CASES])
async def test_refused_closed_and_nothing_smuggled(codec: TextCodec, case: RawCase) -> None:
    engine = OracleEngine()
    async with live(codec, engine, SETTINGS) as server, asyncio.timeout(PATIENCE_S):
        # `talk` returns only once the server has closed the connection.
        status, headers, body = parse(await server.talk(case.data + post(BODY) + b"\r\n"))
        assert status == case.status
        check_error(json.loads(body), case.code, None, case.data)
        assert headers["connection"] == "close"
        assert headers["x-request-id"].startswith("req-")
        assert engine.opened == [], "nothing behind a malformed request is served"
        await _canary(server)


def _as_bytes(case: Case) -> bytes:
    framed = {} if {"content-length", "transfer-encoding"} & case.headers.keys() else {"Content-Length": len(case.body)}
    headers = {"Host": "localhost", "Connection": "close", **framed, **case.headers}
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + case.body


@pytest.mark.parametrize("num_keys", [0, 1])
async def test_one_server_survives_the_whole_corpus(codec: TextCodec, num_keys: int) -> None:
    """The same server takes all of it, one after the other, over real connections."""
    keys = (USER, ADMIN) * num_keys
    engine = OracleEngine()
    settings = ServerSettings(MODEL, port=0, grace_s=5.0, api_keys=keys)
    cases = KEY_CASES if keys else [case for case in (*CASES, *MORE_CASES) if len(case.body) < LARGE_BYTES]
    own_key = [f"Authorization: Bearer {USER.secret}"]
    async with live(codec, engine, settings) as server:
        for case in cases:
            async with asyncio.timeout(PATIENCE_S):
                status, _, body = parse(await server.talk(_as_bytes(case)))
            assert status == case.status, case.name
            if body:
                assert json.loads(body)["error"]["code"] == case.code, case.name
            await _canary(server, *own_key)
        for raw in RAW_CASES:
            async with asyncio.timeout(PATIENCE_S):
                status, _, _ = parse(await server.talk(raw.data + b"\r\n\r\n"))
            assert status == (401 if keys and raw.is_for_key_owners else raw.status), raw.name
            await _canary(server, *own_key)
        assert len(engine.opened) == len(cases) + len(RAW_CASES), "the canaries and nothing else"
