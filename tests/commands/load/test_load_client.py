"""The client against a real server on a real socket."""

import asyncio
import time

import httpx
import pytest

from deltaserve.commands.client.completion_stream import (
    Completion,
    ServerDialect,
    ServerError,
    Tokenizer,
    listed_models,
    negotiate,
)
from deltaserve.commands.load.load_client import Client, Load, Measurement, num_right
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.traffic import Conversation, Lengths, MultiTurnTraffic
from tests.commands.bench.answering_server import AnsweringServer, CharacterTokenizer, Manners, serving
from tests.patience import PATIENCE_S

RECALL = RecallTraffic(2, 2, num_turns=3, answer_len=5, shape=DocumentShape(8))


def measure(
    server: AnsweringServer,
    conversations: list[Conversation],
    tokenizer: Tokenizer | None = None,
    max_concurrency: int | None = None,
) -> Measurement:
    """Negotiate, forget what that sent, send everything."""

    async def session(url: str) -> Measurement:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            dialect = await negotiate(http, str((await listed_models(http))[0]["id"]), (65,), tokenizer)
            server.bodies.clear()
            load = Load([0.0] * len(conversations), max_concurrency)
            return await Client(http, dialect, tokenizer).measure(conversations, load)

    with serving(server) as url:
        return asyncio.run(session(url))


@pytest.mark.parametrize("tokens_per_event", [1, 2, 5])
def test_every_turn_is_sent_with_the_answers_before_it(tokens_per_event: int) -> None:
    server = AnsweringServer(Manners(tokens_per_event=tokens_per_event))
    conversations = RECALL.generate(seed=3)
    measurement = measure(server, conversations)
    assert [(record.conversation, record.turn) for record in measurement.records] == [
        (conversation, turn) for conversation in range(4) for turn in range(3)
    ]
    for record in measurement.records:
        assert record.error is None
        assert (record.tokens_right, record.tokens_expected, record.output_len) == (5, 5, 5)
        assert sum(arrival.num_tokens for arrival in record.arrivals) == 5
        assert record.cached_len == 2
        assert record.usage is not None
        assert record.usage["prompt_tokens"] == record.prompt_len
        assert record.prompt_len == 26 + 7 * record.turn
        assert record.ttft_s is not None
        assert 0 < record.ttft_s <= record.arrivals[-1].at_s <= record.e2e_s <= measurement.duration_s
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    for conversation in conversations:
        history: tuple[int, ...] = ()
        for turn in conversation.turns:
            history += turn.tokens
            assert history in prompts
            history += turn.expected or ()


def test_requests_ask_for_greedy_streamed_answers_with_usage() -> None:
    server = AnsweringServer(Manners())
    measure(server, RECALL.generate(seed=3))
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("oracle", 0.0, 5, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True


def test_the_client_tells_how_late_it_was() -> None:
    async def session(url: str) -> Measurement:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            client = Client(http, ServerDialect("oracle", {}), on_record=lambda record: time.sleep(0.05))
            return await client.measure(RECALL.generate(seed=3), Load([0.0] * 4))

    with serving(AnsweringServer(Manners())) as url:
        assert max(asyncio.run(session(url)).lags_s) > 0.03


@pytest.mark.parametrize("limit", [1, 3])
def test_concurrency_is_limited(limit: int) -> None:
    server = AnsweringServer(Manners())
    conversations = MultiTurnTraffic(9, 2, Lengths(4, 4, 6)).generate(seed=0)
    assert len(measure(server, conversations, max_concurrency=limit).records) == 18
    assert server.most_in_flight <= limit


def test_without_answer_ids_the_stand_in_keeps_lengths() -> None:
    server = AnsweringServer(Manners(takes_lenient_fields=False))
    conversations = MultiTurnTraffic(2, 3, Lengths(4, 4, 6)).generate(seed=0)
    measurement = measure(server, conversations)
    assert [record.prompt_len for record in measurement.records] == [8, 18, 28] * 2
    assert all(record.tokens_right is None for record in measurement.records)
    assert set(server.bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    first = conversations[0].turns
    assert [*first[0].tokens, *first[0].stand_in, *first[1].tokens] in [body["prompt"] for body in server.bodies]


def test_a_text_only_server_is_spoken_to_through_a_tokenizer() -> None:
    server = AnsweringServer(Manners(takes_ids=False, takes_lenient_fields=False))
    measurement = measure(server, RECALL.generate(seed=3), CharacterTokenizer())
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert [record.tokens_right for record in measurement.records] == [5] * 12


def test_the_first_refusal_is_reported() -> None:
    server = AnsweringServer(Manners(takes_ids=False))
    with pytest.raises(ServerError, match=r"HTTP 400.*not understood"):
        measure(server, RECALL.generate(seed=3))


def test_a_failed_turn_ends_its_conversation_only() -> None:
    server = AnsweringServer(Manners(fail_at=1))  # request 0 finds out the dialect
    conversations = RECALL.generate(seed=3)

    async def session(url: str) -> Measurement:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            dialect = await negotiate(http, "oracle", (65,), None)
            return await Client(http, dialect).measure(conversations, Load([0.0] * 4, max_concurrency=1))

    with serving(server) as url:
        records = asyncio.run(session(url)).records
    assert [record.error for record in records] == ["ServerError: the worker died"] + [None] * 9
    assert records[0].output_len == 1


def test_an_unreachable_server_is_an_error_in_words() -> None:
    async def session() -> Measurement:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", timeout=PATIENCE_S) as http:
            return await Client(http, ServerDialect("m", {})).measure(RECALL.generate(seed=3)[:1], Load([0.0]))

    (record,) = asyncio.run(session()).records
    assert record.error is not None
    assert record.error.startswith("ConnectError")
    assert record.ttft_s is None


def test_events_without_output_are_not_arrivals() -> None:
    completion = Completion()
    completion.take({"choices": [{"text": "", "token_ids": []}]}, 0.1)
    completion.take({"choices": [{"text": "", "token_ids": [7]}]}, 0.2)
    completion.take({"choices": [{"text": "ab"}]}, 0.3)
    completion.take({"choices": [], "usage": None}, 0.4)
    assert [arrival.at_s for arrival in completion.arrivals] == [0.2, 0.3]
    assert (completion.output_len, completion.cached_len, completion.tokens) == (2, None, [7])
    with pytest.raises(ServerError, match="out of memory"):
        completion.take({"error": "out of memory"}, 0.5)


def test_right_tokens_are_counted_by_place() -> None:
    assert num_right([1, 2, 3], (1, 9, 3)) == 2
    assert num_right([1], (1, 2)) == 1
    assert num_right(None, (1,)) is None
    assert num_right([1], None) is None
