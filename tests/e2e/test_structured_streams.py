"""Answers by drawn JSON schemas through real servers: two choices, streams, every dialect, a decode worker killed.

    pytest tests/e2e/test_structured_streams.py              # some schemas
    pytest -m slow tests/e2e/test_structured_streams.py      # 1,000

What is right is said by a worker that is prefill and decode in one, in whole answers of one choice each.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema_rs
import pytest

from deltaserve.server.sampling_fields import derive_seed
from tests.e2e.killer import Killer
from tests.e2e.server import Api, Json, Server, serving
from tools.drawn_schemas import Schema, drawn_schema

FLAGS = ("--page-size", "8", "--num-pages", "4096", "--chunked-prefill-size", "64")
QUICK, ALL, AT_ONCE = 16, 1000, 50
MAX_TOKENS = 400
NUM_THREADS = 8
LEAP_SECOND = re.compile(r"(\d\d:\d\d):60")
BATCHES = [
    range(QUICK),
    *(pytest.param(range(first, first + AT_ONCE), marks=pytest.mark.slow) for first in range(0, ALL, AT_ONCE)),
]
OnEvent = Callable[[], None]


@dataclass(frozen=True)
class Said:
    """One choice."""

    text: str
    has_ended: bool
    """Not by its limit."""


class Dialect(ABC):
    """How a schema is asked for in one dialect, and where the answer stands."""

    path: str
    num_choices = 1

    def whole(self, api: Api, number: int, seed: int, num_choices: int) -> list[Said]:
        reply = api.http.post(self.path, json=self._body(api, number, seed, num_choices))
        assert reply.status_code == 200, (drawn_schema(number), reply.text)
        return self.choices(reply.json())

    def streamed(self, api: Api, number: int, seed: int, on_event: OnEvent) -> list[Said]:
        """With as many choices as the dialect can have."""
        body = self._body(api, number, seed, self.num_choices) | {"stream": True}
        texts, ended = [""] * self.num_choices, [False] * self.num_choices
        with api.http.stream("POST", self.path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert not event.get("error"), event
                for index, text, has_ended in self.read(event):
                    texts[index] += text
                    ended[index] |= has_ended
                on_event()
        return [Said(text, has_ended) for text, has_ended in zip(texts, ended, strict=True)]

    def _body(self, api: Api, number: int, seed: int, num_choices: int) -> Json:
        several = {"n": num_choices} if num_choices > 1 else {}
        return {"model": api.model, "seed": seed, **self.fields(number, drawn_schema(number)), **several}

    @abstractmethod
    def fields(self, number: int, schema: Schema) -> Json: ...

    @abstractmethod
    def choices(self, answer: Json) -> list[Said]:
        """Those of a whole answer."""

    @abstractmethod
    def read(self, event: Json) -> Iterator[tuple[int, str, bool]]:
        """(choice, text, whether it came to its own end) of an event of a stream."""


class Completions(Dialect):
    path = "/v1/completions"
    num_choices = 2

    def fields(self, number: int, schema: Schema) -> Json:
        wanted = {"json": schema, "disable_any_whitespace": True}
        return {"prompt": f"Schema {number}:", "max_tokens": MAX_TOKENS, "structured_outputs": wanted}

    def choices(self, answer: Json) -> list[Said]:
        return [Said(choice["text"], choice["finish_reason"] == "stop") for choice in answer["choices"]]

    def read(self, event: Json) -> Iterator[tuple[int, str, bool]]:
        for choice in event["choices"]:
            yield choice["index"], choice["text"], choice["finish_reason"] == "stop"


def _messages(number: int) -> list[Json]:
    return [{"role": "user", "content": f"Schema {number}"}]


class Chat(Dialect):
    path = "/v1/chat/completions"
    num_choices = 2

    def fields(self, number: int, schema: Schema) -> Json:
        wanted = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema}}
        asked = {"messages": _messages(number), "max_tokens": MAX_TOKENS, "response_format": wanted}
        return asked | {"guided_whitespace_pattern": " ?"}

    def choices(self, answer: Json) -> list[Said]:
        return [
            Said(choice["message"]["content"] or "", choice["finish_reason"] == "stop") for choice in answer["choices"]
        ]

    def read(self, event: Json) -> Iterator[tuple[int, str, bool]]:
        for choice in event["choices"]:
            yield choice["index"], choice["delta"].get("content") or "", choice["finish_reason"] == "stop"


class Responses(Dialect):
    path = "/v1/responses"

    def fields(self, number: int, schema: Schema) -> Json:
        wanted = {"format": {"type": "json_schema", "name": "drawn", "schema": schema}}
        return {"input": _messages(number), "max_output_tokens": MAX_TOKENS, "text": wanted}

    def choices(self, answer: Json) -> list[Said]:
        parts = [part["text"] for item in answer["output"] for part in item["content"]]
        return [Said("".join(parts), answer["status"] == "completed")]

    def read(self, event: Json) -> Iterator[tuple[int, str, bool]]:
        yield 0, event["delta"] if event["type"].endswith(".delta") else "", event["type"] == "response.completed"


class Messages(Dialect):
    path = "/v1/messages"

    def fields(self, number: int, schema: Schema) -> Json:
        wanted = {"format": {"type": "json_schema", "schema": schema}}
        return {"messages": _messages(number), "max_tokens": MAX_TOKENS, "output_config": wanted}

    def choices(self, answer: Json) -> list[Said]:
        text = "".join(block["text"] for block in answer["content"])
        return [Said(text, answer["stop_reason"] == "end_turn")]

    def read(self, event: Json) -> Iterator[tuple[int, str, bool]]:
        delta = event.get("delta", {})
        yield 0, delta.get("text") or "", delta.get("stop_reason") == "end_turn"


DIALECTS = (Completions(), Chat(), Responses(), Messages())
Asked = list[tuple[int, list[Said]]]
"""(number of a schema, what was said) in turn."""


def dialect_of(number: int) -> Dialect:
    return DIALECTS[number % len(DIALECTS)]


def several(ask: Callable[[int], list[Said]], numbers: Sequence[int]) -> Asked:
    """Some of them at a time."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(zip(numbers, pool.map(ask, numbers), strict=True))


def streamed(api: Api, numbers: Sequence[int], on_event: OnEvent = lambda: None) -> Asked:
    return several(lambda number: dialect_of(number).streamed(api, number, number, on_event), numbers)


def signed(seed: int) -> int:
    """As a client writes it, who has no more than 64 bits with a sign."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def check(number: int, said: Said) -> None:
    if said.has_ended:
        value = json.loads(LEAP_SECOND.sub(r"\1:59", said.text))
        jsonschema_rs.Draft202012Validator(drawn_schema(number), validate_formats=True).validate(value)


@pytest.fixture(scope="module")
def unified(tiny_models: Path) -> Iterator[Server]:
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), tiny_models / "llama", *FLAGS, "--disaggregation-mode", "null") as server,
    ):
        yield server


@pytest.fixture(scope="module")
def apart(tiny_models: Path) -> Iterator[Server]:
    """Two decode workers, of which one dies now and then."""
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), tiny_models / "llama", *FLAGS, "--decode", "2", deaths=None) as server,
    ):
        yield server


@pytest.fixture(scope="module", params=BATCHES, ids=lambda numbers: f"{numbers.start}-{numbers.stop}")
def right(request: pytest.FixtureRequest, unified: Server) -> Asked:
    """Each choice alone; most come to their end, and those are valid."""

    def choices(number: int) -> list[Said]:
        dialect = dialect_of(number)
        seeds = [signed(derive_seed(number, index)) for index in range(dialect.num_choices)]
        return [said for seed in seeds for said in dialect.whole(unified, number, seed, 1)]

    found = several(choices, request.param)
    every = [(number, said) for number, choices in found for said in choices]
    for number, said in every:
        check(number, said)
    assert sum(said.has_ended for _, said in every) >= 0.75 * len(every)
    return found


def test_choices_are_those_of_requests_of_their_own(right: Asked, apart: Server) -> None:
    def together(number: int) -> list[Said]:
        dialect = dialect_of(number)
        return dialect.whole(apart, number, number, dialect.num_choices)

    assert several(together, [number for number, _ in right]) == right


def test_streams_say_the_same(right: Asked, apart: Server, unified: Server) -> None:
    numbers = [number for number, _ in right]
    assert streamed(apart, numbers) == right
    assert streamed(unified, numbers) == right


def test_streams_of_a_decode_worker_that_is_killed(right: Asked, apart: Server) -> None:
    """The other one goes on behind what the clients have."""
    killer = Killer(apart, after=sum(len(choices) for _, choices in right) * 3)  # an event may hold many tokens
    assert streamed(apart, [number for number, _ in right], killer.heard) == right
    assert killer.victim is not None
    apart.wait_back(killer.victim)
