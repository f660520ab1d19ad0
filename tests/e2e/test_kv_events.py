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
def server(folder: Path, tiny_models: Path, endpoint: str) -> Iterator[Server]:
    config = json.dumps({"endpoint": endpoint, "topic": "kv"})
    flags = ("--page-size", str(PAGE_SIZE), "--num-pages", "40", "--kv-events-config", config)
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


def test_a_listener_knows_what_each_side_holds(server: Server, endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    prefill, decode = (Picture(context, f"{host}:{int(port) + index}") for index in range(2))
    draw = Random(3)

    def ask(length: int) -> list[int]:
        prompt = [draw.randrange(3, 200) for _ in range(length)]
        server.complete(prompt, max_tokens=4)
        return prompt

    try:
        while not (prefill.pages and decode.pages):  # until both are connected
            ask(PAGE_SIZE + 1)
            prefill.hear()
            decode.hear()
        server.flush()
        long = ask(5 * PAGE_SIZE + 3)
        wait_until(lambda: prefill.cached_len_now(long) == 5 * PAGE_SIZE, "prefill's pages to be told", server)
        wait_until(lambda: decode.cached_len_now(long) == 5 * PAGE_SIZE, "decode's pages to be told", server)
        assert prefill.cached_len([9, *long]) == 0
        for _ in range(12):  # more than there are pages: what was asked first is evicted
            ask(5 * PAGE_SIZE)
        wait_until(lambda: decode.cached_len_now(long) == 0, "eviction to be told", server)
        for picture in (prefill, decode):
            assert picture.numbers == list(range(picture.numbers[0], picture.numbers[-1] + 1))
    finally:
        context.destroy(linger=0)
