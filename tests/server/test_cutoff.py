"""Deadlines and the end of grace: who is interrupted, and who is not."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deltaserve.server.cutoff import Cutoff
from deltaserve.server.errors import ApiError

pytestmark = pytest.mark.anyio


class Source:
    """1, 2, then nothing for ever; knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def items(self) -> AsyncGenerator[int]:
        """The items."""
        try:
            yield 1
            yield 2
            await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_an_await_past_the_deadline_ends() -> None:
    source, got = Source(), []
    with pytest.raises(TimeoutError):
        async with aclosing(Cutoff().bound(source.items(), 0.2)) as items:
            async for item in items:
                got.append(item)
    assert got == [1, 2]
    assert source.closed


async def test_the_consumer_is_not_interrupted_between_items() -> None:
    source, cutoff, got = Source(), Cutoff(), []
    with pytest.raises(ApiError) as caught:
        async with aclosing(cutoff.bound(source.items(), 60)) as items:
            async for item in items:
                cutoff.close()
                await asyncio.sleep(0.01)
                got.append(item)
    assert got == [1], "the item in hand is finished, the next one is refused"
    assert caught.value.status == 503
    assert source.closed


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    source, cutoff = Source(), Cutoff()

    async def consume() -> None:
        async with aclosing(cutoff.bound(source.items(), 60)) as items:
            async for _ in items:
                pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    cutoff.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


async def test_after_closing_nothing_starts() -> None:
    source, cutoff = Source(), Cutoff()
    cutoff.close()
    with pytest.raises(ApiError):
        async with aclosing(cutoff.bound(source.items(), 60)) as items:
            async for _ in items:
                await asyncio.sleep(0)


async def test_a_source_that_ends_leaves_no_timer() -> None:
    async def three() -> AsyncGenerator[int]:
        for item in range(3):
            yield item

    cutoff = Cutoff()
    async with aclosing(cutoff.bound(three(), 60)) as items:
        assert [item async for item in items] == [0, 1, 2]
    assert not cutoff._open
