"""Overload and life: what is refused when the server is full, who gets which share, and when it is not live."""

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest

from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace
from deltaserve.server.admission import Admission, ValueRoom
from deltaserve.server.api_errors import ApiError
from deltaserve.server.health import Liveness
from deltaserve.server.read import TextThreads
from deltaserve.server.settings import ApiKey, HttpLimits, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, Served, served, until
from tests.server.corpus import completion
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
JSON = {"content-type": "application/json"}


async def _post(case: Served, headers: dict[str, str] | None = None, /, **fields: object) -> httpx.Response:
    return await case.client.post("/v1/completions", content=completion(fields), headers=headers or JSON)


def _code(text: str | bytes) -> str:
    return str(json.loads(text)["error"]["code"])


async def test_a_full_queue_is_429_before_the_body_is_parsed(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, ServerSettings(MODEL, max_queue=2)) as case:
        inside = [asyncio.create_task(_post(case, stream=stream)) for stream in (True, False)]
        await until(lambda: len(engine.opened) == 2)
        reply = await case.client.post("/v1/completions", content=b"{", headers=JSON)
        assert (reply.status_code, _code(reply.text)) == (429, "overloaded")
        assert 1 <= int(reply.headers["retry-after"]) <= 5
        assert engine.gate is not None
        engine.gate.set()
        assert [(await task).status_code for task in inside] == [200, 200]
        assert (await _post(case)).status_code == 200


async def test_one_tenant_cannot_take_every_place(codec: TextCodec) -> None:
    keys = (ApiKey("a" * 32, Namespace("a")), ApiKey("b" * 32, Namespace("b")))
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, ServerSettings(MODEL, api_keys=keys, max_queue=10)) as case:
        headers = [JSON | {"authorization": f"Bearer {key.secret}"} for key in keys]
        flood = [asyncio.create_task(_post(case, headers[0])) for _ in range(8)]
        await until(lambda: len(engine.opened) == 8)
        refused = await _post(case, headers[0])
        assert (refused.status_code, _code(refused.text)) == (429, "rate_limited")
        other = [asyncio.create_task(_post(case, headers[1])) for _ in range(2)]
        await until(lambda: len(engine.opened) == 10)
        assert engine.gate is not None
        engine.gate.set()
        assert {(await task).status_code for task in (*flood, *other)} == {200}


def test_tenants_that_flood_us_get_equal_shares_and_leave_room() -> None:
    keys = tuple(ApiKey(name * 32, Namespace(name)) for name in "abc")
    admission = Admission(ServerSettings(MODEL, api_keys=keys, max_queue=100))
    taken = dict.fromkeys("ab", 0)
    for _ in range(200):
        for name in taken:
            with contextlib.suppress(ApiError):
                admission.enter(Namespace(name))
                taken[name] += 1
    assert abs(taken["a"] - taken["b"]) <= 1
    assert 80 <= sum(taken.values()) <= 90
    admission.enter(Namespace("c"))


def test_the_only_tenant_may_take_every_place() -> None:
    admission = Admission(ServerSettings(MODEL, max_queue=5))
    for _ in range(5):
        admission.enter(Namespace("a"))
    with pytest.raises(ApiError) as caught:
        admission.enter(Namespace("a"))
    assert caught.value.code == "overloaded"


async def test_tokens_are_bounded_too_but_a_request_alone_fits(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, ServerSettings(MODEL, max_queue_tokens=9)) as case:
        alone = asyncio.create_task(_post(case, max_tokens=100))
        await until(lambda: engine.opened)
        assert (await _post(case)).status_code == 429
        assert engine.gate is not None
        engine.gate.set()
        assert (await alone).status_code == 200


async def test_every_sample_takes_a_place(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, ServerSettings(MODEL, max_queue=4)) as case:
        alone = asyncio.create_task(_post(case, n=3))
        await until(lambda: len(engine.opened) == 3)
        assert (await _post(case, n=2)).status_code == 429
        one = asyncio.create_task(_post(case))
        await until(lambda: len(engine.opened) == 4)
        assert engine.gate is not None
        engine.gate.set()
        assert [(await task).status_code for task in (alone, one)] == [200, 200]
        assert (await _post(case, n=8)).status_code == 200, "a request alone always fits"


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_tokenizing_takes_a_place_as_well(codec: TextCodec, path: str, body: dict[str, object]) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, ServerSettings(MODEL, max_queue=1)) as case:
        waiting = asyncio.create_task(_post(case))
        await until(lambda: engine.opened)
        reply = await case.client.post(path, json=body)
        assert (reply.status_code, _code(reply.text)) == (429, "overloaded")
        assert engine.gate is not None
        engine.gate.set()
        assert (await waiting).status_code == 200
        assert (await case.client.post(path, json=body)).status_code == 200


def test_a_place_is_given_back_once() -> None:
    admission = Admission(SETTINGS)
    place = admission.enter(Namespace("a"))
    admission.book(place, 3, 10)
    assert (admission.num_requests, admission.num_waiting, admission.num_tokens) == (1, 3, 10)
    admission.leave(place)
    assert (admission.num_requests, admission.num_waiting, admission.num_tokens) == (0, 0, 0)
    with pytest.raises(StateError):
        admission.leave(place)


# --- life


async def test_a_stopped_control_plane_is_not_live(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(not_alive="no tick for 11 s"), SETTINGS) as case:
        reply = await case.client.get("/livez")
        assert (reply.status_code, reply.json()) == (503, {"status": "not_live", "reason": "no tick for 11 s"})


async def test_threads_that_take_no_work_are_not_live_after_a_while() -> None:
    """One probe, however many ask; life comes back with the threads."""
    now, release = 0.0, threading.Event()
    threads = TextThreads(1)
    executor = threads._pool
    liveness = Liveness(lambda: None, threads, lambda: now)
    assert await liveness.complaint() is None
    held = threads.run(release.wait)
    assert [await liveness.complaint() for _ in range(3)] == [None] * 3
    now = 11.0
    assert await liveness.complaint() == "no thread took work for 11 s"
    assert executor._work_queue.qsize() == 1
    release.set()
    await held
    await until(lambda: executor._work_queue.qsize() == 0)
    assert await liveness.complaint() is None


# --- bodies that are not finished


class Unfinished:
    """A body that stays at its first half until it is told to go on."""

    def __init__(self, case: Served, num_bytes: int, key: str | None = None) -> None:
        self._body = json.dumps({"prompt": "x" * num_bytes}).encode()
        self._go_on = asyncio.Event()
        headers = JSON | ({"authorization": f"Bearer {key}"} if key else {})
        self.reply = asyncio.create_task(case.client.post("/tokenize", content=self._parts(), headers=headers))

    async def _parts(self) -> AsyncIterator[bytes]:
        half = len(self._body) // 2
        yield self._body[:half]
        await self._go_on.wait()
        yield self._body[half:]

    async def finish(self) -> int:
        self._go_on.set()
        return (await self.reply).status_code


async def test_unfinished_bodies_take_so_much_memory_and_no_more(codec: TextCodec) -> None:
    settings = ServerSettings(MODEL, http=HttpLimits(max_bodies_bytes=2000))
    async with served(codec, OracleEngine(), settings) as case:
        waiting = [Unfinished(case, 1600), Unfinished(case, 1600)]
        await until(lambda: case.front.reading.bodies.num_bytes > 1600)
        reply = await case.client.post("/tokenize", json={"prompt": "y" * 500})
        assert (reply.status_code, _code(reply.text)) == (429, "overloaded")
        assert (await _post(case)).status_code == 200
        waiting[0].reply.cancel()
        await until(lambda: case.front.reading.bodies.num_bytes < 1000)
        assert await waiting[1].finish() == 200
        assert (await case.client.post("/tokenize", json={"prompt": "y" * 500})).status_code == 200


async def test_one_tenant_cannot_take_the_room_of_all_bodies(codec: TextCodec) -> None:
    keys = tuple(ApiKey(name * 16, Namespace(name)) for name in ("one", "two"))
    settings = ServerSettings(MODEL, api_keys=keys, http=HttpLimits(max_bodies_bytes=10_000))
    async with served(codec, OracleEngine(), settings) as case:
        flood = [Unfinished(case, 1000, "one" * 16) for _ in range(40)]
        await until(lambda: sum(each.reply.done() for each in flood) > 15)
        assert case.front.reading.bodies.num_bytes < 9000
        other = Unfinished(case, 1000, "two" * 16)
        assert await other.finish() == 200
        codes = [await each.finish() for each in flood]
        assert codes.count(200) > 10
        assert set(codes) == {200, 429}


# --- values that bodies are read to


async def test_values_of_all_bodies_are_bounded_and_who_comes_first_goes_first() -> None:
    room, done = ValueRoom(10), list[int]()
    most = 0

    async def read(number: int, num_bytes: int) -> None:
        nonlocal most
        async with room.taken(num_bytes):
            most = max(most, room.num_bytes)
            await asyncio.sleep(0)
            done.append(number)

    sizes = [6, 4, 6, 1, 30, 1, 10]
    reading = [asyncio.create_task(read(number, size)) for number, size in enumerate(sizes)]
    await asyncio.gather(*reading)
    assert done == list(range(len(sizes)))
    assert (most, room.num_bytes) == (30, 0), "what would never fit goes alone"


async def test_who_leaves_while_it_waits_keeps_no_room() -> None:
    room = ValueRoom(10)

    async def take() -> None:
        async with room.taken(1):
            raise AssertionError("there is no room")

    async with room.taken(10):
        waiting = [asyncio.create_task(take()) for _ in range(3)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    async with room.taken(10):
        assert room.num_bytes == 10
    assert room.num_bytes == 0


async def test_a_body_of_many_values_waits_for_room_and_others_do_not_wait_for_it(codec: TextCodec) -> None:
    settings = ServerSettings(MODEL, http=HttpLimits(max_values_bytes=10))
    async with served(codec, OracleEngine(), settings) as case:
        many = {"prompt": [["a"]] * 5000}
        async with case.front.reading.values.taken(1):
            waiting = [asyncio.create_task(case.client.post("/tokenize", json=many)) for _ in range(2)]
            await until(lambda: case.front.reading.bodies.num_bytes > 2 * 5000)
            assert (await _post(case)).status_code == 200
            assert not any(each.done() for each in waiting)
        assert [(await each).status_code for each in waiting] == [400, 400]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", b'"prompt": "hello", "nobody_knows": ["needle"]'),
        ("/v1/completions", b'"prompt": "hello", "metadata": {"a": ["needle"]}'),
        ("/v1/completions", b'"prompt": "hello", "tools": ["needle"], "tool_choice": "none"'),
        ("/v1/chat/completions", b'"messages": [{"role": "user", "content": "hi", "other": ["needle"]}]'),
        ("/generate", b'"text": "hello", "sampling_params": {"nobody_knows": ["needle"]}'),
    ],
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_what_no_answer_depends_on_is_not_kept_while_it_is_made(
    codec: TextCodec, path: str, fields: bytes, stream: bytes
) -> None:
    """It may be most of a body, and many answers are made at a time."""
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, SETTINGS) as case:
        body = b'{%b, "stream": %b}' % (fields, stream)
        asked = asyncio.create_task(case.client.post(path, content=body, headers=JSON))
        await until(lambda: engine.num_held)
        gc.collect()
        lists = (each for each in gc.get_objects() if type(each) is list and len(each) == 1)
        assert not [each for each in lists if type(each[0]) is str and each[0] == "needle"]
        assert engine.gate is not None
        engine.gate.set()
        assert (await asked).status_code == 200
