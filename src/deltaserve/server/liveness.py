"""Proof of life: not that the process is there, but that everything in it that must move still moves."""

import asyncio
from collections.abc import Callable

STILL_S = 10.0
"""So long without a sign of life is dead."""
_LOOK_S = 0.1


class Liveness:
    """Asked from the event loop, which thereby proves its own life."""

    def __init__(self, engine_alive: Callable[[], str | None], now: Callable[[], float]) -> None:
        self._engine_alive = engine_alive
        self._now = now
        self._probe: asyncio.Future[None] | None = None
        self._sent_at = 0.0

    async def complaint(self) -> str | None:
        """What does not move any more, in words; None when all is well."""
        return self._engine_alive() or await self._threads()

    async def _threads(self) -> str | None:
        """Whether the threads that tokenize take work: one probe at a time is under way, however many ask."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().run_in_executor(None, _nothing)
            self._sent_at = self._now()
        await asyncio.wait([self._probe], timeout=_LOOK_S)
        waited_s = self._now() - self._sent_at
        if self._probe.done() or waited_s < STILL_S:
            return None
        return f"no thread took work for {waited_s:.0f} s"


def _nothing() -> None:
    pass
