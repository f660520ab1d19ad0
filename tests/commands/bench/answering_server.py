"""A small OpenAI-compatible server over real sockets, which answers recall questions by reading the facts."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deltaserve.commands.load.recall import FIRST_NAME

LENIENT_FIELDS = {"ignore_eos", "return_token_ids"}


@dataclass(frozen=True, slots=True)
class Manners:
    """What a server understands and how it misbehaves."""

    takes_ids: bool = True
    takes_lenient_fields: bool = True
    fail_at: int | None = None
    """The number of the request, counted from 0, whose stream ends in an error after its first token."""
    fail_from: int | None = None
    """As `fail_at`, and all after it."""
    tokens_per_event: int = 1
    flush_status: int = 200
    models_status: int = 200
    tells_timings: bool = False
    """As deltaserve does: every other prompt was computed by prefill, and half of each was in a cache."""
    tells_metrics: bool = False
    """As deltaserve does: of each prompt by prefill 500 bytes were granted, and 30 of each answer came back."""


@dataclass(slots=True)
class AnsweringServer:
    """Names are one token each; as text they are written `<id>`, other tokens as their character."""

    manners: Manners
    bodies: list[dict[str, Any]] = field(default_factory=list)
    flushes: int = 0
    authorizations: set[str] = field(default_factory=set)
    client_ports: set[int] = field(default_factory=set)
    """Client ports of connections that completions came by."""
    in_flight: int = 0
    most_in_flight: int = 0

    def app(self) -> Starlette:
        app = Starlette()
        app.add_route("/v1/models", self._models)
        app.add_route("/v1/completions", self._completions, methods=["POST"])
        app.add_route("/metrics", self._metrics)
        app.add_route("/flush_cache", self._flush, methods=["POST"])
        return app

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "oracle"}]}, status_code=self.manners.models_status)

    async def _metrics(self, request: Request) -> Response:
        if not self.manners.tells_metrics:
            return Response(status_code=404)
        granted, back = 500 * ((len(self.bodies) + 1) // 2), 30 * len(self.bodies)
        lines = [
            f'deltaserve_transfer_bytes_planned_total{{instance="decode-0",role="decode"}} {granted}',
            'deltaserve_transfer_bytes_planned_total{instance="prefill-0",role="prefill"} 0.0',
            f'deltaserve_write_back_bytes_total{{instance="prefill-0",role="prefill"}} {back - 30}',
            'deltaserve_write_back_bytes_total{instance="prefill-1",role="prefill"} 30.0',
        ]
        return Response("\n".join(lines) + "\n")

    async def _flush(self, request: Request) -> Response:
        self.flushes += 1
        return JSONResponse({}, status_code=self.manners.flush_status)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.authorizations.add(request.headers.get("authorization", ""))
        self.client_ports |= {request.client.port} if request.client else set()
        refused = not self.manners.takes_lenient_fields and LENIENT_FIELDS & set(body)
        if refused or (not self.manners.takes_ids and not isinstance(body["prompt"], str)):
            return JSONResponse({"error": {"message": "not understood"}}, status_code=400)
        self.bodies.append(body)
        return StreamingResponse(self._stream(body, len(self.bodies) - 1), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], number: int) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            prompt = body["prompt"] if isinstance(body["prompt"], list) else [ord(c) for c in body["prompt"]]
            tokens = answer(prompt, body["max_tokens"])
            size = self.manners.tokens_per_event
            for at in range(0, len(tokens), size):
                await asyncio.sleep(0)
                choice: dict[str, object] = {"index": 0, "text": "".join(map(chr, tokens[at : at + size]))}
                if body.get("return_token_ids"):
                    choice["token_ids"] = tokens[at : at + size]
                yield event({"choices": [choice]})
                if number == self.manners.fail_at or number >= (self.manners.fail_from or number + 1):
                    yield event({"error": {"message": "the worker died", "code": 502}})
                    return
            usage: dict[str, object] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
            if self.manners.tells_timings:
                usage = {**usage, "timings": [_timings(len(prompt), by_prefill=number % 2 == 0)]}
            if "kv_hints" in body:
                usage = {**usage, "kv_hints": dict.fromkeys(body["kv_hints"], "accepted")}
            yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1


def _timings(prompt_len: int, *, by_prefill: bool) -> dict[str, int | str]:
    found = prompt_len // 2
    return {
        "decode_cached_tokens": 0 if by_prefill else found,
        "prefill_cached_tokens": found if by_prefill else 0,
        "transferred_bytes": 1000 if by_prefill else 0,
        "prefill_pulled_tokens": found if by_prefill else 0,
        "computed_on": "prefill" if by_prefill else "decode",
        "local_wait_tokens": 40,
        "prefill_wait_tokens": 100,
        "pull_wait_tokens": 80 if by_prefill else 0,
    }


def event(body: dict[str, object]) -> str:
    return f": a comment, as some servers send\n\ndata: {json.dumps(body)}\n\n"


def answer(prompt: list[int], length: int) -> list[int]:
    """The chain after the last name, by the facts of the document before the first question; `x` without one."""
    document = prompt[: prompt.index(ord("?"))] if ord("?") in prompt else []
    names = [token for token in document if token >= FIRST_NAME]
    facts, name, tokens = dict(zip(names[::2], names[1::2], strict=True)), prompt[-1], []
    for _ in range(length):
        name = facts.get(name, ord("x"))
        tokens.append(name)
    return tokens


class CharacterTokenizer:
    """One token per character: the ids of names are code points too."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))


class HasApp(Protocol):
    """What can be served."""

    def app(self) -> Starlette: ...


@contextmanager
def serving(server: HasApp) -> Iterator[str]:
    """The base URL while a uvicorn thread serves it on a free port."""
    config = uvicorn.Config(server.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    listener = config.bind_socket()
    listener.listen()  # who connects before the thread serves waits for it
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join()
        listener.close()
