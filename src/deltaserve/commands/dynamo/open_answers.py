"""Answers that are being read, each of which can be ended from outside. Dynamo is not imported.

Dynamo says by a call that nobody waits for an answer any more, and keeps the iterator, unread, for as long as it likes.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk")


class OpenAnswer(Generic[Chunk]):
    """One answer, with at most one reader."""

    def __init__(self, request: str, chunks: AsyncGenerator[Chunk, None]) -> None:
        self.request = request
        self._chunks = chunks
        self._step: asyncio.Future[Chunk | None] | None = None
        self._is_ended = False

    async def next(self) -> Chunk | None:
        """None: it is over. Raises what the answer raises, and CancelledError where it was ended from outside."""
        if self._is_ended:
            raise asyncio.CancelledError
        self._step = asyncio.ensure_future(anext(self._chunks, None))
        return await self._step

    async def end(self) -> None:
        """Leave it, whether its reader waits, is elsewhere, or will never come back."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._step is not None:
            self._step.cancel()
            await asyncio.gather(self._step, return_exceptions=True)  # a generator that runs cannot be closed
        await self._chunks.aclose()


class OpenAnswers(Generic[Chunk]):
    """All that are being read."""

    def __init__(self) -> None:
        self._open: set[OpenAnswer[Chunk]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def read(self, request: str, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """`chunks`, up to their end. Raises what they raise, and CancelledError where the request was ended."""
        answer = OpenAnswer(request, chunks)
        self._open.add(answer)
        self._is_idle.clear()
        try:
            while (chunk := await answer.next()) is not None:
                yield chunk
        finally:
            await self._end(answer)

    async def end(self, request: str) -> None:
        """Nobody waits for the answers to it any more."""
        for answer in [each for each in self._open if each.request == request]:
            await self._end(answer)

    async def wait_idle(self) -> None:
        """Until none is being read."""
        await self._is_idle.wait()

    async def _end(self, answer: OpenAnswer[Chunk]) -> None:
        try:
            await answer.end()
        finally:
            self._open.discard(answer)
            if not self._open:
                self._is_idle.set()
