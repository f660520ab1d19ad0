"""What a body says under `kv_hints` reaches the workers, and is answered; what nobody knows is refused by name."""

import json
from collections.abc import Callable, Mapping

import pytest

from deltaserve.core.hints import NO_HINTS, HintAnswer, HintOutcome, KvHints
from deltaserve.core.wire.messages import Usage
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Count, hint_answers
from tests.server.conftest import MODEL, served
from tests.server.corpus import JSON, chat, completion, generate
from tests.server.corpus_agents import message, response
from tests.server.oracle import OracleEngine

MAKERS: dict[str, Callable[[Mapping[str, object]], bytes]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": response,
    "/v1/messages": message,
    "/generate": generate,
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(
    ("given", "hints"),
    [({"done": True}, KvHints(done=True)), ({"done": False}, NO_HINTS), ({"done": None}, NO_HINTS), ({}, NO_HINTS)],
)
async def test_hints_reach_the_workers(
    codec: TextCodec, path: str, given: Mapping[str, object], hints: KvHints
) -> None:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"kv_hints": given}), headers=JSON)
        assert reply.status_code == 200, reply.text
    assert [generation.hints for generation in engine.opened] == [hints]


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(
    ("given", "param"),
    [
        (True, "kv_hints"),
        ([], "kv_hints"),
        ({"done": 1}, "kv_hints.done"),
        ({"done": "yes"}, "kv_hints.done"),
        ({"prefetch": True}, "kv_hints.prefetch"),
    ],
)
async def test_wrong_hints_are_refused_by_name(codec: TextCodec, path: str, given: object, param: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"kv_hints": given}), headers=JSON)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert param in error["message"] if path == "/v1/messages" else error["param"] == param


def answered(told: Mapping[str, object]) -> object:
    """What a body, or the last event that has one, says of hints."""
    usage = told.get("meta_info") or told.get("usage") or {}
    return usage.get("kv_hints") if isinstance(usage, dict) else None


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
async def test_the_usage_says_what_became_of_it(codec: TextCodec, path: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        fields: dict[str, object] = {"kv_hints": {"done": True}}
        reply = await case.client.post(path, content=MAKERS[path](fields), headers=JSON)
        assert answered(reply.json()) == {"done": "accepted"}
        plain = await case.client.post(path, content=MAKERS[path]({}), headers=JSON)
        assert answered(plain.json()) is None
        stream = await case.client.post(path, content=MAKERS[path](fields | {"stream": True}), headers=JSON)
        lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        told = [answer for event in events if (answer := answered(event) or answered(event.get("response") or {}))]
        assert told[-1:] == [{"done": "accepted"}]
        metrics = (await case.client.get("/metrics")).text
    assert 'deltaserve_kv_hints_total{hint="done",outcome="accepted"} 2.0' in metrics


def test_one_sample_that_refuses_a_hint_refuses_it() -> None:
    refused = HintAnswer(outcome=HintOutcome.REFUSED, reason="why")
    answers = (HintAnswer(outcome=HintOutcome.ACCEPTED), refused, None)
    counted = {at: Count(1, Usage(prompt_len=1, output_len=1, done_hint=each)) for at, each in enumerate(answers)}
    assert hint_answers(counted) == {"kv_hints": {"done": "refused", "reason": "why"}}
    assert hint_answers({0: Count(), 1: counted[2]}) == {}
