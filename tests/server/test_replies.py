"""Event streams: whose end and whose first sign of life fall together, and texts with what looks like a line's end."""

import asyncio
import json
import time
from collections.abc import Mapping

import pytest
from starlette.types import Message

from deltaserve.server.api_errors import ApiError
from deltaserve.server.replies import EventStream, EventWriter
from deltaserve.server.settings import ServerSettings, StreamTimes
from tests.server.conftest import MODEL, served
from tests.server.test_tools import codec as byte_codec
from tests.server.test_tools import says

pytestmark = pytest.mark.anyio
HEAD_S = 0.02


async def _nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _sent(num_turns: int) -> tuple[list[Message], ApiError | None]:
    """What leaves where an answer fails `num_turns` turns of the loop after its head is due, and what is raised."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def make(writer: EventWriter) -> None:
        await asyncio.sleep(0)  # the watch has begun
        time.sleep(2 * HEAD_S)  # a busy loop: its timers come late
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if not writer.has_started:
            raise ApiError(504, "deadline_exceeded", "too late")
        await writer.write(b"data: error\n\n")

    stream = EventStream(make, StreamTimes(head_s=HEAD_S), on_cut=lambda: None, on_end=lambda: None)
    try:
        await stream({"type": "http"}, _nothing, send)
    except ApiError as error:
        return sent, error
    return sent, None


@pytest.mark.parametrize("num_turns", range(10))
async def test_a_failure_at_the_time_of_the_head_is_a_status_or_the_last_event(num_turns: int) -> None:
    """Never a head without an end: the error would be told by nobody."""
    sent, error = await _sent(num_turns)
    if error is not None:
        assert not sent
    else:
        assert sent[0]["type"] == "http.response.start"
        assert sent[-2]["body"] == b"data: error\n\n"
        assert not sent[-1]["more_body"]


LINES = "a\x85b\u2028c\u2029d\r\n\x0b\x0c\x1c\x1d\x1ee"
_CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 60}),
        ("/v1/chat/completions", _CHAT),
        ("/generate", {"text": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", _CHAT),
    ],
)
async def test_a_client_that_splits_lines_as_text_finds_whole_events(path: str, body: Mapping[str, object]) -> None:
    """As httpx's `aiter_lines` does."""
    found = ""
    async with (
        served(byte_codec(), says(LINES), ServerSettings(MODEL)) as case,
        case.client.stream("POST", path, json={**body, "stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                found += _text_of(json.loads(line.removeprefix("data: ")), path)
    assert found.endswith(LINES) if path == "/generate" else found == LINES, "that one tells all so far"


def _text_of(event: Mapping[str, object], path: str) -> str:
    """What an event adds."""
    match path, event:
        case "/generate", {"text": str(text)}:
            return text
        case "/v1/completions", {"choices": [{"text": str(text)}]}:
            return text
        case "/v1/chat/completions", {"choices": [{"delta": {"content": str(text)}}]}:
            return text
        case "/v1/responses", {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case "/v1/messages", {"delta": {"text": str(text)}}:
            return text
    return ""
