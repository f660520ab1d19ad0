"""What one connection sends is parsed a little at a time, in turn with what all others send."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from deltaserve.server.http_parser import FREE_FRAMING_BYTES, MAX_EMPTY_LINES, MAX_FRAMING, BoundedParser
from deltaserve.server.parse_turns import CONNECTION_EVENTS, TURN_EVENTS, ParseTurns
from deltaserve.server.protocol import GuardedProtocol
from deltaserve.server.settings import HttpLimits, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.event_loops import on_both_loops
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, live, until
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import BODY, CHUNKED, parse, post, request

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL, port=0, grace_s=5.0)
NUM_CONNECTIONS = 24
GET = request("Connection: close", line="GET /v1/models HTTP/1.1")


class _Log:
    """Which connection's events were parsed in which turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[list[BoundedParser]] = []
        self.came: dict[BoundedParser, int] = {}
        """Turns that had begun when its first bytes came."""
        take_turn, next_event, data_received = (
            ParseTurns._take_turn,
            BoundedParser.next_event,
            GuardedProtocol.data_received,
        )

        def watched_turn(turns: ParseTurns) -> None:
            self.turns.append([])
            take_turn(turns)

        def watched_event(parser: BoundedParser) -> Any:
            num_allowed = parser.num_allowed
            event = next_event(parser)
            self.turns[-1].extend([parser] * (num_allowed - parser.num_allowed))
            return event

        def watched_data(connection: GuardedProtocol, data: bytes) -> None:
            self.came.setdefault(connection._parser, len(self.turns))
            data_received(connection, data)

        monkeypatch.setattr(ParseTurns, "_take_turn", watched_turn)
        monkeypatch.setattr(BoundedParser, "next_event", watched_event)
        monkeypatch.setattr(GuardedProtocol, "data_received", watched_data)


@on_both_loops
async def test_a_request_is_parsed_between_the_chunks_of_many_others(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = b"1\r\n \r\n" * 10_000
    async with live(codec, OracleEngine(), SETTINGS) as server:
        log = _Log(monkeypatch)
        others = [await server.connect() for _ in range(NUM_CONNECTIONS)]
        for _, writer in others:
            writer.write(request(*CHUNKED, body=chunks))
        await until(lambda: len(log.came) == NUM_CONNECTIONS)
        known = set(log.came)
        assert (await server.talk(GET)).startswith(b"HTTP/1.1 200")
        (own,) = set(log.came) - known
        parsed = [number for number, turn in enumerate(log.turns) if own in turn]
        for _, writer in others:
            writer.close()
        in_turns = [{p: turn.count(p) for p in set(turn)} for turn in log.turns]
    assert max(map(len, log.turns)) <= TURN_EVENTS
    assert max(count for turn in in_turns for count in turn.values()) <= CONNECTION_EVENTS
    assert sum(map(len, log.turns)) < NUM_CONNECTIONS * 10_000, "the answer was there before the others' chunks were"
    turns_of_all = -(-(NUM_CONNECTIONS + 1) * CONNECTION_EVENTS // TURN_EVENTS)
    assert parsed[0] - log.came[own] <= turns_of_all


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate"])
async def test_a_body_of_framing_is_refused_by_name_and_read_no_further(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    sent = request(*CHUNKED, line=f"POST {path} HTTP/1.1", body=b"1\r\n \r\n" * 60_000)
    settings = ServerSettings(MODEL, port=0, grace_s=5.0, http=HttpLimits(linger_s=PATIENCE_S))
    async with live(codec, OracleEngine(), settings) as server:
        log = _Log(monkeypatch)
        status, headers, body = parse(await server.talk(sent))
        assert (status, headers["connection"]) == (400, "close")
        assert "chunks are too small" in json.loads(body)["error"]["message"]
        assert server.front.admission.num_requests == 0
    num_events = sum(map(len, log.turns))
    assert num_events < 2 * FREE_FRAMING_BYTES / (6 - MAX_FRAMING), "what came behind the refusal is not parsed"


@on_both_loops
async def test_a_bug_in_the_parser_ends_its_connection_and_no_other(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GuardedProtocol.handle_events

    def fails(connection: GuardedProtocol) -> None:
        if b"/bug" in connection._parser.trailing_data[0]:
            raise RuntimeError("a bug")
        original(connection)

    monkeypatch.setattr(GuardedProtocol, "handle_events", fails)
    async with live(codec, OracleEngine(), SETTINGS) as server:
        pairs = [(await server.connect(), await server.connect()) for _ in range(4)]
        for (_, bad), (_, good) in pairs:
            bad.write(request(line="GET /bug HTTP/1.1"))
            good.write(GET)
        for (bad_reader, bad), (good_reader, good) in pairs:
            async with asyncio.timeout(PATIENCE_S):
                assert (await good_reader.read()).startswith(b"HTTP/1.1 200")
                with contextlib.suppress(ConnectionError):
                    assert await bad_reader.read() == b""
            bad.close()
            good.close()


@pytest.mark.parametrize("cut", range(1, 6))
async def test_empty_lines_are_ignored_wherever_they_are_cut(codec: TextCodec, cut: int) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        reader, writer = await server.connect()
        data = b"\r\n\r\n" + post(BODY) + b"\r\n" + post(BODY, "Connection: close")
        for part in (data[:cut], data[cut:-100], data[-100:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == 2


async def test_so_many_empty_lines_are_ignored_before_each_request(codec: TextCodec) -> None:
    async with live(codec, OracleEngine(), SETTINGS) as server:
        lines = b"\r\n" * MAX_EMPTY_LINES
        answer = await server.talk((lines + post(BODY)) * 3 + lines + b"\r\n" + post(BODY))
        assert [answer.count(b"HTTP/1.1 %d" % status) for status in (200, 400)] == [3, 1]


@on_both_loops
async def test_empty_lines_alone_are_a_head_that_does_not_come(codec: TextCodec) -> None:
    limits = HttpLimits(header_timeout_s=0.2)
    async with live(codec, OracleEngine(), ServerSettings(MODEL, port=0, http=limits)) as server:
        for data in (b"\r\n", b"\r", post(BODY) + b"\r\n"):
            answer = await server.talk(data)
            assert b"HTTP/1.1 408" in answer


def _events(parser: BoundedParser) -> list[str]:
    found = []
    while True:
        event = parser.next_event()
        found.append(getattr(event, "__name__", type(event).__name__))
        if found[-1] in ("NEED_DATA", "PAUSED"):
            return found


def test_what_is_allowed_in_pieces_is_what_is_allowed_at_once() -> None:
    data = post(BODY) + b"\r\n" + request(*CHUNKED, body=b"1\r\n{\r\n1\r\n}\r\n0\r\nX: 1\r\n\r\n")
    whole, pieces = BoundedParser(), BoundedParser()
    for parser in (whole, pieces):
        parser.receive_data(data)
    whole.num_allowed = 100
    expected = _events(whole)
    found: list[str] = []
    while found[-1:] != ["PAUSED"]:
        pieces.num_allowed = 1
        found += [event for event in _events(pieces) if event != "NEED_DATA"]
    assert found == expected
    assert expected == ["Request", "Data", "EndOfMessage", "PAUSED"]
