"""A client may vanish at any moment: after each message of the answer, or before the first. Nothing stays behind."""

import asyncio
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Scope

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Room
from deltaserve.server.app import create_app
from deltaserve.server.settings import ServerSettings, StreamTimes
from deltaserve.server.stream import OpenRooms
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL
from tests.server.corpus import completion
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
NUM_TOKENS = 5


@dataclass(slots=True)
class Client:
    """Speaks ASGI by hand; leaves after `stay` messages of the answer, or stops reading there."""

    body: bytes
    stay: int
    stops_reading: bool = False
    got: list[Message] = field(default_factory=list)
    aborted: bool = False
    _asked: bool = False
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        """The body, then nothing until the client leaves."""
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take one message of the answer."""
        if len(self.got) >= self.stay:
            if self.stops_reading:
                await asyncio.Event().wait()
            self._gone.set()
            return
        self.got.append(message)
        await asyncio.sleep(0)

    def leave(self) -> None:
        """Close the connection now."""
        self._gone.set()

    def abort(self) -> None:
        """What the HTTP protocol does when a stream is cut."""
        self.aborted = True

    def scope(self) -> Scope:
        """POST /v1/completions."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": {"deltaserve.abort": self.abort},
        }


def _check_nothing_left(app: Starlette, engine: OracleEngine) -> None:
    front = app.state.front
    assert sorted(g.room for g in engine.opened) == sorted(engine.ended)
    assert (front.admission.num_requests, front.admission.num_tokens) == (0, 0)
    text = front.metrics.text().decode()
    for line in ("num_requests_running 0.0", "num_requests_waiting 0.0"):
        assert f"deltaserve_{line}" in text
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not [task for task in others if "deltaserve" in repr(task.get_coro())]


# A stream is a start, six events and an end; its writer may join events that wait together.
@pytest.mark.parametrize("stay", range(8))
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("failure", [None, RequestFailed(FailReason.PEER_LOST, "gone")])
async def test_leaving_a_stream_at_any_message(
    codec: TextCodec, stay: int, num_samples: int, failure: RequestFailed | None
) -> None:
    gate = asyncio.Event()
    engine = OracleEngine(failure=failure, fail_after=NUM_TOKENS, gate=gate, free_tokens=stay)
    app = create_app(engine, codec, ServerSettings(MODEL))
    client = Client(completion({"stream": True, "n": num_samples}), stay)
    serving = asyncio.create_task(app(client.scope(), client.receive, client.send))
    for _ in range(60):
        await asyncio.sleep(0)
    client.leave()
    async with asyncio.timeout(PATIENCE_S):
        await serving
    _check_nothing_left(app, engine)


@pytest.mark.parametrize("free_tokens", range(NUM_TOKENS + 1))
@pytest.mark.parametrize("num_samples", [1, 3])
async def test_leaving_while_a_whole_answer_is_made(codec: TextCodec, free_tokens: int, num_samples: int) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=free_tokens)
    app = create_app(engine, codec, ServerSettings(MODEL))
    client = Client(completion({"n": num_samples}), 100)
    serving = asyncio.create_task(app(client.scope(), client.receive, client.send))
    for _ in range(60):
        await asyncio.sleep(0)
    client.leave()
    async with asyncio.timeout(PATIENCE_S):
        await serving
    assert len(engine.cancelled) == num_samples
    assert b"deltaserve_clients_gone_total 1.0" in app.state.front.metrics.text()
    _check_nothing_left(app, engine)


async def _check_cut(app: Starlette, engine: OracleEngine, client: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await app(client.scope(), client.receive, client.send)
    assert client.aborted
    assert len(engine.cancelled) == 1
    assert b"deltaserve_streams_cut_total 1.0" in app.state.front.metrics.text()
    _check_nothing_left(app, engine)


@pytest.mark.parametrize("stay", range(4))
async def test_a_reader_that_takes_nothing_for_long_is_cut(codec: TextCodec, stay: int) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=3)
    app = create_app(engine, codec, ServerSettings(MODEL, stream_times=StreamTimes(stall_s=0.05)))
    await _check_cut(app, engine, Client(completion({"stream": True}), stay, stops_reading=True))


def test_a_room_that_comes_after_the_end_of_grace_is_refused() -> None:
    engine = OracleEngine()
    rooms, early = OpenRooms(engine), Room(b"a" * 16)
    with rooms.holding(early):
        rooms.close()
    with pytest.raises(RequestFailed) as caught, rooms.holding(Room(b"b" * 16)):
        pass
    assert caught.value.reason is FailReason.DRAINING
    assert engine.reasons == {early: FailReason.DRAINING}
