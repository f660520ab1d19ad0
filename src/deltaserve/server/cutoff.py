"""The one place that ends a request from outside: its deadline, or the end of the server's grace period."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from deltaserve.server.errors import not_ready

Item = TypeVar("Item")


class Cutoff:
    """Time limits of the requests inside; all of them can be brought forward to now."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    def close(self) -> None:
        """End every request inside, and every one that still gets here, with 503."""
        self._closed = True
        for limit in self._open:
            limit.reschedule(asyncio.get_running_loop().time())

    async def bound(self, items: AsyncGenerator[Item], seconds: float) -> AsyncGenerator[Item]:
        """`items`; raises TimeoutError once `seconds` have passed, ApiError 503 once closed. Closes `items`."""
        deadline = asyncio.get_running_loop().time() + seconds
        async with aclosing(items):
            while True:
                # A limit must not be open across a yield: it would cancel whoever runs then.
                async with self._limit(deadline):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item

    @asynccontextmanager
    async def _limit(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(0 if self._closed else deadline) as limit:
                self._open.add(limit)
                try:
                    yield
                finally:
                    self._open.discard(limit)
        except TimeoutError as error:
            if self._closed:
                raise not_ready("the server is shutting down") from error
            raise
