"""Whether this front should get requests (readiness), whether it takes them (admission), and whether it lives.

While the only worker of its kind starts again the front is not ready: whoever has another front should use that. But a
request that comes all the same waits for the worker within its deadline.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltaserve.server.api_errors import not_ready
from deltaserve.server.read import TextThreads

STILL_S = 10.0
"""Seconds without a sign of life after which a part counts as dead."""
_LOOK_S = 0.1


@dataclass(slots=True)
class Health:
    """Whether this front should get new requests. A request that met a bug says nothing about the next one."""

    engine_ready: Callable[[], str | None]
    engine_refusal: Callable[[], str | None]
    draining: bool = False

    def reasons(self) -> dict[str, str]:
        """Why not to send requests here, by source; empty when ready."""
        return self._reasons(self.engine_ready())

    def check(self) -> None:
        """Raises ApiError 503 unless ready."""
        _refuse(self.reasons())

    def admit(self) -> None:
        """Raises ApiError 503 unless a request is taken now."""
        _refuse(self._reasons(self.engine_refusal()))

    def _reasons(self, engine: str | None) -> dict[str, str]:
        found = {"draining": "the server is draining: it takes no new requests"} if self.draining else {}
        return found if engine is None else {**found, "engine": engine}


def _refuse(reasons: Mapping[str, str]) -> None:
    if reasons:
        raise not_ready("; ".join(reasons.values()))


class Liveness:
    """Asked from the event loop, which thereby proves its own life."""

    def __init__(self, engine_alive: Callable[[], str | None], threads: TextThreads, now: Callable[[], float]) -> None:
        self._engine_alive = engine_alive
        self._text_threads = threads
        self._now = now
        self._probe: asyncio.Future[None] | None = None
        self._sent_at = 0.0

    async def complaint(self) -> str | None:
        """What does not move any more, in words; None when all is well."""
        return self._engine_alive() or await self._threads()

    async def _threads(self) -> str | None:
        """Whether the threads that tokenize take work: one probe at a time is under way, however many ask."""
        if self._probe is None or self._probe.done():
            self._probe = self._text_threads.run(_nothing)
            self._sent_at = self._now()
        await asyncio.wait([self._probe], timeout=_LOOK_S)
        waited_s = self._now() - self._sent_at
        if self._probe.done() or waited_s < STILL_S:
            return None
        return f"no thread took work for {waited_s:.0f} s"


def _nothing() -> None:
    pass
