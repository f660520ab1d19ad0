"""Failures, deadlines, overload, health, metrics: what a request gets when the engine or the server is not well."""

import asyncio
import json
import logging

import httpx
import pytest

from deltaserve.control.front.client import Limits
from deltaserve.core.errors import DeadlineTooShort, FailReason, RequestFailed
from deltaserve.core.ids import Role
from deltaserve.server.api_errors import FAIL_STATUS
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, Served, events, served
from tests.server.corpus import chat, completion, generate
from tests.server.oracle import LIMITS, OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
JSON = {"content-type": "application/json"}


async def _post(case: Served, headers: dict[str, str] | None = None, /, **fields: object) -> httpx.Response:
    return await case.client.post("/v1/completions", content=completion(fields), headers=headers or JSON)


def _code(text: str | bytes) -> str:
    return str(json.loads(text)["error"]["code"])


# --- engine failures


@pytest.mark.parametrize("reason", FailReason)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_reason_has_its_status(codec: TextCodec, reason: FailReason, stream: bool) -> None:
    engine = OracleEngine(failure=RequestFailed(reason, "prefill-0 at 10.0.0.7 said no"))
    async with served(codec, engine, SETTINGS) as case:
        reply = await _post(case, stream=stream, n=2)
    assert (reply.status_code, _code(reply.text)) == FAIL_STATUS[reason]
    assert ("retry-after" in reply.headers) == (reply.status_code in (429, 503))
    is_futile = reason in (FailReason.DEADLINE, FailReason.NUMERICAL)
    assert reply.headers.get("x-should-retry") == ("false" if is_futile else None), "libraries send other 5xx again"
    assert "10.0.0.7" not in reply.text, "worker addresses stay inside"


async def test_a_deadline_shorter_than_the_queue_is_named(codec: TextCodec) -> None:
    engine = OracleEngine(failure=DeadlineTooShort(deadline_s=1.0, wait_s=3.25))
    async with served(codec, engine, SETTINGS) as case:
        reply = await _post(case)
    assert (reply.status_code, _code(reply.text)) == (429, "overloaded")
    assert "deadline is 1 s" in reply.text and "estimated wait for its turn 3.2 s" in reply.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_a_failure_inside_a_stream_is_its_last_event(codec: TextCodec, path: str) -> None:
    make = {"/v1/completions": completion, "/v1/chat/completions": chat, "/generate": generate}[path]
    engine = OracleEngine(failure=RequestFailed(FailReason.TRANSFER_FAILED, "gone"), fail_after=3)
    async with served(codec, engine, SETTINGS) as case:
        reply = await case.client.post(path, content=make({"stream": True}), headers=JSON)
    assert reply.status_code == 200
    *good, last = reply.text.removesuffix("\n\n").split("\n\n")
    assert (len(good), last) == (4, "data: [DONE]")
    assert _code(good[-1].removeprefix("data: ")) == "transfer_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_is_500_for_its_request_alone_however_often_it_is_met(codec: TextCodec, stream: bool) -> None:
    engine = OracleEngine(failure=ZeroDivisionError("secret detail"))
    async with served(codec, engine, SETTINGS) as case:
        for _ in range(8):
            assert (await case.client.get("/readyz")).status_code == 200
            reply = await _post(case, stream=stream)
            assert (reply.status_code, _code(reply.text)) == (500, "internal_error")
            assert "secret" not in reply.text
        assert b'deltaserve_request_errors_total{code="internal_error"} 8.0' in case.front.metrics.text()
        engine.failure = None
        assert (await _post(case)).status_code == 200, "nobody else is refused for it"


async def test_a_bug_in_a_handler_is_500_with_the_request_id(codec: TextCodec) -> None:
    class Broken(OracleEngine):
        def limits(self) -> Limits | None:
            raise ZeroDivisionError

    async with served(codec, Broken(), SETTINGS) as case:
        reply = await _post(case)
        assert b'deltaserve_request_errors_total{code="internal_error"} 1.0' in case.front.metrics.text()
    assert (reply.status_code, _code(reply.text)) == (500, "internal_error")
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_forgets_the_deadline_does_not_hold_the_client(codec: TextCodec, stream: bool) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, SETTINGS) as case:
        reply = await _post(case, JSON | {"x-deadline-seconds": "0.01"}, stream=stream)
    assert (reply.status_code, _code(reply.text)) == (504, "deadline_exceeded")
    assert engine.opened[0].deadline_s == 0.01
    assert len(engine.cancelled) == 1


async def test_the_deadline_is_clamped(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        await _post(case)
        await _post(case, JSON | {"x-deadline-seconds": "1e9"})
    assert [generation.deadline_s for generation in engine.opened] == [600.0, 3600.0]


# --- readiness and limits


async def test_not_ready_is_503_before_anything_is_read(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(not_ready="no decode worker"), SETTINGS) as case:
        reply = await case.client.post("/v1/completions", content=b"{", headers=JSON)
        assert (reply.status_code, _code(reply.text)) == (503, "not_ready")
        assert "no decode worker" in reply.json()["error"]["message"]
        assert (await case.client.get("/readyz")).json() == {
            "status": "not_ready",
            "reasons": {"engine": "no decode worker"},
        }
        health = await case.client.get("/health")
        assert health.status_code == 503
        assert 1 <= int(health.headers["retry-after"]) <= 5
        assert (await case.client.get("/livez")).status_code == 200


async def test_a_front_that_waits_for_a_worker_is_not_ready_and_takes_requests(codec: TextCodec) -> None:
    engine = OracleEngine(not_ready="decode-0: starting or unreachable", takes_anyway=True)
    async with served(codec, engine, SETTINGS) as case:
        assert (await _post(case)).status_code == 200
        assert (await case.client.get("/readyz")).status_code == 503
        assert (await case.client.get("/health_generate")).status_code == 503


async def test_without_limits_there_is_nobody_to_ask(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(limits_now=None), SETTINGS) as case:
        assert (await _post(case)).status_code == 503
        assert (await case.client.get("/v1/models")).json()["data"][0]["max_model_len"] is None


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "status"),
    [
        (399, 1, 200),
        (400, 1, 200),
        (401, 1, 400),
        (400, 112, 200),
        (400, 113, 400),
        (399, 113, 200),
        (1, 511, 200),
        (1, 512, 400),
        (2, 511, 400),
    ],
)
async def test_the_edges_of_context_and_pool(codec: TextCodec, prompt_len: int, max_tokens: int, status: int) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await _post(case, prompt=[97] * prompt_len, max_tokens=max_tokens)
        assert reply.status_code == status
        if status == 400:
            error = reply.json()["error"]
            assert error["code"] == "context_length_exceeded"
            for number in (prompt_len, max_tokens, 512, 400):
                assert str(number) in error["message"]


async def test_the_decode_pool_bounds_prompt_and_output(codec: TextCodec) -> None:
    limits = Limits(max_context_len=512, max_prompt_len=400, vocab_size=272, max_total_len=100)
    engine = OracleEngine(limits_now=limits)
    async with served(codec, engine, SETTINGS) as case:
        assert (await _post(case, prompt=[97] * 50, max_tokens=51)).status_code == 400
        assert (await _post(case, prompt=[97] * 50, max_tokens=50)).status_code == 200
        reply = await case.client.post("/v1/chat/completions", content=chat({"max_tokens": None}), headers=JSON)
        assert reply.status_code == 200
    sampling = engine.opened[-1].sampling
    assert sampling.max_tokens == 100 - len(engine.opened[-1].prompt) // 4, "the default takes what is left"


# --- drain, information, metrics


async def test_drain_by_call(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        for _ in range(2):
            assert (await case.client.post("/admin/drain")).json() == {"draining": True, "drained": True}
        assert (await _post(case)).status_code == 503
        info = (await case.client.get("/server_info")).json()
        assert (info["draining"], info["drained"]) == (True, True)
        assert info["engine"]["rooms"] == 7


async def test_flush_cache_tells_what_may_go(codec: TextCodec) -> None:
    engine = OracleEngine(evictable={"decode-0": 7, "prefill-0": 0})
    async with served(codec, engine, SETTINGS) as case:
        reply = await case.client.post("/flush_cache")
        assert reply.status_code == 202
        assert reply.json() == {"flushing": True, "evictable_pages": {"decode-0": 7, "prefill-0": 0}}
        assert (await case.client.get("/flush_cache")).status_code == 405
        refused = await case.client.post("/flush_cache", headers={"origin": "http://evil.example"})
        assert (refused.status_code, engine.num_flushes) == (403, 1)
        engine.evictable.clear()
        reply = await case.client.post("/flush_cache")
        assert (reply.status_code, _code(reply.text)) == (503, "not_ready")


async def test_a_workers_role_is_changed_by_call(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:

        async def ask(**body: object) -> tuple[int, str]:
            reply = await case.client.post("/admin/role", json=body)
            return reply.status_code, reply.text

        assert (await ask(worker="decode-0", role="decode"))[0] == 200
        status, text = await ask(worker="decode-1", role="prefill", grace_s=5)
        assert (status, json.loads(text)) == (202, {"worker": "decode-1", "role": "prefill", "changing": True})
        assert engine.asked_roles == [("decode-1", Role.PREFILL, 5.0)]
        for code, body in (
            (409, {"worker": "decode-0", "role": "prefill"}),
            (404, {"worker": "nobody", "role": "prefill"}),
            (400, {"worker": "decode-0", "role": "unified"}),
            (400, {"worker": "decode-0", "role": "prefill", "grace_s": -1}),
            (400, {"worker": "decode-0"}),
            (400, {"worker": 0, "role": "prefill"}),
        ):
            status, text = await ask(**body)
            assert (status, "error" in json.loads(text)) == (code, True), body
        refused = await case.client.post("/admin/role", headers={"origin": "http://evil.example"})
        assert (refused.status_code, len(engine.asked_roles)) == (403, 1)


async def test_workers_join_and_leave_by_call(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:

        async def ask(verb: str, **body: object) -> tuple[int, dict[str, object]]:
            reply = await case.client.post(f"/admin/workers/{verb}", json=body)
            return reply.status_code, reply.json()

        joined = {"worker": "prefill-10.0.0.1:8998", "role": "prefill", "url": "tcp://10.0.0.1:8998"}
        assert await ask("join", worker="prefill@10.0.0.1:8998") == (202, joined)
        assert (await ask("join", worker="big=decode@gpu-7:1"))[1]["worker"] == "big"
        assert engine.joined == [
            ("prefill-10.0.0.1:8998", Role.PREFILL, "tcp://10.0.0.1:8998"),
            ("big", Role.DECODE, "tcp://gpu-7:1"),
        ]
        assert await ask("leave", worker="decode-1", grace_s=2) == (202, {"worker": "decode-1", "leaving": True})
        by_entry = await ask("leave", worker="decode-0=decode@10.0.0.1:8998")
        assert by_entry == (202, {"worker": "decode-0", "leaving": True})
        assert engine.left == [("decode-1", 2.0), ("decode-0", SETTINGS.grace_s)]
        for code, verb, body in (
            (409, "join", {"worker": "decode-0=prefill@10.0.0.1:8998"}),
            (409, "join", {"worker": "decode-1=decode@10.0.0.1:8998"}),
            (400, "join", {"worker": "10.0.0.1:8998"}),
            (400, "join", {"worker": "prefill@10.0.0.1:0"}),
            (400, "join", {"worker": "front@10.0.0.1:8998"}),
            (400, "join", {"worker": "prefill@10.0.0.1:8998,decode@10.0.0.1:8999"}),
            (400, "join", {}),
            (404, "leave", {"worker": "nobody"}),
            (400, "leave", {"worker": "decode-0", "grace_s": -1}),
            (400, "leave", {"worker": ["decode-0"]}),
        ):
            status, answer = await ask(verb, **body)
            assert (status, "error" in answer) == (code, True), body
        assert (len(engine.joined), len(engine.left)) == (2, 2)


async def test_who_sends_the_last_worker_away_is_warned(codec: TextCodec) -> None:
    """The oracle is told what its last worker's leave leaves behind; where nothing was served before, nobody warns."""
    engine = OracleEngine(missing_after_leave="no decode worker is ready (decode-1: leaving)")
    async with served(codec, engine, SETTINGS) as case:
        first, again = [
            (await case.client.post("/admin/workers/leave", json={"worker": "decode-1"})).json() for _ in range(2)
        ]
    assert first["warning"] == "nothing can be served without it: no decode worker is ready (decode-1: leaving)"
    assert again == {"worker": "decode-1", "leaving": True}


async def test_the_one_model_need_not_be_named(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert (reply.status_code, reply.json()["model"]) == (200, MODEL)
        reply = await case.client.post("/v1/completions", json={"model": "gpt-4", "prompt": "hello"})
        assert f"this server has {MODEL!r}" in reply.json()["error"]["message"]


async def test_models_and_tokenizer_endpoints(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        models = (await case.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, LIMITS.max_context_len)]
        assert (await case.client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        info = (await case.client.get("/model_info")).json()
        assert (info["vocab_size"], info["eos_token_ids"], info["has_chat_template"]) == (272, [258], True)
        assert info["sampling_defaults"]["temperature"] == 1.0
        reply = await case.client.post("/tokenize", json={"prompt": "h\u00e9<|im_end|>", "return_token_strs": True})
        assert reply.json()["tokens"] == [104, 195, 169, 258]
        assert reply.json()["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
        assert reply.json()["count"] == 4
        reply = await case.client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        assert reply.json()["tokens"][0] == 257
        for skip, text in ((False, "h\u00e9<|im_end|>"), (True, "h\u00e9")):
            body = {"tokens": [104, 195, 169, 258], "skip_special_tokens": skip}
            assert (await case.client.post("/detokenize", json=body)).json() == {"prompt": text}


async def test_metrics_count_what_was_served(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        await _post(case, n=2)
        await _post(case, max_tokens=0)
        events((await _post(case, stream=True)).text)
        await case.client.get("/nothing")
        reply = await case.client.get("/metrics")
    text = reply.text
    assert reply.headers["content-type"].startswith("text/plain")
    for line in (
        'deltaserve_http_responses_total{path="/v1/completions",status="200"} 2.0',
        'deltaserve_http_responses_total{path="/v1/completions",status="400"} 1.0',
        'deltaserve_http_responses_total{path="other",status="404"} 1.0',
        "deltaserve_time_to_first_token_seconds_count 3.0",
        "deltaserve_inter_token_latency_seconds_count 12.0",
        "deltaserve_e2e_request_latency_seconds_count 2.0",
        "deltaserve_prompt_tokens_total 15.0",
        "deltaserve_generation_tokens_total 15.0",
        'deltaserve_cached_tokens_total{side="decode"} 9.0',
        'deltaserve_cached_tokens_total{side="prefill"} 6.0',
        "deltaserve_num_requests_running 0.0",
        "deltaserve_num_requests_waiting 0.0",
    ):
        assert line in text, line


async def test_unknown_fields_are_counted_and_warned_about_once(
    codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        for _ in range(3):
            assert (await _post(case, frobnicate=1, temprature=0.5)).status_code == 200
        assert b'deltaserve_ignored_fields_total{where="body"} 6.0' in case.front.metrics.text()
    assert [record.getMessage() for record in caplog.records if "is unknown" in record.getMessage()] == [
        "request field 'frobnicate' is unknown and ignored",
        "request field 'temprature' is unknown and ignored; did the client mean 'temperature'?",
    ]


@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
async def test_a_schema_that_allows_any_json_is_still_a_schema(codec: TextCodec, name: str) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        assert (await _post(case, **{name: {}})).status_code == 200
        assert (await _post(case, **{name: None})).status_code == 200
    with_schema, without = [room.sampling.grammar for room in engine.opened]
    assert with_schema is not None
    assert without is None


async def test_a_request_leaves_one_line_without_its_text(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    engine = OracleEngine()
    with caplog.at_level(logging.INFO, "deltaserve.server.requests"):
        async with served(codec, engine, SETTINGS) as case:
            reply = await _post(case, JSON | {"x-request-id": "mine-1"}, prompt="my secret")
            await _post(case, JSON | {"x-request-id": 'mine"2'})
            job_id = reply.json()["id"]
            remembered = (await case.client.get(f"/admin/requests/{job_id}")).json()
    line, other = [json.loads(r.getMessage()) for r in caplog.records if r.name == "deltaserve.server.requests"]
    assert line == remembered
    assert line["request_id"] == reply.headers["x-request-id"] == "mine-1"
    assert other["request_id"].startswith("req-"), "a name that could break a log line is not written"
    assert (line["id"], line["outcome"]) == (job_id, "ok")
    assert line["samples"][0]["room"] == engine.opened[0].room.hex()
    assert line["samples"][0]["prefill_s"] == 0.25
    assert "secret" not in caplog.text


async def test_hints_and_neutral_values_of_unsupported_fields_are_accepted(codec: TextCodec) -> None:
    neutral: dict[str, object] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": None,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "user": "someone",
        "prompt_cache_key": "k",
        "suffix": None,
        "best_of": None,
    }
    async with served(codec, OracleEngine(), SETTINGS) as case:
        assert (await _post(case, **neutral)).status_code == 200
        assert b"deltaserve_ignored_fields_total{" not in case.front.metrics.text()
