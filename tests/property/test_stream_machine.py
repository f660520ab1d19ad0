"""Streams under any split of the output, any stop strings, slow readers and readers who leave.

What arrives is a prefix of the one right text, cut where the first stop string is complete. A stream that comes to its
end has one finish and one [DONE] and nothing behind them; one that does not leaves nothing behind in the server.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.types import Message, Scope

from deltaserve.control.front.client import Generation, OutputDelta
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.app import create_app
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.text_folder import VOCAB, write_text_folder
from tests.patience import PATIENCE_S
from tests.server.corpus import MODEL, completion
from tests.server.oracle import OracleEngine, usage_of

PROMPT = "ab"


@dataclass(slots=True)
class SplitEngine(OracleEngine):
    """Gives `tokens` in deltas of the sizes in `splits`, over and over."""

    tokens: tuple[int, ...] = ()
    splits: tuple[int, ...] = (1,)

    async def _deltas(self, generation: Generation) -> AsyncIterator[OutputDelta]:
        start = number = 0
        while start < len(self.tokens) and generation.room not in self.finished:
            size = self.splits[number % len(self.splits)]
            yield OutputDelta(tokens=self.tokens[start : start + size])
            start, number = start + size, number + 1
            await asyncio.sleep(0)
        num_tokens = self.finished.get(generation.room, len(self.tokens))
        yield OutputDelta(finish=FinishReason.LENGTH, usage=usage_of(len(PROMPT), num_tokens))


@dataclass
class Reader:
    """A client of the application: how often it pauses, and after how many events' worth of bytes it goes."""

    body: bytes
    pauses: int
    leaves_after: int | None
    received: bytes = b""
    num_sends: int = 0
    has_ended: bool = False
    is_asked: bool = False
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        if not self.is_asked:
            self.is_asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        assert not self.has_ended, "nothing follows the end"
        for _ in range(self.pauses):
            await asyncio.sleep(0)
        self.received += message.get("body", b"")
        self.has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.num_sends += 1
        if self.leaves_after is not None and self.num_sends >= self.leaves_after:
            self.is_gone.set()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(write_text_folder(tmp_path_factory.mktemp("stream")))


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str]:
    """(text before the stop string that is complete first, of two the longer; "stop" or "length")."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], "stop") if found else (text, "length")


def ask(app: Starlette, reader: Reader) -> None:
    """Serve one request to its end, whatever that is."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reader.body)).encode())]
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await app(scope, reader.receive, reader.send)

    asyncio.run(run())


TOKENS = st.lists(st.one_of(st.sampled_from(tuple(b"abc \n")), st.integers(0, VOCAB - 1)), min_size=1, max_size=24)
STOPS = st.lists(st.text("abc\u00e4", min_size=1, max_size=3), max_size=4)
SPLITS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(TOKENS, SPLITS, STOPS, st.integers(1, 4), st.integers(0, 3), st.none() | st.integers(1, 8))
def test_streams(
    codec: TextCodec,
    tokens: list[int],
    splits: list[int],
    stops: list[str],
    interval: int,
    pauses: int,
    leaves_after: int | None,
) -> None:
    engine = SplitEngine(tokens=tuple(tokens), splits=tuple(splits))
    settings = ServerSettings(MODEL, stream_interval=interval)
    app = create_app(engine, codec, settings)
    body = completion({"prompt": PROMPT, "stream": True, "stop": stops, "max_tokens": len(tokens), "ignore_eos": True})
    reader = Reader(body, pauses, leaves_after)
    ask(app, reader)

    expected, reason = cut_at_stop(codec.decode(tokens, skip_special_tokens=True), stops)
    *parts, rest = reader.received.decode().split("\n\n")
    assert rest == "", "events are whole"
    bodies = [part.removeprefix("data: ") for part in parts]
    choices = [json.loads(body)["choices"][0] for body in bodies if body != "[DONE]"]
    text = "".join(choice["text"] for choice in choices)
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    if reader.has_ended:
        assert (text, finishes) == (expected, [reason])
        assert bodies[-1] == "[DONE]" and bodies.count("[DONE]") == 1
        assert choices[-1]["finish_reason"] is not None
    else:
        assert leaves_after is not None, "only who leaves gets less"
        assert expected.startswith(text)
    assert [generation.room for generation in engine.opened] == engine.ended
    assert app.state.front.admission.num_requests == 0
    assert app.state.front.admission.num_tokens == 0
