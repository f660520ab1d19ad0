"""An Engine in this process whose answers can be computed by hand: the prompt backwards, again and again."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from deltaserve.control.front.client import (
    EngineStats,
    Generation,
    Limits,
    NameTaken,
    OutputDelta,
    RoleAnswer,
    RoleRefused,
    UnknownWorker,
    WorkerTree,
)
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.hints import NO_HINTS, HintAnswer, HintOutcome, KvHints
from deltaserve.core.ids import Role, Room
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import unpack_u32
from deltaserve.core.wire.messages import FinishReason, Usage
from tests.fixtures.text_folder import VOCAB

LIMITS = Limits(max_context_len=512, max_prompt_len=400, vocab_size=VOCAB)

Answer = Callable[[Generation], Sequence[int]]


def backwards(generation: Generation) -> list[int]:
    """max_tokens ids: the prompt backwards, repeated. The seed is shown by what it does not change: nothing."""
    prompt = unpack_u32(generation.prompt)
    return list(islice(cycle(reversed(prompt)), generation.sampling.max_tokens))


def logprob_of(token: int) -> float:
    """What this engine says about a token."""
    return -math.log1p(token)


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    top = tuple(((token + i) % VOCAB, logprob_of(token) - i) for i in range(num_top))
    return TokenLogprobs(logprob_of(token), top)


@dataclass(slots=True)
class OracleEngine:
    """Rooms are recorded: every one that was opened must be in `ended` exactly once."""

    answer: Answer = backwards
    limits_now: Limits | None = LIMITS
    not_ready: str | None = None
    takes_anyway: bool = False
    """Not ready, but a worker is expected back."""
    not_alive: str | None = None
    failure: RequestFailed | Exception | None = None
    fail_after: int = 0
    """Tokens before `failure`."""
    tokens_per_delta: int = 1
    gate: asyncio.Event | None = None
    """Waited for before each token after `free_tokens`."""
    free_tokens: int = 0
    num_held: int = 0
    """Times that an answer came to the gate."""
    opened: list[Generation] = field(default_factory=list)
    ended: list[Room] = field(default_factory=list)
    cancelled: list[Room] = field(default_factory=list)
    finished: dict[Room, int] = field(default_factory=dict)
    reasons: dict[Room, FailReason] = field(default_factory=dict)
    """Rooms ended from outside."""
    num_tokens: int = 0
    """Made so far, by all rooms."""
    held_trees: tuple[WorkerTree, ...] = ()
    evictable: dict[str, int] = field(default_factory=lambda: {"decode-0": 7})
    """What a flush would find; empty: no worker is there."""
    num_flushes: int = 0
    joined: list[tuple[str, Role, str]] = field(default_factory=list)
    left: list[tuple[str, float]] = field(default_factory=list)
    missing_after_leave: str | None = None
    """Why nothing can be served once a worker leaves; None: others are there."""
    asked_roles: list[tuple[str, Role, float]] = field(default_factory=list)

    async def generate(self, generation: Generation) -> AsyncIterator[OutputDelta]:
        """The answer in deltas; stop ids end it."""
        self.opened.append(generation)
        is_complete = False
        try:
            async for delta in self._deltas(generation):
                is_complete = delta.finish is not None
                yield delta
        finally:
            self.ended.append(generation.room)
            if not is_complete and self.failure is None:
                self.cancelled.append(generation.room)

    async def _deltas(self, generation: Generation) -> AsyncIterator[OutputDelta]:
        sampling = generation.sampling
        prompt = unpack_u32(generation.prompt)
        if sampling.prompt_logprobs is not None:
            values = [_logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]]
            half = len(values) // 2
            yield OutputDelta(prompt_logprobs=tuple(values[:half]))
            yield OutputDelta(prompt_logprobs=tuple(values[half:]))
        tokens = list(self.answer(generation))
        finish, num_out = FinishReason.LENGTH, 0
        for start in range(0, len(tokens), self.tokens_per_delta):
            run = tokens[start : start + self.tokens_per_delta]
            await self._pause(num_out, generation.room)
            stops = [i for i, token in enumerate(run) if token in sampling.stop_token_ids]
            if stops:
                run, finish = run[: stops[0] + 1], FinishReason.STOP
            num_out += len(run)
            self.num_tokens += len(run)
            logprobs = () if sampling.logprobs is None else tuple(_logprobs(t, sampling.logprobs) for t in run)
            usage = usage_of(len(prompt), num_out, generation.hints) if start == 0 else None
            yield OutputDelta(tokens=tuple(run), logprobs=logprobs, usage=usage)
            if finish is FinishReason.STOP:
                break
            if generation.room in self.finished:
                # A real engine runs ahead of the front; what it made too much of is dropped.
                num_out, finish = self.finished[generation.room], FinishReason.STOP
                break
        await self._pause(num_out, generation.room)
        yield OutputDelta(finish=finish, usage=usage_of(len(prompt), num_out, generation.hints))

    async def _pause(self, num_out: int, room: Room) -> None:
        if self.failure is not None and num_out >= self.fail_after:
            raise self.failure
        if self.gate is not None and num_out >= self.free_tokens:
            self.num_held += 1
            while not self.gate.is_set() and room not in self.reasons:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        if room in self.reasons:
            raise RequestFailed(self.reasons[room], "ended from outside")

    def cancel(self, room: Room, reason: FailReason) -> None:
        """The room's client is told the reason."""
        self.reasons[room] = reason

    def finish(self, room: Room, output_len: int) -> None:
        """Remember where the front found a stop string."""
        self.finished[room] = output_len

    def flush_cache(self) -> dict[str, int]:
        """As set."""
        self.num_flushes += 1
        return dict(self.evictable)

    async def trees(self) -> tuple[WorkerTree, ...]:
        """As set."""
        return self.held_trees

    def change_role(self, worker: str, role: Role, grace_s: float) -> RoleAnswer:
        """decode-0 and decode-1 are there; once asked, there is nobody else to serve."""
        if worker not in ("decode-0", "decode-1"):
            raise UnknownWorker(f"no worker {worker!r} here, but: decode-0, decode-1")
        if role is Role.DECODE:
            return RoleAnswer.HELD
        if self.asked_roles:
            raise RoleRefused(f"{worker} is the only decode worker")
        self.asked_roles.append((worker, role, grace_s))
        return RoleAnswer.CHANGING

    def add_worker(self, worker: str, role: Role, url: str) -> None:
        """decode-0 is there as a decode worker, decode-1 elsewhere."""
        if (worker, role) == ("decode-0", Role.PREFILL):
            raise RoleRefused("decode-0 is a decode worker, not prefill")
        if worker == "decode-1":
            raise NameTaken("decode-1 is in use, at tcp://127.0.0.1:8998")
        self.joined.append((worker, role, url))

    def remove_worker(self, worker: str, grace_s: float) -> None:
        """decode-0 and decode-1 are there."""
        if worker not in ("decode-0", "decode-1"):
            raise UnknownWorker(f"no worker {worker!r} here, but: decode-0, decode-1")
        self.left.append((worker, grace_s))
        self.not_ready = self.not_ready or self.missing_after_leave

    def limits(self) -> Limits | None:
        """As set."""
        return self.limits_now

    def alive(self) -> str | None:
        """As set."""
        return self.not_alive

    def ready(self) -> str | None:
        """As set."""
        return self.not_ready

    def refusal(self) -> str | None:
        """As set."""
        return None if self.takes_anyway else self.not_ready

    def stats(self) -> EngineStats:
        """A picture with some numbers in it."""
        return EngineStats(rooms=7)


def accepted(hints: KvHints) -> tuple[HintAnswer, ...]:
    return tuple(HintAnswer(hint=hint, outcome=HintOutcome.ACCEPTED) for hint in hints.answered)


def usage_of(prompt_len: int, output_len: int, hints: KvHints = NO_HINTS) -> Usage:
    """What the engine reports: 3/4 of the prompt cached on decode, half of it on prefill, each hint accepted."""
    return Usage(
        prompt_len=prompt_len,
        output_len=output_len,
        decode_cached_len=prompt_len * 3 // 4,
        prefill_cached_len=prompt_len // 2,
        transferred_bytes=1024,
        queue_s=0.5,
        prefill_s=0.25,
        transfer_s=0.125,
        decode_queue_s=0.0625,
        worker_wait_s=0.125,
        hints=accepted(hints),
        first_token_s=1.0,
    )
