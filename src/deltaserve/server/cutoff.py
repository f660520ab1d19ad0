"""The one place that ends a request from outside: its deadline, or the end of the server's grace period."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from deltaserve.server.errors import not_ready

Item = TypeVar("Item")


class Cutoff:
    """Time limits of the requests inside; all of them can be brought forward to now."""

    def __init__(self) -> None:
        self._open: set[_Limit] = set()
        self._closed = False

    def close(self) -> None:
        """End every request inside, and every one that still gets here, with 503."""
        self._closed = True
        for limit in self._open:
            limit.expire()

    async def bound(self, items: AsyncGenerator[Item], seconds: float) -> AsyncGenerator[Item]:
        """`items`; raises TimeoutError once `seconds` have passed, ApiError 503 once closed. Closes `items`."""
        limit = _Limit()
        timer = asyncio.get_running_loop().call_later(0 if self._closed else seconds, limit.expire)
        self._open.add(limit)
        try:
            async with aclosing(items):
                while True:
                    try:
                        item = await limit.next_of(items)
                    except StopAsyncIteration:
                        return
                    yield item
        except TimeoutError as error:
            if self._closed:
                raise not_ready("the server is shutting down") from error
            raise
        finally:
            timer.cancel()
            self._open.discard(limit)


class _Limit:
    """One timer over many awaits: `asyncio.timeout` around each would cost a timer for every token.

    It interrupts only the await inside `next_of`, never the code that consumes the items between two of them.
    """

    def __init__(self) -> None:
        self._expired = False
        self._waiting: asyncio.Task[object] | None = None

    def expire(self) -> None:
        """Time is up: the await in progress, or the next one, raises TimeoutError."""
        if not self._expired:
            self._expired = True
            if self._waiting is not None:
                self._waiting.cancel()

    async def next_of(self, items: AsyncGenerator[Item]) -> Item:
        """The next item. Raises TimeoutError, or StopAsyncIteration at the end."""
        if self._expired:
            raise TimeoutError
        task = asyncio.current_task()
        assert task is not None, "runs inside a task"
        cancels_before = task.cancelling()
        self._waiting = task
        try:
            return await anext(items)
        except asyncio.CancelledError as error:
            # Ours only if nobody else asked for it as well.
            if self._expired and task.uncancel() <= cancels_before:
                raise TimeoutError from error
            raise
        finally:
            self._waiting = None
