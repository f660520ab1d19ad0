"""Event streams whose end and whose first sign of life fall together."""

import asyncio
import time

import pytest
from starlette.types import Message

from deltaserve.server.api_errors import ApiError
from deltaserve.server.replies import EventStream, EventWriter
from deltaserve.server.settings import StreamTimes

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
