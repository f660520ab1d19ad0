"""The demo's traffic: questions whose answers can be computed, and what the server tells about them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import httpx

from deltaserve.commands.client.completion_stream import LENIENT, ServerDialect
from deltaserve.commands.client.http_client import async_http_client
from deltaserve.commands.demo.server import DECODE
from deltaserve.commands.load.load_client import Client, Load, Measurement
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.report import summarize
from deltaserve.commands.load.traffic import Conversation

_LOOK_EVERY_S = 0.1
_SETTLED_WITHIN_S = 10.0
_TIMEOUT_S = 60.0
_SEED = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of traffic with its title."""

    title: str
    traffic: RecallTraffic

    @property
    def num_requests(self) -> int:
        traffic = self.traffic
        return traffic.num_documents * traffic.conversations_per_document * traffic.num_turns

    def conversations(self) -> list[Conversation]:
        return self.traffic.generate(_SEED)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one scene cost. Times in seconds; None where no request answered."""

    num_requests: int
    num_failed: int
    answers_right: int
    prompt_tokens: int
    cached_on_prefill: int
    """Prompt tokens, as is the next."""
    cached_on_decode: int
    bytes_moved: int
    """Bytes moved from prefill to decode."""
    ttft_p50_s: float | None
    tpot_p50_s: float | None
    """Time per output token of a request after its first."""
    answered_at_once: int
    """Requests between their first and their last token at a time, as the client saw them: those decode ran."""
    wall_s: float
    tokens_read: int
    """Positions of KV that decode's attention needed, summed over requests and steps."""
    shared_tokens_read: int
    """Positions among `tokens_read` not read again, because another request of the batch read them."""

    @property
    def is_right(self) -> bool:
        return self.num_failed == 0 and self.answers_right == self.num_requests


def scenes(num_askers: int) -> tuple[Scene, Scene]:
    """Shared documents, then conversations, which are longer: an eighth as many. `num_askers`: of each document."""
    documents = RecallTraffic(3, num_askers, num_turns=1, answer_len=64, shape=DocumentShape(120, 240))
    turns = RecallTraffic(4, max(1, num_askers // 8), num_turns=6, answer_len=24, shape=DocumentShape(96, 48))
    return (
        Scene(f"{3 * num_askers} questions about 3 documents", documents),
        Scene(f"{4 * turns.conversations_per_document} conversations of 6 turns", turns),
    )


def warm_up() -> Scene:
    """The first requests of a server find everything cold; they are not measured."""
    return Scene("warm-up", RecallTraffic(1, 4, num_turns=2, answer_len=8, shape=DocumentShape(16)))


# ---------------------------------------------------------------- what decode tells


@dataclass(slots=True)
class Sight:
    """What the workers told last: decode's load and counters, and what all of them could evict."""

    num_running: int = 0
    leases: int = 0
    tokens_read: int = 0
    shared_tokens_read: int = 0
    evictable_pages: int = 0

    def take(self, server_info: dict[str, Any]) -> None:
        """`server_info`: the reply of GET /server_info."""
        statuses = {worker["name"]: worker["status"] for worker in server_info["engine"]["workers"]}
        told = [status for status in statuses.values() if status is not None]
        self.evictable_pages = sum(sum(status["evictable_pages"]) for status in told)
        decode = statuses.get(DECODE)
        if decode is not None:
            self.num_running, self.leases = decode["num_running"], decode["leases"]
            self.tokens_read = int(decode["metrics"]["deltaserve_attention_tokens_read_total"])
            self.shared_tokens_read = int(decode["metrics"]["deltaserve_attention_shared_tokens_read_total"])


async def _look(http: httpx.AsyncClient, sight: Sight) -> None:
    reply = await http.get("/server_info")
    sight.take(reply.raise_for_status().json())


async def _settle(http: httpx.AsyncClient, sight: Sight) -> None:
    """Wait until decode has told that nothing runs any more: then its counters are complete."""
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_SETTLED_WITHIN_S):
            await asyncio.sleep(2 * _LOOK_EVERY_S)  # what it told before the last request ended is over by then
            await _look(http, sight)
            while sight.num_running or sight.leases:
                await asyncio.sleep(_LOOK_EVERY_S)
                await _look(http, sight)


async def _flush(http: httpx.AsyncClient) -> None:
    """Both sides' caches are empty after it. A server that has no such route is left as it is."""
    with suppress(httpx.HTTPError, TimeoutError):
        (await http.post("/flush_cache")).raise_for_status()
        async with asyncio.timeout(_SETTLED_WITHIN_S):
            await _look(http, sight := Sight())
            while sight.evictable_pages:
                await asyncio.sleep(_LOOK_EVERY_S)
                await _look(http, sight)


# ---------------------------------------------------------------- asking


def ask_all(base_url: str, model: str, scene: Scene, on_record: Callable[[RequestRecord], None]) -> Figures:
    """Send a scene's conversations, all at once, to empty caches. A failed request is a figure, not an exception."""
    return asyncio.run(_ask_all(base_url, model, scene, on_record))


async def _ask_all(base_url: str, model: str, scene: Scene, on_record: Callable[[RequestRecord], None]) -> Figures:
    conversations = scene.conversations()
    dialect = ServerDialect(model, {**LENIENT, "timings": True})
    async with async_http_client(base_url, _TIMEOUT_S) as http:
        before, sight = Sight(), Sight()
        await _settle(http, before)
        await _flush(http)
        client = Client(http, dialect, on_record=on_record)
        measurement = await client.measure(conversations, Load([0.0] * len(conversations)))
        await _settle(http, sight)
    return make_figures(measurement, scene.num_requests, before, sight)


def make_figures(measurement: Measurement, num_requests: int, before: Sight, after: Sight) -> Figures:
    """Requests that were never sent, because the turn before them failed, count as failed."""
    summary = summarize(measurement)
    timings = [timing for record in measurement.records for timing in record.timings]
    ttft, tpot = summary.latencies_s.get("ttft"), summary.latencies_s.get("tpot")
    return Figures(
        num_requests=num_requests,
        num_failed=num_requests - summary.num_completed,
        answers_right=summary.answers_right,
        prompt_tokens=summary.input_len,
        cached_on_prefill=_total(timings, "prefill_cached_tokens"),
        cached_on_decode=_total(timings, "decode_cached_tokens"),
        bytes_moved=_total(timings, "transferred_bytes"),
        ttft_p50_s=ttft.p50 if ttft else None,
        tpot_p50_s=tpot.p50 if tpot else None,
        answered_at_once=answered_at_once(measurement.records),
        wall_s=summary.duration_s,
        tokens_read=after.tokens_read - before.tokens_read,
        shared_tokens_read=after.shared_tokens_read - before.shared_tokens_read,
    )


def answered_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were between their first and their last token at one moment."""
    answers = [record for record in records if record.arrivals]
    changes = [(record.sent_s + record.arrivals[0].at_s, 1) for record in answers]
    changes += [(record.sent_s + record.arrivals[-1].at_s, -1) for record in answers]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _total(timings: Sequence[Mapping[str, int]], field: str) -> int:
    return sum(timing[field] for timing in timings)
