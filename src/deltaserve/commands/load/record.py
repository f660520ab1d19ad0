"""What is measured about one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAME_INSTANT_S = 1e-4
"""Chunks closer than this were read from one buffer: the later one had been waiting."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One streamed chunk with output in it."""

    at_s: float
    """Seconds after its request was sent."""
    num_tokens: int
    """Tokens in the chunk, at least 1; 1 where the server does not say."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, from send to the last chunk. Lengths in tokens, times in seconds."""

    conversation: int
    turn: int
    sent_s: float
    """Seconds after the start of the measurement."""
    prompt_len: int
    arrivals: tuple[Arrival, ...]
    e2e_s: float
    """Time from send to the end of the stream."""
    output_len: int
    """Output tokens by the server's usage, else as counted here."""
    cached_len: int | None
    """Prompt tokens served from cache; None if the server does not say."""
    tokens_right: int | None
    """How many of `tokens_expected` came at their place; None if the answer's ids are not known."""
    tokens_expected: int
    """Tokens whose right value is known; 0 where no right answer can be computed."""
    error: str | None
    retokenized_len: int | None = None
    """Tokens that the local tokenizer makes of the answer's text; None without one."""
    usage: Mapping[str, Any] | None = None
    """Usage as the server sent it, timings included where it tells them."""
    branch: int = 0
    """0: the conversation itself; else the number of a fork of it."""
    known_len: int = 0
    """Prompt tokens that earlier requests of the run said or were answered."""

    @property
    def timings(self) -> tuple[Mapping[str, int], ...]:
        """What a deltaserve server tells of each sample; empty where the server tells nothing."""
        return tuple((self.usage or {}).get("timings") or ())

    @property
    def hint_outcomes(self) -> tuple[str, ...]:
        """What a deltaserve server says became of the hints of the request, a word for each."""
        told = (self.usage or {}).get("kv_hints") or {}
        return tuple(str(outcome) for hint, outcome in told.items() if hint != "reason")

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without output."""
        return self.arrivals[0].at_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token, or that came in one piece."""
        if len(self.arrivals) < 2 or self.output_len < 2:
            return None
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / (self.output_len - 1)

    @property
    def num_bunched(self) -> int:
        """Tokens that came together with the one before: the time between the two is not known."""
        together = sum(arrival.num_tokens - 1 for arrival in self.arrivals)
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return together + sum(after.at_s - before.at_s < SAME_INSTANT_S for before, after in pairs)

    def itls_s(self) -> list[float]:
        """Gaps between tokens; the gap before a chunk of k tokens counts k times with a k-th of its length."""
        gaps: list[float] = []
        for before, after in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(after.at_s - before.at_s) / after.num_tokens] * after.num_tokens
        return gaps
