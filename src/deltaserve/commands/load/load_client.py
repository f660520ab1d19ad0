"""Send conversations to a server under a concurrency limit and an arrival rate, and record every request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from deltaserve.commands.client.completion_stream import Completion, ServerDialect, ServerError, Tokenizer, complete
from deltaserve.commands.load.moved_bytes import MovedBytes
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.traffic import ChatTurn, Conversation
from deltaserve.core.hints import KvHints

LAG_PROBE_S = 0.01


@dataclass(frozen=True, slots=True)
class Measurement:
    """The outcome of one run."""

    records: tuple[RequestRecord, ...]
    """Records by conversation, branch and turn. A failed request ends its branch; later turns have no record."""
    duration_s: float
    """Time from the first send to the last answer's end."""
    lags_s: tuple[float, ...] = ()
    """How late this client was, looked at every LAG_PROBE_S: arrivals may be noted as much too late."""
    moved: MovedBytes | None = None
    """What the server's workers counted meanwhile; None: nobody looked, or it does not tell."""


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a server is loaded."""

    arrivals_s: Sequence[float]
    """When each conversation may start, seconds after the start."""
    max_concurrency: int | None = None
    """Conversations in flight at most; so many requests, and those of their forks."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """Turns that follow each other."""

    conversation: int
    number: int
    first_turn: int
    turns: Sequence[ChatTurn]


class Client:
    """Runs conversations against one server. Answers go back into the next turn's prompt."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        dialect: ServerDialect,
        tokenizer: Tokenizer | None = None,
        on_record: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._http = http
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._on_record = on_record

    async def measure(self, conversations: Sequence[Conversation], load: Load) -> Measurement:
        """Send everything; returns when the last answer is complete."""
        gate = asyncio.Semaphore(load.max_concurrency or max(1, len(conversations)))
        began_s = time.perf_counter()

        async def one(index: int, conversation: Conversation, arrival_s: float) -> list[RequestRecord]:
            await asyncio.sleep(arrival_s - (time.perf_counter() - began_s))
            async with gate:
                return await self._converse(index, conversation, began_s)

        lags_s: list[float] = []
        probe = asyncio.create_task(_probe_lag(lags_s))
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(conversations, load.arrivals_s, strict=True)
                tasks = [group.create_task(one(index, *pair)) for index, pair in enumerate(pairs)]
        finally:
            probe.cancel()
        records = tuple(record for task in tasks for record in task.result())
        return Measurement(records, _duration_s(records), tuple(lags_s))

    async def _converse(self, index: int, conversation: Conversation, began_s: float) -> list[RequestRecord]:
        """All requests of one conversation, those of its forks behind its own; of each branch up to the first that
        fails."""
        forks: list[asyncio.Task[list[RequestRecord]]] = []

        async with asyncio.TaskGroup() as group:

            def answered(turn: int, history: Sequence[int]) -> None:
                for number, fork in enumerate(conversation.forks, 1):
                    if fork.after == turn:
                        branch = _Branch(index, number, turn + 1, fork.turns)
                        forks.append(group.create_task(self._go_on(branch, [*history], began_s)))

            records = await self._go_on(_Branch(index, 0, 0, conversation.turns), [], began_s, answered)
        return records + [record for task in forks for record in task.result()]

    async def _go_on(
        self,
        branch: "_Branch",
        history: list[int],
        began_s: float,
        answered: Callable[[int, Sequence[int]], None] = lambda turn, history: None,
    ) -> list[RequestRecord]:
        """`answered`: told each turn that is complete, and the history with its answer."""
        records: list[RequestRecord] = []
        for number, turn in enumerate(branch.turns, branch.first_turn):
            await asyncio.sleep(turn.pause_s)
            before_len = len(history)
            history += turn.tokens
            completion = Completion()
            sent_s = time.perf_counter()
            error = await self._send(history, turn, completion)
            e2e_s = time.perf_counter() - sent_s
            answer = self._answer_ids(completion)
            records.append(
                RequestRecord(
                    conversation=branch.conversation,
                    turn=number,
                    branch=branch.number,
                    sent_s=sent_s - began_s,
                    prompt_len=len(history),
                    known_len=before_len + turn.known_len,
                    arrivals=tuple(completion.arrivals),
                    e2e_s=e2e_s,
                    output_len=completion.output_len,
                    cached_len=completion.cached_len,
                    tokens_right=num_right(answer, turn.expected),
                    tokens_expected=len(turn.expected or ()),
                    error=error,
                    retokenized_len=self._retokenized_len(completion),
                    usage=completion.usage,
                )
            )
            self._on_record(records[-1])
            if error is not None:
                break
            history += turn.stand_in if answer is None else answer
            answered(number, history)
        return records

    async def _send(self, prompt: Sequence[int], turn: ChatTurn, completion: Completion) -> str | None:
        """Fill `completion`; returns what went wrong, in words."""
        try:
            body = self._dialect.body(prompt, turn.output_len) | _hint_fields(turn.hints)
            await complete(self._http, body, completion)
        except (ServerError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _retokenized_len(self, completion: Completion) -> int | None:
        """Output tokens by the local tokenizer, as SGLang's benchmark counts: servers differ in what they call a
        token."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else len(tokenizer.encode(completion.text, add_special_tokens=False))

    def _answer_ids(self, completion: Completion) -> list[int] | None:
        """The answer's ids: from the server, else by tokenizing its text; None if there is no tokenizer either."""
        if completion.tokens:
            return completion.tokens
        return self._tokenizer.encode(completion.text, add_special_tokens=False) if self._tokenizer else None


def _hint_fields(hints: KvHints) -> dict[str, object]:
    """Fields of a request that say it; none where nothing is said."""
    if hints.done:
        return {"kv_hints": {"done": True}}
    return {"kv_hints": {"retain_s": hints.retain_ms / 1e3}} if hints.retain_ms else {}


def num_right(answer: Sequence[int] | None, expected: Sequence[int] | None) -> int | None:
    """How many expected tokens stand at their place in the answer; None if either is unknown."""
    if answer is None or expected is None:
        return None
    return sum(got == want for got, want in zip(answer, expected, strict=False))


async def _probe_lag(lags_s: list[float]) -> None:
    """Append, until cancelled, by how much each short sleep overslept."""
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(LAG_PROBE_S)
        lags_s.append(time.perf_counter() - began_s - LAG_PROBE_S)


def _duration_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.sent_s + record.e2e_s for record in records) - min(record.sent_s for record in records)
