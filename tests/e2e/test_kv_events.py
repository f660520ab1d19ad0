"""KV events of a real pair: a listener that knows nothing of our keys finds prompts in the caches by their tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.server import Server, serving, wait_until
from tests.ports import free_port

PAGE_SIZE = 16


@pytest.fixture
def endpoint() -> str:
    """The one above it is free, too: decode's."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def server(request: pytest.FixtureRequest, folder: Path, tiny_models: Path, endpoint: str) -> Iterator[Server]:
    """With further flags, where the test names some."""
    config = json.dumps({"endpoint": endpoint, "topic": "kv"})
    more = getattr(request, "param", ())
    flags = ("--page-size", str(PAGE_SIZE), "--num-pages", "40", "--kv-events-config", config, *more)
    with serving(folder, tiny_models / "llama", *flags) as server:
        yield server


class Picture:
    """What a worker holds, by what it says: hash |-> (hash before it, ids)."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.pages: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []
        self._sub = context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe("kv")

    def hear(self) -> None:
        while self._sub.poll(100):
            _, number, payload = self._sub.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            for kind, *fields in msgspec.msgpack.decode(payload)[1]:
                self._apply(kind, fields)

    def _apply(self, kind: str, fields: list[Any]) -> None:
        if kind == "AllBlocksCleared":
            self.pages.clear()
        elif kind == "BlockRemoved":
            for each in fields[0]:
                self.pages.pop(each, None)  # of before this listener came
        else:
            hashes, parent, ids, page_size = fields[:4]
            for index, each in enumerate(hashes):
                self.pages[each] = parent, ids[index * page_size : (index + 1) * page_size]
                parent = each

    def cached_len_now(self, prompt: list[int]) -> int:
        """The same, after what was said meanwhile."""
        self.hear()
        return self.cached_len(prompt)

    def cached_len(self, prompt: list[int]) -> int:
        """Tokens of the longest beginning of the prompt that is held."""
        at, parent = 0, None
        following = {(before, tuple(ids)): each for each, (before, ids) in self.pages.items()}
        while (each := following.get((parent, tuple(prompt[at : at + PAGE_SIZE])))) is not None:
            at, parent = at + PAGE_SIZE, each
        return at


def of_worker(endpoint: str, number: int) -> str:
    """Where the worker of that number tells, prefill's first."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}"


class Listeners:
    """A picture of each side, made by whoever asks the server."""

    def __init__(self, server: Server, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.prefill, self.decode = (Picture(context, of_worker(endpoint, number)) for number in range(2))
        self._server = server
        self._draw = Random(3)
        while not (self.prefill.pages and self.decode.pages):  # until both are connected
            self.ask(PAGE_SIZE + 1)
            self.prefill.hear()
            self.decode.hear()
        server.flush()

    def ask(self, length: int) -> list[int]:
        prompt = [self._draw.randrange(3, 200) for _ in range(length)]
        self._server.complete(prompt, max_tokens=4)
        return prompt

    def ask_known(self) -> list[int]:
        """A prompt of five pages and a part, which both sides tell of."""
        prompt = self.ask(5 * PAGE_SIZE + 3)
        for picture in (self.prefill, self.decode):
            wait_until(lambda of=picture: of.cached_len_now(prompt) == 5 * PAGE_SIZE, "pages to be told", self._server)  # type: ignore[misc]
        return prompt


@pytest.fixture
def listeners(server: Server, endpoint: str) -> Iterator[Listeners]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield Listeners(server, endpoint, context)
    finally:
        context.destroy(linger=0)


def test_a_listener_knows_what_each_side_holds(server: Server, listeners: Listeners) -> None:
    long = listeners.ask_known()
    prefill, decode = listeners.prefill, listeners.decode
    assert prefill.cached_len([9, *long]) == 0
    for _ in range(12):  # more than there are pages: what was asked first is evicted
        listeners.ask(5 * PAGE_SIZE)
    wait_until(lambda: decode.cached_len_now(long) == 0, "eviction to be told", server)
    for picture in (prefill, decode):
        assert picture.numbers == list(range(picture.numbers[0], picture.numbers[-1] + 1))


@pytest.mark.parametrize("server", [("--cache-dir", ".", "--cache-dir-mib", "64")], indirect=True)
def test_what_the_file_holds_counts_as_held(server: Server, listeners: Listeners) -> None:
    """It has left both caches, whose room others took; flushing empties the file, too, and is told."""
    long = listeners.ask_known()
    filed, evicted = "deltaserve_tier_pages", 'deltaserve_pages_evicted_total{pool="0"}'
    wait_until(lambda: all(values[filed] >= 5 for values in server.metrics().values()), "copies", server)
    for _ in range(12):
        listeners.ask(5 * PAGE_SIZE)
    wait_until(lambda: all(values[evicted] > 20 for values in server.metrics().values()), "evictions", server)
    assert listeners.prefill.cached_len_now(long) == listeners.decode.cached_len_now(long) == 5 * PAGE_SIZE
    server.flush()
    for picture in (listeners.prefill, listeners.decode):
        wait_until(lambda of=picture: of.cached_len_now(long) == 0, "the flush to be told", server)  # type: ignore[misc]


@pytest.mark.parametrize("server", [("--conditional-prefill", "auto")], indirect=True)
def test_decode_tells_of_every_prompt_also_of_those_that_it_computes(server: Server, endpoint: str) -> None:
    """By default, on cores of both: a router that hears one worker hears decode."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        decode = Picture(context, of_worker(endpoint, 1))
        draw = Random(3)

        def ask() -> list[int]:
            prompt = [draw.randrange(3, 200) for _ in range(3 * PAGE_SIZE + 1)]
            server.complete(prompt, max_tokens=4)
            return prompt

        while not decode.pages:  # until it is connected
            ask()
            decode.hear()
        prompt = ask()
        wait_until(lambda: decode.cached_len_now(prompt) == 3 * PAGE_SIZE, "pages to be told", server)
    finally:
        context.destroy(linger=0)
