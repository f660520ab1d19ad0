"""One streamed completion against an OpenAI-compatible server, and what such servers understand."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from deltaserve.commands.load.record import Arrival

LENIENT: Mapping[str, object] = {"ignore_eos": True, "return_token_ids": True}
"""Fields outside OpenAI's own: answers of exact length, and their ids beside their text."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ServerError(Exception):
    """The server refused or broke off a request."""


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """How to talk to one server."""

    model: str
    extra: Mapping[str, object]
    """Fields added to every request."""
    tokenizer: Tokenizer | None = None
    """Set: prompts are sent as text made with it."""

    def body(self, prompt: Sequence[int], output_len: int) -> dict[str, object]:
        """The JSON body of a greedy, streamed /v1/completions request."""
        return {
            "model": self.model,
            "prompt": list(prompt) if self.tokenizer is None else self.tokenizer.decode(prompt),
            "max_tokens": output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


@dataclass(slots=True)
class Completion:
    """An answer as it arrives."""

    arrivals: list[Arrival] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Ids of the answer; empty if the server does not send them."""
    usage: Mapping[str, Any] | None = None

    def take(self, event: Mapping[str, Any], at_s: float) -> None:
        """Add one event, received `at_s` seconds after the request was sent. Raises ServerError for an error event."""
        if (said := error_in(event)) is not None:
            raise ServerError(said)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            text, tokens = choice.get("text") or "", choice.get("token_ids") or ()
            if text or tokens:
                self.arrivals.append(Arrival(at_s, max(1, len(tokens))))
            self.text += text
            self.tokens += tokens

    @property
    def output_len(self) -> int:
        """Output tokens: the usage's word, else those counted."""
        said = (self.usage or {}).get("completion_tokens")
        return said if isinstance(said, int) else sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def cached_len(self) -> int | None:
        """Cached prompt tokens as the usage says."""
        return cached_len(self.usage)


def cached_len(usage: Mapping[str, Any] | None) -> int | None:
    """Cached prompt tokens of OpenAI's `usage`; None where it does not say."""
    said = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    return said if isinstance(said, int) else None


def refusal(status: int, content: str) -> ServerError:
    """An error in the server's own words, where they are of OpenAI's form."""
    try:
        body = json.loads(content)
        said = body["error"]["message"] if isinstance(body["error"], dict) else body["error"]
    except (ValueError, KeyError, TypeError):
        said = content
    return ServerError(f"HTTP {status}: {str(said)[:500]}")


def error_in(event: Mapping[str, Any]) -> str | None:
    """What an event of a stream says of an error, in the server's own words; None: it is none."""
    error = event.get("error")
    if not error:
        return None
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


async def complete(http: httpx.AsyncClient, body: Mapping[str, object], completion: Completion) -> None:
    """POST one request and fill `completion` while it streams. Raises ServerError, httpx.HTTPError."""
    began_s = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, (await response.aread()).decode(errors="replace"))
        async for event in events(response.aiter_bytes()):
            completion.take(event, time.perf_counter() - began_s)
    if not completion.arrivals:
        raise ServerError("the stream ended without any output")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`. Raises ServerError for anything else."""
    async for line in _lines(chunks):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise ServerError(f"not JSON in the stream: {data[:200]}") from error
        if not isinstance(event, dict):
            raise ServerError(f"not an object in the stream: {data[:200]}")
        yield event


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Text between the line ends of such a stream. httpx's `aiter_lines` ends lines at U+0085, U+2028 and U+2029 too,
    which may stand in JSON as they are."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


async def listed_models(http: httpx.AsyncClient) -> list[Mapping[str, Any]]:
    """What /v1/models names, at least one. Raises ServerError, httpx.HTTPError."""
    response = await http.get("/v1/models")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerError("GET /v1/models: HTTP 401; the server wants a key: --api-key-file")
    try:
        models = response.json()["data"] if response.status_code == httpx.codes.OK else None
    except (ValueError, KeyError, TypeError):
        models = None
    if not models:
        raise ServerError(_why_no_model(response))
    return list(models)


def _why_no_model(response: httpx.Response) -> str:
    asked, status = f"GET {str(response.url)[:200]}", response.status_code
    if status == httpx.codes.OK:
        return f"{asked} names no model; name it with --model, or give the URL of an OpenAI-compatible server"
    if status == httpx.codes.NOT_FOUND:
        return (
            f"{asked} is unknown there (HTTP 404); give the URL of an OpenAI-compatible server, or name it with --model"
        )
    if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return f"{asked} is not answered now (HTTP {status}); try again, or see what that server says"
    return f"{asked} is refused (HTTP {status}); give another URL, or name the model with --model"


async def negotiate(
    http: httpx.AsyncClient, model: str, prompt: Sequence[int], tokenizer: Tokenizer | None
) -> ServerDialect:
    """Find, with one-token requests, the richest dialect the server accepts: extra fields first, ids before text.

    Raises ServerError with the first refusal if none is accepted.
    """
    strict: Mapping[str, object] = {}
    candidates = [ServerDialect(model, LENIENT), ServerDialect(model, strict)]
    if tokenizer is not None:
        candidates += [ServerDialect(model, LENIENT, tokenizer), ServerDialect(model, strict, tokenizer)]
    refusals = []
    for dialect in candidates:
        try:
            await complete(http, dialect.body(prompt, 1), Completion())
        except ServerError as error:
            refusals.append(error)
        else:
            return dialect
    raise refusals[0]
