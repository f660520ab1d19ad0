"""What one room's client has not taken yet. Bounded: however slow the client, it waits as one merged delta."""

import asyncio

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import RequestFailed
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import FinishReason, Usage


class Stream:
    """Deltas in, the merged rest out. Holds at most the whole answer of its room, flat."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._finish: FinishReason | None = None
        self._usage: Usage | None = None
        self._error: RequestFailed | None = None
        self._is_filled = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        """What came, after everything before it."""
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._finish, self._usage = delta.finish, delta.usage or self._usage
        self._is_filled.set()

    def fail(self, error: RequestFailed) -> None:
        """The end; what came before it is still handed out first."""
        self._error = error
        self._is_filled.set()

    async def take(self) -> OutputDelta:
        """All that waits, as one delta; waits until there is something. Raises RequestFailed at a failure's turn."""
        await self._is_filled.wait()
        has_output = bool(self._tokens or self._prompt_logprobs or self._finish)
        if self._error is not None and not has_output:
            raise self._error
        delta = OutputDelta(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish=self._finish,
            usage=self._usage,
        )
        self._tokens, self._logprobs, self._prompt_logprobs = [], [], []
        self._finish, self._usage = None, None
        if self._error is None:
            self._is_filled.clear()
        return delta
