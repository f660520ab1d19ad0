"""A server as a worker of Dynamo asks it, without Dynamo: its tokens come back as chunks, whatever ends a stream."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from deltaserve.commands.client.bearer_key import authorization
from deltaserve.commands.dynamo.asked_server import AskedServer, HttpRefusal, ServerAway
from deltaserve.commands.dynamo.translation import BrokenStream, Chunks, Json, ServerFacts, body_of
from deltaserve.core.errors import ConfigError
from tests.e2e.server import Server, serving, wait_until
from tests.patience import PATIENCE_S
from tests.ports import free_port

PROMPT = list(range(10, 60))
TOLERANCE = 1e-4
"""The second answer's prompt is cached: its sums may be added in another order."""
GREEDY = {"sampling_options": {"temperature": 0.0}}


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[AskedServer]:
    server = AskedServer(url, {})
    try:
        yield server
    finally:
        await server.close()


def asked_of(url: str, question: Callable[[AskedServer], Awaitable[Json | str | None]]) -> Json | str | None:
    async def ask() -> Json | str | None:
        async with asking(url) as server, asyncio.timeout(PATIENCE_S):
            return await question(server)

    return asyncio.run(ask())


def request(max_tokens: int, **output: object) -> Json:
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": PROMPT, "stop_conditions": stopping, "output_options": output, **GREEDY}


def tokens_of(told: list[Json]) -> list[int]:
    """The end may come with the last token, or behind it."""
    return [token for chunk in told for token in chunk["token_ids"]]


async def chunks_of(server: AskedServer, asked: Json, facts: ServerFacts) -> list[Json]:
    chunks, told = Chunks(tells_alternatives=True), []
    async with aclosing(server.stream(body_of(asked, facts))) as events:
        async for event in events:
            told += list(chunks.of(event))
    assert chunks.is_over
    return told


def test_tokens_logprobs_end_and_counts_are_those_of_the_server(shared_pair: Server) -> None:
    own = shared_pair.complete(PROMPT, 8)

    async def ask(server: AskedServer) -> None:
        facts = await server.wait()
        assert (facts.model, facts.model_path) == (shared_pair.model, shared_pair.info()["model_path"])
        told = await chunks_of(server, request(8, logprobs=5), facts)
        assert tokens_of(told) == own.tokens
        values = [value for chunk in told for value in chunk.get("log_probs", ())]
        assert values == pytest.approx(own.logprobs, abs=TOLERANCE)
        tops = [top for chunk in told for top in chunk.get("top_logprobs", ())]
        for top, own_top in zip(tops, own.tops, strict=True):
            assert [one["logprob"] for one in top] == pytest.approx(sorted(own_top, reverse=True), abs=TOLERANCE)
        *_, last = told
        assert last["finish_reason"] == own.finish == "length"
        assert last["completion_usage"]["completion_tokens"] == 8
        assert not any("finish_reason" in chunk for chunk in told[:-1])

    asked_of(shared_pair.base_url, ask)


def test_a_stream_that_is_left_frees_its_request(shared_pair: Server) -> None:
    async def ask(server: AskedServer) -> None:
        facts = await server.wait()
        async with aclosing(server.stream(body_of(request(facts.context_len - len(PROMPT)), facts))) as events:
            await anext(events)

    asked_of(shared_pair.base_url, ask)
    shared_pair.wait_quiet()


def test_a_refusal_has_the_server_s_status_and_words(shared_pair: Server) -> None:
    async def ask(server: AskedServer) -> None:
        facts = await server.wait()
        with pytest.raises(HttpRefusal, match="max_tokens is 1000000") as refused:
            await chunks_of(server, request(10**6), facts)
        assert refused.value.status == 400
        assert len(tokens_of(await chunks_of(server, request(1), facts))) == 1

    asked_of(shared_pair.base_url, ask)


def test_where_nobody_is_nothing_is_served_and_it_is_told_to_be_gone() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def ask(server: AskedServer) -> str:
        with pytest.raises(ServerAway, match="no server is there"):
            await chunks_of(server, request(1), ServerFacts("m", "m", context_len=100))
        return await server.until_gone()

    assert asked_of(url, ask) == f"{url}: the server is gone"


def test_a_server_that_dies_breaks_its_streams(folder: Path, tiny_models: Path) -> None:
    with serving(folder, tiny_models / "llama", deaths=None) as own:

        async def ask(server: AskedServer) -> None:
            facts = await server.wait()
            with pytest.raises(BrokenStream):
                async with aclosing(server.stream(body_of(request(facts.context_len - len(PROMPT)), facts))) as events:
                    await anext(events)
                    own.signal("front", signal.SIGKILL)
                    async for _ in events:
                        pass

        asked_of(own.base_url, ask)
        wait_until(own.is_ready, "the front's return", own)


def test_a_server_that_wants_a_key_is_asked_with_one(folder: Path, tiny_models: Path) -> None:
    keys = folder / "api.keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{'k' * 40} tenant\n")
    own = Server(folder, tiny_models / "llama", "--api-key-file", str(keys))
    with ExitStack() as stack:
        stack.callback(own.kill)
        stack.enter_context(own.http)
        own.wait_ready()

        async def ask(server: AskedServer) -> None:
            with pytest.raises(ConfigError, match="wants a key: --api-key-file"):
                await server.wait()
            with_key = AskedServer(own.base_url, authorization(keys))
            facts = await with_key.wait()
            assert len(tokens_of(await chunks_of(with_key, request(1), facts))) == 1
            await with_key.close()

        asked_of(own.base_url, ask)
