"""Chats with servers of every kind: what they understand, what they tell, how they fail."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from deltaserve.commands.client.chat_stream import ChatAnswer, ServedModel, TwoSides, chat, find_model
from deltaserve.commands.client.completion_stream import ServerError
from tests.commands.bench.answering_server import serving
from tests.patience import PATIENCE_S

TIMING = {"prefill_cached_tokens": 3, "decode_cached_tokens": 2, "transferred_bytes": 10, "transferred_state_bytes": 1}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


class Talker:
    """Streams the given events to every chat, and remembers what was asked."""

    def __init__(self, events: list[object], models: Response | None = None, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._events = events
        self._models = models or JSONResponse({"data": [{"id": "m", "owned_by": "somebody"}]})
        self._status = status

    def app(self) -> Starlette:
        app = Starlette()
        app.add_route("/v1/models", self._list)
        app.add_route("/v1/chat/completions", self._chat, methods=["POST"])
        return app

    async def _list(self, request: Request) -> Response:
        return self._models

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self._status != 200:
            return JSONResponse({"error": {"message": "too long"}}, status_code=self._status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        for event in self._events:
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


def ask(url: str, name: str | None = None) -> tuple[ServedModel, ChatAnswer, list[tuple[str, bool]]]:
    answer, heard = ChatAnswer(), list[tuple[str, bool]]()

    async def converse() -> ServedModel:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
            model = await find_model(http, name)
            body = model.body([{"role": "user", "content": "hi"}], {"temperature": 0.5})
            await chat(http, body, answer, lambda text, is_thought: heard.append((text, is_thought)))
            return model

    return asyncio.run(converse()), answer, heard


def piece(text: str | None, **delta: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text, **delta}, "finish_reason": None}]}


@pytest.mark.parametrize(("owner", "is_ours"), [("deltaserve", True), ("vllm", False)])
def test_timings_are_asked_of_servers_of_ours_alone(owner: str, is_ours: bool) -> None:
    usage = {**USAGE, "timings": [TIMING]} if is_ours else USAGE
    events = [piece(""), piece("a"), piece("b"), {"choices": [], "usage": usage}, "[DONE]"]
    talker = Talker(events, JSONResponse({"data": [{"id": "m", "owned_by": owner}]}))
    with serving(talker) as url:
        model, answer, heard = ask(url)
    assert model == ServedModel("m", is_ours)
    assert talker.bodies[0].get("timings") == (True if is_ours else None)
    assert talker.bodies[0]["temperature"] == 0.5
    assert heard == [("a", False), ("b", False)]
    assert (answer.text, answer.prompt_len, answer.output_len, answer.cached_len) == ("ab", 5, 2, 3)
    assert answer.two_sides == (TwoSides(3, 2, 11) if is_ours else None)
    assert answer.first_token_s is not None
    assert answer.wall_s >= answer.first_token_s


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_heard_and_not_said(field: str) -> None:
    events = [piece(None, **{field: "hm"}), piece("a"), {"choices": None, "usage": None}, "[DONE]"]
    with serving(Talker(events)) as url:
        _, answer, heard = ask(url)
    assert heard == [("hm", True), ("a", False)]
    assert (answer.text, answer.usage) == ("a", None)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_event_ends_where_its_line_does(end: str) -> None:
    """Not at what ends a line of text only: JSON may hold that as it is."""
    said = "a\x85b\u2028c\u2029d\x0be"
    events = [json.dumps(piece(said), ensure_ascii=False), piece("f"), "[DONE]"]
    wire = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}{end}{end}" for event in events)

    class Bytewise(Talker):
        async def _stream(self) -> AsyncIterator[Any]:
            for byte in wire.encode():
                yield bytes([byte])

    with serving(Bytewise([])) as url:
        _, answer, heard = ask(url)
    assert heard == [(said, False), ("f", False)]
    assert answer.text == said + "f"


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (JSONResponse({"data": []}), "names no model; name it with --model"),
        (JSONResponse([1]), "names no model; name it with --model"),
        (PlainTextResponse("welcome"), "names no model; name it with --model"),
        (PlainTextResponse("no", 404), "is unknown there (HTTP 404); give the URL of an OpenAI-compatible server"),
        (PlainTextResponse("no", 401), "HTTP 401; the server wants a key: --api-key-file"),
        (PlainTextResponse("no", 403), "is refused (HTTP 403); give another URL"),
        (PlainTextResponse("no", 429), "is not answered now (HTTP 429); try again"),
        (PlainTextResponse("no", 503), "is not answered now (HTTP 503); try again"),
    ],
    ids=["none", "a list", "no JSON", "not there", "no key", "refused", "too many", "starting"],
)
def test_a_server_that_lists_no_model_is_told_one(models: Response, why: str) -> None:
    with serving(Talker([piece("a"), "[DONE]"], models)) as url:
        with pytest.raises(ServerError, match=re.escape(why)):
            ask(url)
        assert ask(url, "mine")[0] == ServedModel("mine", is_ours=False)


@pytest.mark.parametrize(
    ("talker", "message"),
    [
        (Talker([], status=400), "HTTP 400: too long"),
        (Talker([piece("a"), {"error": {"message": "the worker died"}}]), "the worker died"),
        (Talker([piece("a"), "{"]), "not JSON"),
    ],
    ids=["refused", "broken off", "no JSON"],
)
def test_failures_are_told_in_the_servers_words(talker: Talker, message: str) -> None:
    with serving(talker) as url, pytest.raises(ServerError, match=message):
        ask(url)


def test_a_body_holds_what_is_asked_for() -> None:
    messages: list[Mapping[str, str]] = [{"role": "user", "content": "hi"}]
    body = ServedModel("m", is_ours=False).body(messages, {"seed": 3})
    assert body == {
        "model": "m",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }
