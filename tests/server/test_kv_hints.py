"""What a body says under `kv_hints` reaches the workers, and is answered; what nobody knows is refused by name."""

import json
from collections.abc import Callable, Mapping

import pytest

from deltaserve.core.hints import NO_HINTS, Hint, HintAnswer, HintOutcome, KvHints
from deltaserve.core.wire.messages import Usage
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import Count, hint_answers
from tests.server.agents import MESSAGES_TOOL
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
    [
        ({"done": True}, KvHints(done=True)),
        ({"done": False}, NO_HINTS),
        ({"done": None}, NO_HINTS),
        ({}, NO_HINTS),
        ({"retain_s": 300}, KvHints(retain_ms=300_000)),
        ({"retain_s": 0.0001, "done": False}, KvHints(retain_ms=1)),
        ({"retain_s": None}, NO_HINTS),
        ({"prefetch": True}, KvHints(prefetch=True)),
        ({"prefetch": True, "retain_s": 2}, KvHints(prefetch=True, retain_ms=2000)),
        ({"prefetch": False}, NO_HINTS),
    ],
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
        ({"share": True}, "kv_hints.share"),
        ({"prefetch": 1}, "kv_hints.prefetch"),
        ({"prefetch": True, "done": True}, "kv_hints"),
        ({"retain_s": 0}, "kv_hints.retain_s"),
        ({"retain_s": -1.5}, "kv_hints.retain_s"),
        ({"retain_s": "5m"}, "kv_hints.retain_s"),
        ({"retain_s": True}, "kv_hints.retain_s"),
        ({"retain_s": 1e12}, "kv_hints.retain_s"),
        ({"retain_s": 60, "done": True}, "kv_hints"),
    ],
)
async def test_wrong_hints_are_refused_by_name(codec: TextCodec, path: str, given: object, param: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"kv_hints": given}), headers=JSON)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert param in error["message"] if path == "/v1/messages" else error["param"] == param


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "retain_s"),
    [
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, 300),
        (
            {
                "tools": [{**MESSAGES_TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                "tool_choice": {"type": "none"},
            },
            3600,
        ),
        (
            {
                "cache_control": {"type": "ephemeral", "ttl": None},
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                            {"type": "text", "text": "!", "cache_control": None},
                        ],
                    }
                ],
            },
            3600,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Oslo?"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [{"type": "text", "text": "7 C", "cache_control": {"type": "ephemeral"}}],
                            }
                        ],
                    },
                ],
                "tools": [MESSAGES_TOOL],
                "tool_choice": {"type": "none"},
            },
            300,
        ),
        ({"cache_control": {"type": "ephemeral"}, "kv_hints": {"done": True}}, 0),
        ({"cache_control": None, "system": "Be brief."}, 0),
    ],
)
async def test_marks_of_prompt_caching_are_hints(codec: TextCodec, fields: Mapping[str, object], retain_s: int) -> None:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post("/v1/messages", content=message(fields), headers=JSON)
        assert reply.status_code == 200, reply.text
    assert [generation.hints.retain_ms for generation in engine.opened] == [retain_s * 1000]


def text_block(mark: object) -> dict[str, object]:
    return {"type": "text", "text": "Hi", "cache_control": mark}


@pytest.mark.anyio
@pytest.mark.parametrize("ttl", ["2h", "", "5M", 300, [1], {"5m": 1}])
async def test_a_time_to_live_that_there_is_not_is_refused_where_it_stands(codec: TextCodec, ttl: object) -> None:
    """Also beside a hint that goes before it."""
    good, wrong = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": ttl}
    returned = {"type": "tool_result", "tool_use_id": "c", "content": [text_block(good), text_block(wrong)]}
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    turns = [
        {"role": "user", "content": [text_block(good)]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [returned]},
    ]
    tools = {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}}
    bodies: dict[str, dict[str, object]] = {
        "cache_control": {"cache_control": wrong, "kv_hints": {"done": True}},
        "system[1].cache_control": {"system": [text_block(good), text_block(wrong)]},
        "tools[0].cache_control": {**tools, "tools": [{**MESSAGES_TOOL, "cache_control": wrong}]},
        "messages[0].content[0].cache_control": {"messages": [{"role": "user", "content": [text_block(wrong)]}]},
        "messages[2].content[0].content[1].cache_control": {**tools, "messages": turns},
    }
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for place, fields in bodies.items():
            reply = await case.client.post("/v1/messages", content=message(fields), headers=JSON)
            assert reply.status_code == 400, reply.text
            told = reply.json()["error"]["message"]
            assert f"{place}.ttl is " in told
            assert "'5m' or '1h'" in told


def answered(told: Mapping[str, object]) -> object:
    """What a body, or the last event that has one, says of hints."""
    usage = told.get("meta_info") or told.get("usage") or {}
    return usage.get("kv_hints") if isinstance(usage, dict) else None


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(
    "given", [{"done": True}, {"retain_s": 60}, {"prefetch": True}, {"prefetch": True, "retain_s": 60}]
)
async def test_the_usage_says_what_became_of_each(codec: TextCodec, path: str, given: Mapping[str, object]) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        fields: dict[str, object] = {"kv_hints": given}
        accepted = dict.fromkeys(given, "accepted")
        reply = await case.client.post(path, content=MAKERS[path](fields), headers=JSON)
        assert answered(reply.json()) == accepted
        plain = await case.client.post(path, content=MAKERS[path]({}), headers=JSON)
        assert answered(plain.json()) is None
        stream = await case.client.post(path, content=MAKERS[path](fields | {"stream": True}), headers=JSON)
        lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        told = [answer for event in events if (answer := answered(event) or answered(event.get("response") or {}))]
        assert told[-1:] == [accepted]
        metrics = (await case.client.get("/metrics")).text
    for hint in given:
        assert f'deltaserve_kv_hints_total{{hint="{hint}",outcome="accepted"}} 2.0' in metrics


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prefetch_has_no_answer(codec: TextCodec, path: str, is_streamed: bool) -> None:
    """One token is drawn at most, whatever the body asks for, and nobody sees it."""
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        fields = {"kv_hints": {"prefetch": True}, "stream": is_streamed}
        reply = await case.client.post(path, content=MAKERS[path](fields), headers=JSON)
        plain = await case.client.post(path, content=MAKERS[path]({}), headers=JSON)
    assert reply.status_code == 200, reply.text
    prefetched, answered_one = engine.opened
    assert prefetched.prompt == answered_one.prompt
    assert prefetched.sampling.max_tokens == 1
    assert prefetched.sampling.grammar is None
    texts = set(map(str, texts_of(plain.json())))
    assert any(texts - {""})
    told = reply.text.split("data: ") if is_streamed else [reply.text]
    for part in told:
        if part.strip().startswith("{") or not is_streamed:
            assert set(texts_of(json.loads(part[: part.rindex("}") + 1]))) <= {"", None}


def texts_of(told: object) -> list[object]:
    """What stands under the names that dialects have for an answer's text."""
    if isinstance(told, list):
        return [text for part in told for text in texts_of(part)]
    if not isinstance(told, dict):
        return []
    own = [value for name, value in told.items() if name in ("text", "content", "delta") and isinstance(value, str)]
    return [*own, *(text for value in told.values() for text in texts_of(value))]


@pytest.mark.anyio
async def test_a_prefetch_of_several_answers_is_refused(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        body = completion({"kv_hints": {"prefetch": True}, "n": 2})
        reply = await case.client.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "n"


def test_of_several_samples_the_least_is_told() -> None:
    """What one refuses is refused, what one clips is clipped."""
    refused, clipped, accepted = (
        HintAnswer(hint=Hint.RETAIN, outcome=outcome, reason=reason)
        for outcome, reason in (
            (HintOutcome.REFUSED, "why"),
            (HintOutcome.CLIPPED, "share"),
            (HintOutcome.ACCEPTED, ""),
        )
    )

    def told(*answers: tuple[HintAnswer, ...]) -> object:
        return hint_answers(
            {at: Count(1, Usage(prompt_len=1, output_len=1, hints=each)) for at, each in enumerate(answers)}
        )

    assert told((accepted,), (refused,), (), (clipped,)) == {"kv_hints": {"retain_s": "refused", "reason": "why"}}
    assert told((accepted,), (clipped,)) == {"kv_hints": {"retain_s": "clipped", "reason": "share"}}
    assert told(()) == hint_answers({0: Count()}) == {}


def test_what_is_made_ready_may_be_kept_in_part() -> None:
    """The reason is that of the hint that was not taken whole."""
    ready = HintAnswer(hint=Hint.PREFETCH, outcome=HintOutcome.ACCEPTED)
    kept = HintAnswer(hint=Hint.RETAIN, outcome=HintOutcome.CLIPPED, reason="share")
    told = hint_answers({0: Count(1, Usage(prompt_len=1, output_len=1, hints=(kept, ready)))})
    assert told == {"kv_hints": {"retain_s": "clipped", "prefetch": "accepted", "reason": "share"}}
