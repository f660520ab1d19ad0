"""What the clients of other servers send: load generators, evaluation harnesses, routers, agents."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deltaserve import __version__
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.wire.messages import CacheUse
from deltaserve.server.settings import HttpLimits, ServerSettings
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID
from tests.server.conftest import MODEL, Served, events, live, served, until
from tests.server.corpus import CHAT, COMPLETIONS, GENERATE, completion
from tests.server.oracle import OracleEngine, logprob_of
from tests.server.raw_corpus import parse, post

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
HI = [{"role": "user", "content": "hi"}]


async def _post(case: Served, path: str = COMPLETIONS, /, **fields: object) -> Mapping[str, object]:
    base: Mapping[str, dict[str, object]] = {
        COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": 5},
        CHAT: {"model": MODEL, "messages": HI, "max_tokens": 5},
        GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 5}},
    }
    reply = await case.client.post(path, json=base[path] | fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert isinstance(body, dict)
    return body


async def _choice(case: Served, path: str = COMPLETIONS, /, **fields: object) -> dict[str, object]:
    choices = (await _post(case, path, **fields))["choices"]
    assert isinstance(choices, list)
    (choice,) = choices
    assert isinstance(choice, dict)
    return choice


# --- counts


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_counts_in_every_event(codec: TextCodec, path: str) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HI}
        body = {"model": MODEL, "max_tokens": 3, "n": 2, "stream": True, "stream_options": options} | fields
        parts = events((await case.client.post(path, json=body)).text)
        body["stream_options"] = {"continuous_usage_stats": True}
        without = events((await case.client.post(path, json=body)).text)
    counts = [part["usage"]["completion_tokens"] for part in parts]  # type: ignore[index]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 6)
    assert parts[-1]["choices"] == []
    assert all(part["usage"]["prompt_tokens"] == parts[-1]["usage"]["prompt_tokens"] for part in parts)  # type: ignore[index]
    assert not any("usage" in part for part in without), "it refines include_usage, and asks for nothing alone"


async def test_where_the_cached_tokens_were(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        details = {"device": 12, "host": 0, "storage": 0, "decode": 12, "prefill": 8}
        body = await _post(case, prompt="x" * 16, n=2, return_cached_tokens_details=True)
        assert body["sglext"] == {"cached_tokens_details": details}
        assert "sglext" not in await _post(case)
        meta = (await _post(case, GENERATE, text="x" * 16))["meta_info"]
        assert isinstance(meta, dict)
        assert meta["cached_tokens_details"] == details


_NO_TEXT = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}], ids=["bare", "with usage"])
@pytest.mark.parametrize(
    ("path", "prompt", "choices"),
    [(COMPLETIONS, {"prompt": "x" * 16}, [_NO_TEXT]), (CHAT, {"messages": HI}, [])],
    ids=["completions", "chat"],
)
async def test_where_the_cached_tokens_were_in_a_stream(
    codec: TextCodec, path: str, prompt: Mapping[str, object], choices: list[object], usage: Mapping[str, object]
) -> None:
    """sglang.bench_serving reads the first choice of every event of a completion, but not of a chat."""
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = {"model": MODEL, "max_tokens": 2, "stream": True, "return_cached_tokens_details": True, **prompt}
        parts = events((await case.client.post(path, json={**body, **usage})).text)
        whole = await _post(case, path, **prompt, return_cached_tokens_details=True)
    (told,) = (part for part in parts if "sglext" in part)
    assert (told["choices"], told["sglext"]) == (choices, whole["sglext"])
    assert parts.index(told) == len(parts) - (2 if usage else 1)
    assert "usage" in parts[-1] or not usage, "the counts are a chunk of their own, the last"


# --- fields


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_fields_that_change_no_answer_are_accepted(codec: TextCodec, path: str) -> None:
    habits: dict[str, object] = {
        "metadata": {"trace": "1"},
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "reasoning_effort": "high",
        "priority": 3,
        "separate_reasoning": True,
        "stream_reasoning": False,
        "spaces_between_special_tokens": False,
        "request_id": "r-1",
        "rid": "r-2",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "parallel_tool_calls": True,
    }
    async with served(codec, OracleEngine(), SETTINGS) as case:
        await _post(case, path, **habits)
        assert b"deltaserve_ignored_fields_total{" not in case.front.metrics.text()


async def test_no_top_logprobs_may_be_said_without_logprobs(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        assert (await _choice(case, CHAT, top_logprobs=0))["logprobs"] is None


async def test_best_of_as_many_as_are_returned(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        await _choice(case, best_of=1)
        assert len((await _post(case, n=3, best_of=3))["choices"]) == 3  # type: ignore[arg-type]


async def test_many_samples_and_stops(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        assert len((await _post(case, n=128))["choices"]) == 128  # type: ignore[arg-type]
        stops = [f"no{number}" for number in range(31)]
        assert (await _choice(case, stop=[*stops, "e"]))["text"] == "oll"


async def test_one_request_has_a_bounded_number_of_samples(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(COMPLETIONS, json={"prompt": ["a"] * 9, "n": 128})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_top_p_0_leaves_the_likeliest_token(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        await _post(case, top_p=0, top_k=40)
    assert (engine.opened[0].sampling.top_p, engine.opened[0].sampling.top_k) == (1.0, 1)


async def test_no_stop_trim(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = await _post(case, GENERATE, sampling_params={"stop": "l", "no_stop_trim": True})
        assert body["text"] == "ol"


async def test_the_models_path_is_a_name_of_it(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL, model_path="models/tiny")) as case:
        for name in ("models/tiny", os.path.abspath("models/tiny")):
            assert (await _post(case, model=name))["model"] == MODEL
        assert (await case.client.post(COMPLETIONS, json={"model": "tiny/", "prompt": "a"})).status_code == 404


async def test_an_empty_assistant_turn(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        turns = [*HI, {"role": "assistant", "content": None}, *HI]
        assert (await _choice(case, CHAT, messages=turns))["finish_reason"] == "length"


async def test_reasoning_effort_reaches_the_template(model_folder: Path) -> None:
    template = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}", [], {})
    codec = TextCodec(Tokenizer.from_file(str(model_folder / "tokenizer.json")), 272, [EOS_ID], template)
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        await _post(case, CHAT, reasoning_effort="low")
        await _post(case, CHAT, reasoning_effort="none")
        await _post(case, CHAT, chat_template_kwargs={"reasoning_effort": "its own word"})
    prompts = [bytes(generation.prompt[::4]) for generation in engine.opened]
    assert prompts == [b"low  ", b"none False False", b"its own word  "]


async def test_chat_without_a_limit_gets_what_the_context_leaves_or_the_operators_default(codec: TextCodec) -> None:
    engine = OracleEngine(answer=lambda generation: [EOS_ID])
    for default, most in ((None, 512), (7, 7), (4096, 512)):
        async with served(codec, engine, ServerSettings(MODEL, default_max_tokens=default)) as case:
            await _post(case, CHAT, max_tokens=None)
        generation = engine.opened[-1]
        assert generation.sampling.max_tokens == min(most, 512 - len(generation.prompt) // 4)


# --- prompts that are scored


async def test_no_output_tokens_only_scores_of_the_prompt(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        choice = await _choice(case, prompt="abc", max_tokens=0, echo=True, logprobs=0)
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, logprob_of(98), logprob_of(99)]  # type: ignore[index]
        body = await _post(case, prompt="abc", max_tokens=0, echo=True)
        assert body["usage"]["completion_tokens"] == 0  # type: ignore[index]
        stream = {"prompt": "abc", "max_tokens": 0, "echo": True, "stream": True}
        parts = events((await case.client.post(COMPLETIONS, json=stream)).text)
        assert [part["choices"][0]["text"] for part in parts] == ["abc"]  # type: ignore[index]
        body = await _post(case, GENERATE, sampling_params={"max_new_tokens": 0})
        assert (body["text"], body["output_ids"]) == ("", [])


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_scores_the_prompt_from_a_position_on(codec: TextCodec, stream: bool) -> None:
    fields = {"text": "abcd", "return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    fields |= {"stream": stream, "logprob_start_len": 1, "sampling_params": {"max_new_tokens": 1}}
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(GENERATE, json=fields)
    body = events(reply.text)[-1] if stream else reply.json()
    meta = body["meta_info"]
    assert isinstance(meta, dict)
    scored = [[logprob_of(99), 99, "c"], [logprob_of(100), 100, "d"]]
    assert meta["input_token_logprobs"] == [[None, 98, "b"], *scored]
    assert meta["input_top_logprobs"] == [None, *([triple] for triple in scored)]
    assert meta["output_token_logprobs"] == [scored[1]]


async def test_generate_answers_under_the_clients_id(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        meta = (await _post(case, GENERATE, rid="mine"))["meta_info"]
        assert isinstance(meta, dict)
        assert meta["id"] == "mine"
        assert (await case.client.get("/admin/requests/mine")).status_code == 200


async def test_top_logprobs_hold_the_token_that_was_drawn(codec: TextCodec) -> None:
    class Unlikely(OracleEngine):
        """Draws a token that is not among the likeliest."""

        async def _deltas(self, generation: object) -> object:  # type: ignore[override]
            async for delta in super()._deltas(generation):  # type: ignore[arg-type]
                values = tuple(type(v)(v.logprob, tuple((t + 1, p) for t, p in v.top)) for v in delta.logprobs)
                yield type(delta)(delta.tokens, values, delta.prompt_logprobs, delta.finish, delta.usage)

    async with served(codec, Unlikely(), SETTINGS) as case:
        choice = await _choice(case, prompt="a", max_tokens=1, logprobs=2)
        logprobs = choice["logprobs"]
        assert isinstance(logprobs, dict)
        assert logprobs["top_logprobs"] == [{"b": logprob_of(97), "c": logprob_of(97) - 1, "a": logprob_of(97)}]
        choice = await _choice(case, prompt="a", max_tokens=1, logprobs=0, echo=True)
        assert choice["logprobs"]["top_logprobs"] == [None, {"a": logprob_of(97)}]  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"kv_transfer_params": None, "routed_dp_rank": None, "bootstrap_host": None}),
        (CHAT, {"kv_transfer_params": None}),
        (GENERATE, {"bootstrap_room": None, "sampling_params": {"max_new_tokens": 5, "kv_params": None}}),
        (CHAT, {"user": {"id": "7", "name": "A B", "email": "a@b.example", "role": "user"}}),
        (CHAT, {"messages": [{"role": "user", "name": "Ada King", "content": "hi"}]}),
    ],
)
async def test_what_asks_for_nothing_is_taken(codec: TextCodec, path: str, fields: dict[str, object]) -> None:
    """Proxies write out what they forward; chat pages send records."""
    async with served(codec, OracleEngine(), SETTINGS) as case:
        await _post(case, path, **fields)
        assert not case.front.unknown_fields._warned - {"messages[].name"}, (
            "nor is it counted as a name that nobody knows"
        )


@pytest.mark.parametrize("name", [" a", "a ", "a\tb", "a\u2028b", "a" * 129, "a<b", ""])
async def test_a_name_that_could_be_taken_for_markup_is_none(codec: TextCodec, name: str) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = {"messages": [{"role": "user", "name": name, "content": "hi"}], "max_tokens": 1}
        reply = await case.client.post(CHAT, json=body)
        assert reply.status_code == (200 if name == "" else 400), "an empty one is none"


# --- routes


async def test_the_routes_of_other_servers(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL, model_path="models/tiny")) as case:
        get = case.client.get
        assert (await get("/v1/models/")).json() == (await get("/v1/models")).json()
        info = (await get("/get_model_info")).json()
        assert (await get("/model_info")).json() == info
        path = os.path.abspath("models/tiny")  # whoever reads it may be in another folder
        assert (info["model_path"], info["tokenizer_path"], info["served_model_name"]) == (path, path, MODEL)
        assert (await get("/version")).json() == {"version": __version__}
        assert (await get("/get_server_info")).json() == (await get("/server_info")).json()
        assert (await get("/ping")).status_code == 200
        facts = {"model": MODEL, "served_model_name": MODEL, "model_path": path}
        assert (await get("/server_info")).json().items() >= facts.items()
        for path in ("/flush_cache", "/reset_prefix_cache"):
            assert (await case.client.post(path)).status_code == 202


async def test_all_names_are_accepted_and_the_first_is_answered(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings("a", other_names=("b", "org/c"))) as case:
        listed = (await case.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["a", "b", "org/c"]
        for name in ("a", "b", "org/c"):
            assert (await case.client.get(f"/v1/models/{name}")).json()["id"] == name
            reply = await case.client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
            assert (reply.status_code, reply.json()["model"]) == (200, "a")
        assert (await case.client.get("/v1/models/d")).status_code == 404
        wrong = await case.client.post("/v1/completions", json={"model": "d", "prompt": "a"})
        assert "this server has 'a' and 'b' and 'org/c'" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "value", "told"),
    [
        (None, "", "there is no Content-Type header: send `Content-Type: application/json`"),
        ("content-type", "application/x-www-form-urlencoded", "'application/x-www-form-urlencoded': send"),
        ("content-type", "application/json; charset=latin-1", "'application/json; charset=latin-1': send"),
        ("content-encoding", "gzip", "the Content-Encoding header is 'gzip': send the body as it is"),
    ],
)
async def test_a_body_of_another_kind_names_the_header(
    codec: TextCodec, header: str | None, value: str, told: str
) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        content = b'{"prompt": "a", "max_tokens": 1}'
        headers = {"content-type": "application/json"} if header != "content-type" else {}
        request = case.client.build_request("POST", "/v1/completions", content=content, headers=headers)
        if header is None:
            request.headers.pop("content-type", None)
        else:
            request.headers[header] = value
        reply = await case.client.send(request)
        assert reply.status_code == 415
        assert told in reply.json()["error"]["message"]


async def test_loads_tell_what_runs_and_waits(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    async with served(codec, engine, SETTINGS) as case:
        running = asyncio.create_task(_post(case, n=2))
        await until(lambda: engine.num_held == 2)
        engine.free_tokens = 0
        waiting = asyncio.create_task(_post(case))
        await until(lambda: engine.num_held == 3)
        loads = (await case.client.get("/v1/loads")).json()["loads"]
        assert loads == [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_total_reqs": 3}]
        text = case.front.metrics.text()
        assert b"deltaserve_num_requests_running 2.0" in text
        assert b"deltaserve_num_requests_waiting 1.0" in text
        engine.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(running, waiting)


async def test_health_generate_generates(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        assert (await case.client.get("/health_generate")).status_code == 200
        assert (engine.opened[0].sampling.max_tokens, engine.opened[0].cache) == (1, CacheUse.BYPASS)
        engine.failure = RequestFailed(FailReason.PEER_LOST, "gone")
        assert (await case.client.get("/health_generate")).status_code == 502
        engine.not_ready = "no worker"
        assert (await case.client.get("/health_generate")).status_code == 503


# --- connections and the queue


async def test_requests_that_run_do_not_take_places_of_those_that_wait(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=1)
    async with served(codec, engine, ServerSettings(MODEL, max_queue=2)) as case:
        running = []
        for number in range(1, 6):
            running.append(asyncio.create_task(_post(case, stream=False)))
            await until(lambda count=number: engine.num_held == count)  # type: ignore[misc]
        assert case.front.admission.num_waiting == 0
        assert case.front.admission.num_requests == 5
        engine.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(*running)


async def test_connections_of_one_address_are_unlimited_unless_asked(codec: TextCodec) -> None:
    assert HttpLimits().max_connections_per_address is None
    settings = ServerSettings(MODEL, port=0, http=HttpLimits(max_connections_per_address=1))
    async with live(codec, OracleEngine(), settings) as server:
        held = [await server.connect() for _ in range(3)]  # loopback addresses are never limited
        status, _, body = parse(await server.talk(post(completion({}), "Connection: close")))
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "olleh")
        for _, writer in held:
            writer.close()
