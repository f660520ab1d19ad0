"""One streamed chat answer of an OpenAI-compatible server, and what that server tells of its costs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deltaserve.commands.client.completion_stream import (
    ServerError,
    cached_len,
    error_in,
    events,
    listed_models,
    refusal,
)

OURS = "deltaserve"
"""`owned_by` of a model that a deltaserve server names."""
_THOUGHTS = ("reasoning_content", "reasoning")
"""Names that servers give to the part of an answer that is not said."""


@dataclass(frozen=True, slots=True)
class TwoSides:
    """What both sides did for one answer, from the `timings` of a deltaserve server: tokens, and bytes of pages and
    recurrent states."""

    cached_on_prefill: int
    cached_on_decode: int
    bytes_moved: int


@dataclass(slots=True)
class ChatAnswer:
    """An answer as it arrives. Times in seconds from when the request was sent, as the client saw them."""

    text: str = ""
    usage: Mapping[str, Any] | None = None
    first_token_s: float | None = None
    wall_s: float = 0.0
    finish_reason: str | None = None

    @property
    def prompt_len(self) -> int | None:
        return _count(self.usage, "prompt_tokens")

    @property
    def output_len(self) -> int | None:
        return _count(self.usage, "completion_tokens")

    @property
    def cached_len(self) -> int | None:
        """Prompt tokens found in a cache, as any server tells it."""
        return cached_len(self.usage)

    @property
    def two_sides(self) -> TwoSides | None:
        """What both sides did; None where the server is not ours."""
        timings = (self.usage or {}).get("timings")
        if not timings:
            return None
        return TwoSides(
            cached_on_prefill=sum(timing["prefill_cached_tokens"] for timing in timings),
            cached_on_decode=sum(timing["decode_cached_tokens"] for timing in timings),
            bytes_moved=sum(timing["transferred_bytes"] + timing["transferred_state_bytes"] for timing in timings),
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first one; None where there are not two."""
        if self.first_token_s is None or self.output_len is None or self.output_len < 2:
            return None
        return (self.output_len - 1) / max(1e-9, self.wall_s - self.first_token_s)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model a server answers with."""

    name: str
    is_ours: bool
    """Whether it is a deltaserve server, which tells `timings` to who asks; another one might refuse the field."""

    def body(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, object]) -> dict[str, object]:
        """The JSON body of a streamed /v1/chat/completions request."""
        asked: dict[str, object] = {"model": self.name, "messages": list(messages), "stream": True}
        asked |= {"stream_options": {"include_usage": True}, **fields}
        return asked | ({"timings": True} if self.is_ours else {})


async def find_model(http: httpx.AsyncClient, name: str | None) -> ServedModel:
    """The model of this name, else the first one that the server lists. Raises ServerError, httpx.HTTPError."""
    try:
        first, *_ = await listed_models(http)
    except ServerError:
        if name is None:
            raise
        return ServedModel(name, is_ours=False)
    return ServedModel(name or str(first["id"]), is_ours=first.get("owned_by") == OURS)


async def chat(
    http: httpx.AsyncClient, body: Mapping[str, object], answer: ChatAnswer, on_text: Callable[[str, bool], None]
) -> None:
    """POST one request and fill `answer` while it streams; a caller that gives up keeps what has arrived.

    `on_text`: hears each piece, and whether it is a thought, which is no part of the answer. Raises ServerError,
    httpx.HTTPError.
    """
    began_s = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise refusal(response.status_code, (await response.aread()).decode(errors="replace"))
            async for event in events(response.aiter_bytes()):
                for text, is_thought in _pieces(event, answer):
                    if answer.first_token_s is None:
                        answer.first_token_s = time.perf_counter() - began_s
                    on_text(text, is_thought)
    finally:
        answer.wall_s = time.perf_counter() - began_s


def _pieces(event: Mapping[str, Any], answer: ChatAnswer) -> list[tuple[str, bool]]:
    """What one event adds: (text, whether it is a thought). Raises ServerError for an error event."""
    if (said := error_in(event)) is not None:
        raise ServerError(said)
    answer.usage = event.get("usage") or answer.usage
    pieces = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        pieces += [(delta[name], True) for name in _THOUGHTS if delta.get(name)]
        if text := delta.get("content"):
            answer.text += text
            pieces.append((text, False))
    return pieces


def _count(usage: Mapping[str, Any] | None, name: str) -> int | None:
    said = (usage or {}).get(name)
    return said if isinstance(said, int) else None
