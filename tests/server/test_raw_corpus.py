"""Every case of the raw corpus is answered as it must be, the connection closes, nothing behind it is served."""

import asyncio
import json
import re

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltaserve.server.http_parser import FEED_BYTES
from deltaserve.server.protocol import GuardedProtocol
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, Live, live
from tests.server.corpus import CASES, Case
from tests.server.corpus_more import ADMIN, KEY_CASES, MORE_CASES, USER
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import BODY, CHUNKED, ODD_CASES, RAW_CASES, RawCase, parse, post, request
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


_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [^\r\n]*\r\n")


async def test_odd_requests_are_answered_each_and_the_connection_goes_on(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        for name, (data, statuses) in ODD_CASES.items():
            answer = await server.talk(data + request("Connection: close", line="GET /livez HTTP/1.1"))
            goes_on = statuses[-1] != 421 and b" HTTP/1.0" not in data
            assert tuple(map(int, _STATUS.findall(answer))) == (*statuses, *([200] if goes_on else [])), name
            await _canary(server)


async def test_a_host_that_is_no_name_is_no_failure_of_a_server_that_answers_to_any(codec: TextCodec) -> None:
    settings = ServerSettings(MODEL, port=0, grace_s=5.0, api_keys=(USER,))
    key = f"Authorization: Bearer {USER.secret}".encode()
    async with live(codec, OracleEngine(), settings) as server:
        for host in (b"[::1", b"", b"\xff@:x", b"a:b:c", b"//"):
            head = b"GET /v1/nothing HTTP/1.1\r\nConnection: close\r\nHost: %s\r\n%s\r\n\r\n" % (host, key)
            status, _, body = parse(await server.talk(head))
            assert (status, json.loads(body)["error"]["code"]) == (404, "not_found"), host


@pytest.mark.parametrize("size", [1 << 30, 1])
async def test_a_connection_is_parsed_in_small_pieces(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """All of a piece is parsed before anybody else is served. `size`: of what the event loop reads at a time, at least;
    TLS and other loops than asyncio's read as much as they like."""
    parsed: list[int] = []
    waits: list[bytes] = []
    feed, take = H11Protocol.data_received, GuardedProtocol.data_received

    def watched(self: H11Protocol, data: bytes) -> None:
        parsed.append(len(data))
        feed(self, data)

    def gathered(self: GuardedProtocol, data: bytes) -> None:
        waits.append(data)
        if sum(map(len, waits)) >= min(size, len(sent)):
            take(self, b"".join(waits))
            waits.clear()

    sent = request(*CHUNKED, "Connection: close", body=b"2\r\n  \r\n" * 40_000 + b"0\r\n\r\n")
    monkeypatch.setattr(H11Protocol, "data_received", watched)
    monkeypatch.setattr(GuardedProtocol, "data_received", gathered)
    async with live(codec, OracleEngine(), SETTINGS) as server:
        status, _, _ = parse(await server.talk(sent))
    assert status == 400
    assert sum(parsed) + sum(map(len, waits)) == len(sent)
    assert max(parsed) <= FEED_BYTES


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
