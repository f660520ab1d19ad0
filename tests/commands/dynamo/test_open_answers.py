"""Answers end when their request does: while their reader waits, while it is elsewhere, and when it drops them."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deltaserve.commands.dynamo.open_answers import OpenAnswers
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class Answer:
    """Chunks from 0 on, up to `last`; behind it none comes, and no end."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.is_waiting, self.closed = asyncio.Event(), asyncio.Event()

    async def chunks(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._last + 1):
                yield number
            self.is_waiting.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a connection is not closed at once
            self.closed.set()


async def test_one_that_nobody_reads_any_more_is_closed_although_it_is_kept() -> None:
    answers, left, other = OpenAnswers[int](), Answer(5), Answer(5)
    kept = answers.read("left", left.chunks())
    async with aclosing(answers.read("other", other.chunks())) as beside:
        assert [await anext(kept), await anext(beside)] == [0, 0]
        await answers.end("left")
        assert left.closed.is_set() and not other.closed.is_set()
        with pytest.raises(asyncio.CancelledError):
            await anext(kept)
        assert await anext(beside) == 1
    assert other.closed.is_set()
    await asyncio.wait_for(answers.wait_idle(), PATIENCE_S)


async def test_one_whose_reader_waits_is_closed() -> None:
    answers, answer = OpenAnswers[int](), Answer(0)

    async def read() -> list[int]:
        return [chunk async for chunk in answers.read("it", answer.chunks())]

    reader = asyncio.create_task(read())
    await asyncio.wait_for(answer.is_waiting.wait(), PATIENCE_S)
    await answers.end("it")
    assert answer.closed.is_set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, PATIENCE_S)
    await asyncio.wait_for(answers.wait_idle(), PATIENCE_S)


async def test_one_that_is_dropped_in_another_thread_is_closed_in_its_loop() -> None:
    answers, answer = OpenAnswers[int](), Answer(5)
    held = [answers.read("it", answer.chunks())]
    assert await anext(held[0]) == 0
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await asyncio.wait_for(answer.closed.wait(), PATIENCE_S)
    await asyncio.wait_for(answers.wait_idle(), PATIENCE_S)


async def test_one_that_ends_by_itself_or_fails_is_not_inside_any_more() -> None:
    async def ended() -> AsyncGenerator[int, None]:
        yield 1

    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    answers = OpenAnswers[int]()
    assert [chunk async for chunk in answers.read("it", ended())] == [1]
    with pytest.raises(ValueError, match="broken"):
        assert [chunk async for chunk in answers.read("it", broken())] == [1]
    await asyncio.wait_for(answers.wait_idle(), PATIENCE_S)
    await answers.end("it")
