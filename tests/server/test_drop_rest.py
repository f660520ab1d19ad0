"""A body that nobody wants is read for a while, and no longer, however its pieces come."""

import asyncio
import time

import pytest
from starlette.types import Message

from deltaserve.server.protocol import drop_rest
from deltaserve.server.settings import HttpLimits
from tests.patience import PATIENCE_S

PIECE: Message = {"type": "http.request", "body": b"x", "more_body": True}


@pytest.mark.anyio
async def test_a_piece_that_comes_when_the_time_is_over_does_not_make_it_endless() -> None:
    """`asyncio.wait_for` of Python 3.11 returns a result that is there when it is cancelled, and the cancellation is
    lost."""
    num_pieces = 0

    async def receive() -> Message:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 1:
            asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)  # a busy loop: both timers are due behind it
            await asyncio.sleep(0.15)
        else:
            await asyncio.sleep(0.01)
        return PIECE

    async with asyncio.timeout(PATIENCE_S):
        await drop_rest(receive, HttpLimits(linger_s=0.16, linger_silent_s=PATIENCE_S))


@pytest.mark.anyio
async def test_its_end_and_its_silence_end_it() -> None:
    pieces = [PIECE, {**PIECE, "more_body": False}]

    async def receive() -> Message:
        return pieces.pop(0)

    async def silence() -> Message:
        await asyncio.sleep(PATIENCE_S)
        return PIECE

    async with asyncio.timeout(PATIENCE_S):
        await drop_rest(receive, HttpLimits(linger_s=PATIENCE_S, linger_silent_s=PATIENCE_S))
        await drop_rest(silence, HttpLimits(linger_s=PATIENCE_S, linger_silent_s=0.01))
    assert not pieces
