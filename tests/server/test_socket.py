"""What happens on a real connection: smuggling, slowness, limits, clients that leave, shutdown."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from deltaserve.core.errors import ConfigError, FailReason
from deltaserve.server.protocol import GuardedProtocol
from deltaserve.server.settings import HttpLimits, ServerSettings, StreamTimes
from deltaserve.server.text.text_codec import TextCodec
from tests.event_loops import on_both_loops
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, Live, live, until
from tests.server.corpus import completion
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import BODY, CHUNKED, parse, post, request

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL, port=0, grace_s=5.0)
NOTHING = {False: b"HTTP/1.1 100 Continue\r\n\r\n", True: b"2\r\n\n\n\r\n"}
"""What a client that sends nothing more gets meanwhile, before an answer and in a stream."""


def _code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


async def _canary(server: Live) -> None:
    status, _, body = parse(await server.talk(post(BODY, "Connection: close")))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "olleh"


async def test_an_endless_head_is_refused(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        status, _, body = parse(await server.talk(b"GET /health HTTP/1.1\r\nX: " + b"y" * 200_000))
        assert (status, _code(body)) == (431, "headers_too_large")
        await _canary(server)


@on_both_loops
async def test_slow_heads_and_bodies_end_with_408(codec: TextCodec) -> None:
    limits = HttpLimits(header_timeout_s=0.2, body_timeout_s=0.2)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        for data in (b"", b"GET /health HT", post(BODY)[:-3], request(*CHUNKED, body=b"5\r\nhe")):
            status, headers, body = parse(await server.talk(data))
            assert (status, _code(body)) == (408, "request_timeout")
            assert headers["connection"] == "close"
        # The second request of a connection is watched as the first was.
        answer = await server.talk(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTT")
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"HTTP/1.1 408" in answer
        await _canary(server)


@on_both_loops
async def test_a_body_too_large_is_answered_while_it_is_sent(codec: TextCodec) -> None:
    limits = HttpLimits(max_body_bytes=1000, linger_s=1.0)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        reader, writer = await server.connect()
        writer.write(request(*CHUNKED))
        for _ in range(200):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await writer.drain()
        status, _, _ = parse(await reader.readuntil(b"\r\n\r\n"))
        assert status == 413, "the answer is not lost to a reset although the body goes on"
        writer.close()
        status, _, body = parse(await server.talk(post(b"x" * 1001, "Connection: close")))
        assert (status, _code(body)) == (413, "body_too_large")
        await _canary(server)


async def test_a_refusal_is_not_lost_while_the_whole_body_is_sent(codec: TextCodec) -> None:
    """Even with `Connection: close`: closing under a body on its way would be a reset."""
    body = completion({"prompt": "x" * (9 * 1024 * 1024)})
    async with live(codec, OracleEngine(), SETTINGS) as server:
        status, _, answer = parse(await server.talk(post(body, "Connection: close")))
        assert (status, _code(answer)) == (413, "body_too_large")
        unread = request("Content-Type: text/plain", f"Content-Length: {len(body)}", "Connection: close", body=body)
        status, _, answer = parse(await server.talk(unread))
        assert (status, _code(answer)) == (415, "unsupported_media_type")
        await _canary(server)


async def test_a_client_that_announced_more_than_it_sends_is_not_waited_for(codec: TextCodec) -> None:
    limits = HttpLimits(linger_s=3600.0, linger_silent_s=0.01)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        refused = request("Content-Type: text/plain", "Content-Length: 100000", body=b"short")
        status, _, answer = parse(await server.talk(refused))
        assert (status, _code(answer)) == (415, "unsupported_media_type")
        await _canary(server)


async def half_closed(
    server: Live, engine: OracleEngine, stream: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its request and ended its half, and was told that its answer is to come."""
    reader, writer = await server.connect()
    writer.write(post(completion({"stream": stream})))
    await until(lambda: engine.opened)
    if stream:
        await reader.readuntil(b"data: ")
    writer.write_eof()
    await reader.readuntil(NOTHING[stream])
    return reader, writer


@on_both_loops
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_half_of_the_connection_has_its_answer(codec: TextCodec, stream: bool) -> None:
    """At its end the connection is closed. Until then what is written means nothing: interim answers, empty lines."""
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1 if stream else 0)
    async with live(codec, engine, SETTINGS) as server:
        reader, writer = await half_closed(server, engine, stream)
        assert engine.gate is not None
        engine.gate.set()
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert (b"data: [DONE]" if stream else b'"text":"olleh"') in answer
        assert not engine.cancelled
        writer.close()


@pytest.mark.parametrize("num_requests", [1, 2, 40])
async def test_every_whole_request_before_the_end_is_answered(codec: TextCodec, num_requests: int) -> None:
    """However much of them is parsed when the client ends its half; what is not whole is dropped."""
    async with live(codec, OracleEngine(), SETTINGS) as server:
        reader, writer = await server.connect()
        writer.write(post(BODY) * num_requests + post(BODY)[:-3])
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.count(b'"text":"olleh"') == num_requests
        writer.close()


@on_both_loops
@pytest.mark.parametrize(
    "data", [post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), post(BODY)[:-3], post(BODY)[:30], b""], ids=range(4)
)
async def test_a_client_that_ends_its_half_too_early_is_taken_for_gone(codec: TextCodec, data: bytes) -> None:
    """With no whole request, or by HTTP/1.0, which has no interim answers: nothing tells it from one that left."""
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=0)
    async with live(codec, engine, SETTINGS) as server:
        reader, writer = await server.connect()
        writer.write(data)
        if b"HTTP/1.0" in data:
            await until(lambda: engine.opened)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        await until(lambda: len(engine.ended) == len(engine.opened) and server.front.admission.num_requests == 0)
        writer.close()


@on_both_loops
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_after_it_closed_its_half_cancels_its_rooms(codec: TextCodec, stream: bool) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1 if stream else 0)
    async with live(codec, engine, SETTINGS) as server:
        _, writer = await half_closed(server, engine, stream)
        writer.close()
        await until(lambda: engine.cancelled)


@on_both_loops
async def test_an_endless_refused_body_is_cut(codec: TextCodec) -> None:
    limits = HttpLimits(max_body_bytes=1000, linger_s=0.2)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        _, writer = await server.connect()
        writer.write(request(*CHUNKED))
        with pytest.raises((ConnectionError, RuntimeError)):  # RuntimeError: uvloop's, of a connection that is lost
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        writer.close()
        await _canary(server)


@on_both_loops
async def test_too_many_connections_get_503(codec: TextCodec) -> None:
    limits = HttpLimits(max_connections=3)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        held = [await server.connect() for _ in range(3)]
        status, headers, body = parse(await server.talk(b""))
        assert (status, _code(body)) == (503, "too_many_connections")
        assert 1 <= int(headers["retry-after"]) <= 5
        # What the refused client sends meanwhile must not make the close a reset, which would eat the answer.
        status, _, body = parse(await server.talk(post(b"x" * 300_000)))
        assert (status, _code(body)) == (503, "too_many_connections")
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while parse(await server.talk(post(BODY, "Connection: close")))[0] == 503:
                await asyncio.sleep(0.01)
        await _canary(server)


async def test_connections_beyond_the_limit_take_no_place_of_others(codec: TextCodec) -> None:
    """They may stay for a while, however many have come: who comes when one within the limit has left is served."""
    limits = HttpLimits(max_connections=2, header_timeout_s=PATIENCE_S)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        held = [await server.connect() for _ in range(2)]
        beyond = [await server.connect() for _ in range(8)]
        for reader, _ in beyond:
            assert parse(await reader.read())[0] == 503  # its end is open: the connection is still there
        held[0][1].close()
        async with asyncio.timeout(PATIENCE_S):
            while parse(await server.talk(post(BODY, "Connection: close")))[0] == 503:
                await asyncio.sleep(0.01)
        assert all(not writer.transport.is_closing() for _, writer in beyond), "they have not made room"
        for _, writer in (*beyond, *held):
            writer.close()


async def test_pipelined_requests_are_answered_in_order(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        bodies = [completion({"prompt": text, "max_tokens": len(text)}) for text in ("ab", "xyz")]
        answer = await server.talk(post(bodies[0]) + post(bodies[1], "Connection: close"))
        assert answer.index(b'"ba"') < answer.index(b'"zyx"')


@on_both_loops
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_rooms(codec: TextCodec, stream: bool) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=2)
    async with live(codec, engine, SETTINGS) as server:
        reader, writer = await server.connect()
        writer.write(post(completion({"stream": stream, "n": 3})))
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: len(engine.opened) == 3)
        writer.close()
        await until(lambda: len(engine.cancelled) == 3)
        await until(lambda: b"deltaserve_clients_gone_total 1.0" in server.front.metrics.text())
        assert b"deltaserve_num_requests_running 0.0" in server.front.metrics.text()
        assert b"deltaserve_num_requests_waiting 0.0" in server.front.metrics.text()
        assert server.front.admission.num_requests == 0


async def test_a_client_that_leaves_in_its_body_leaves_nothing(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with live(codec, engine, SETTINGS) as server:
        _, writer = await server.connect()
        writer.write(post(BODY)[:-3])
        await until(lambda: server.front.admission.num_requests == 1)
        writer.close()
        await until(lambda: server.front.admission.num_requests == 0)
        assert engine.opened == []


@asynccontextmanager
async def _slow_stream(server: Live, body: bytes) -> AsyncIterator[socket.socket]:
    """A client with little room in its socket that has asked for a stream and read nothing yet."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        await loop.sock_sendall(sock, post(body, "Connection: close"))
        yield sock


@on_both_loops
async def test_a_client_that_takes_no_answer_does_not_keep_its_connection(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is complete, so nothing but the connection is held."""
    lost: list[GuardedProtocol] = []
    original = GuardedProtocol.connection_lost

    def connection_lost(protocol: GuardedProtocol, exc: Exception | None) -> None:
        lost.append(protocol)
        original(protocol, exc)

    monkeypatch.setattr(GuardedProtocol, "connection_lost", connection_lost)
    engine = OracleEngine(answer=lambda generation: [97] * NUM_MANY)
    settings = ServerSettings(MODEL, port=0, http=HttpLimits(keep_alive_s=0.2))
    async with live(codec, engine, settings) as server, _slow_stream(server, completion({"logprobs": 1})):
        await until(lambda: engine.ended)
        await until(lambda: lost)


async def test_a_client_that_takes_an_answer_by_drops_does_not_keep_its_connection(codec: TextCodec) -> None:
    """Each drop is progress; all of them would take hours."""
    loop = asyncio.get_running_loop()
    engine = OracleEngine(answer=lambda generation: [97] * NUM_MANY)
    limits = HttpLimits(keep_alive_s=1.0, least_bytes_per_s=1 << 30)
    async with live(codec, engine, ServerSettings(MODEL, port=0, http=limits)) as server:
        async with _slow_stream(server, completion({"logprobs": 1})) as sock:
            await until(lambda: engine.ended)
            answer = bytearray()
            with contextlib.suppress(ConnectionError):
                while data := await loop.sock_recv(sock, 16 * 1024):
                    answer += data
                    await asyncio.sleep(0.02)
        assert answer.startswith(b"HTTP/1.1 200")
        assert not answer.endswith(b"}"), "it was cut"


@on_both_loops
async def test_a_connection_that_asks_nothing_more_is_closed(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=HttpLimits(keep_alive_s=1.0))) as server:
        answer = await server.talk(request(line="GET /livez HTTP/1.1"))
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"}"), "and nothing is said at its end"


async def test_empty_lines_are_no_sign_of_a_request(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        assert (await server.talk(b"\r\n" * 100)).startswith(b"HTTP/1.1 400")
        await _canary(server)


@on_both_loops
async def test_what_is_sent_behind_a_request_waits_in_the_client(codec: TextCodec) -> None:
    """A connection has one request at a time; the next one is not read meanwhile, however long it is."""
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    async with live(codec, engine, SETTINGS) as server:
        reader, writer = await server.connect()
        writer.write(post(completion({"stream": True})))
        await reader.readuntil(b"data: ")
        writer.write(post(b"x" * (64 << 20)))
        left = 0
        while writer.transport.get_write_buffer_size() != left:  # until no more of it is taken
            left = writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.5)
        assert left > 32 << 20
        assert engine.gate is not None
        engine.gate.set()
        await reader.readuntil(b"[DONE]")
        status, _, _ = parse((await reader.readuntil(b"HTTP/1.1 "))[-9:] + await reader.readuntil(b"\r\n\r\n"))
        assert status == 413
        writer.close()


async def test_who_sends_what_is_not_http_is_named(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        reader, writer = await server.connect()
        host, port = writer.get_extra_info("sockname")[:2]
        writer.write(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].startswith(f"{host}:{port} sent what is not HTTP/1.1: ")


NUM_MANY = 40_000
"""Tokens of a stream that no socket buffers hold."""


@on_both_loops
async def test_a_reader_that_stops_is_cut(codec: TextCodec) -> None:
    engine = OracleEngine(answer=lambda generation: [97] * NUM_MANY)
    settings = ServerSettings(MODEL, port=0, stream_times=StreamTimes(stall_s=0.2))
    async with live(codec, engine, settings) as server, _slow_stream(server, completion({"stream": True})):
        await until(lambda: b"deltaserve_streams_cut_total 1.0" in server.front.metrics.text())
        await until(lambda: len(engine.cancelled) == 1)
        assert engine.num_tokens < NUM_MANY // 10, "sockets hide how little was taken"
        assert (await server.talk(request("Connection: close", line="GET /livez HTTP/1.1"))).startswith(b"HTTP/1.1 200")


@on_both_loops
@pytest.mark.parametrize("num_samples", [1, 2])
async def test_a_reader_that_pauses_holds_its_engine_back_and_loses_nothing(codec: TextCodec, num_samples: int) -> None:
    engine = OracleEngine(answer=lambda generation: [97] * (NUM_MANY // num_samples))
    body = completion({"stream": True, "n": num_samples})
    async with live(codec, engine, SETTINGS) as server, _slow_stream(server, body) as sock:
        made = 0
        while engine.num_tokens > made or not made:  # until the stream stands still
            made = engine.num_tokens
            for _ in range(20):
                await asyncio.sleep(0.005)
        assert made < NUM_MANY, "tokens that nobody takes are not made"
        answer = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            answer += data
        assert answer.count(b'"text":"a"') == NUM_MANY
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"deltaserve_streams_cut_total 0.0" in server.front.metrics.text()


@on_both_loops
@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_shows_life_before_its_first_token(codec: TextCodec, fails: bool) -> None:
    """Proxies give up a connection on which nothing moves, long before a prompt in a queue has its turn."""
    engine = OracleEngine(gate=asyncio.Event())
    settings = ServerSettings(MODEL, port=0, stream_times=StreamTimes(head_s=0.01, silence_s=0.01))
    async with live(codec, engine, settings) as server:
        reader, writer = await server.connect()
        writer.write(post(completion({"stream": True}), "Connection: close"))
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            for _ in range(2):
                assert await reader.readuntil(b"\r\n\n\n\r\n") == b"2\r\n\n\n\r\n"
            if fails:
                engine.cancel(engine.opened[0].room, FailReason.PEER_LOST)
            assert engine.gate is not None
            engine.gate.set()
            rest = await reader.read()
        writer.close()
        assert (b'"code":"transfer_failed"' if fails else b'"text":"o"') in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_failure_before_the_head_keeps_its_status(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with live(codec, engine, SETTINGS) as server:
        asked = asyncio.create_task(server.talk(post(completion({"stream": True}), "Connection: close")))
        await until(lambda: engine.num_held)
        engine.cancel(engine.opened[0].room, FailReason.OVERLOADED)
        status, _, body = parse(await asked)
        assert (status, _code(body)) == (429, "overloaded")


@on_both_loops
async def test_shutdown_lets_running_requests_finish(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    settings = ServerSettings(MODEL, port=0, grace_s=PATIENCE_S)
    async with (
        live(codec, engine, settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        running = asyncio.create_task(
            client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})
        )
        await until(lambda: engine.opened)
        server.stop.set()
        await until(lambda: server.front.health.draining)
        assert (await client.get("/readyz")).json()["reasons"].keys() == {"draining"}
        refused = await client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})
        assert (refused.status_code, _code(refused.content)) == (503, "not_ready")
        assert "retry-after" in refused.headers
        assert (await client.get("/livez")).status_code == 200
        assert engine.gate is not None
        engine.gate.set()
        reply = await running
        assert reply.json()["choices"][0]["text"] == "olleh"
        await server.run


@on_both_loops
@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_grace_cuts_what_is_left(codec: TextCodec, stream: bool) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    settings = ServerSettings(MODEL, port=0, grace_s=0.1)
    async with (
        live(codec, engine, settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        body = completion({"stream": stream})
        running = asyncio.create_task(
            client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        )
        await until(lambda: engine.num_held)
        server.stop.set()
        reply = await running
        if stream:
            assert reply.status_code == 200
            assert reply.text.endswith("data: [DONE]\n\n")
            assert _code(reply.text.split("data: ")[-2].encode()) == "not_ready"
        else:
            assert (reply.status_code, _code(reply.content)) == (503, "not_ready")
        assert len(engine.cancelled) == 1
        await server.run


async def test_hurry_ends_the_grace_with_an_error_event(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    settings = ServerSettings(MODEL, port=0, grace_s=3600.0)
    async with (
        live(codec, engine, settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        body = completion({"stream": True})
        headers = {"content-type": "application/json"}
        running = asyncio.create_task(client.post("/v1/completions", content=body, headers=headers))
        await until(lambda: engine.opened)
        server.stop.set()
        await until(lambda: server.front.health.draining)
        server.hurry.set()
        reply = await running
        error = json.loads(reply.text.split("data: ")[-2])["error"]
        assert (error["code"], "the server is stopping" in error["message"]) == ("not_ready", True)
        await server.run


async def test_a_taken_port_is_a_clear_error(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        taken = ServerSettings(MODEL, port=server.address[1])
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with live(codec, OracleEngine(), taken):
                pass


@on_both_loops
async def test_small_writes_of_a_connection_leave_at_once(codec: TextCodec) -> None:
    """Else a stream's first event waits for the client's delayed acknowledgement of the head: 40 ms."""
    async with live(codec, OracleEngine(), SETTINGS) as server:
        reader, writer = await server.connect()
        writer.write(request(line="GET /livez HTTP/1.1"))
        await reader.readuntil(b"}")
        assert _options_of_accepted(server.address[1]) == [1]
        writer.close()


def _options_of_accepted(port: int) -> list[int]:
    """TCP_NODELAY of each connection that this process accepted on `port`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or gone meanwhile
            continue
        with sock, contextlib.suppress(OSError):
            if sock.family == socket.AF_INET and sock.getsockname()[1] == port and sock.getpeername():
                found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return found
