"""What a request asks of the sampler. Pure data; the arithmetic is in compute/executor/sampler.py."""

import math
from typing import Literal

import msgspec

MAX_LOGPROBS = 20
"""Most alternatives per position that a request may ask for: so many always fit a notification."""
SamplingSource = Literal["model", "openai"]
"""Source of the defaults that requests get: the model's files, or OpenAI's, which change no probability."""
MAX_GRAMMAR_BYTES = 128 * 1024
"""Most bytes of a grammar's text. It travels with its request between workers, in frames of at most 16 MiB."""
NEVER = -1e9
"""Bias of a token that is not to be drawn: its probability becomes 0, and it is the likeliest where all have it."""
MAX_BAD_TOKENS = 4096
"""Most tokens of a request's bad words together."""
_MAX_SEED = (1 << 64) - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's sampling, complete and resolved: the front fills every default.

    Sampling is counter-based: the random bits of output position i are a function of (seed, i) alone, so prefill,
    decode, retraction, retry and replay draw the same token.
    """

    max_tokens: int
    """Output tokens at most, >= 1."""
    seed: int
    """Minted by the front when the client gives none. Unsigned 64 bit."""
    temperature: float = 1.0
    """Divisor of the logits before the softmax; 0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Penalty over prompt and output tokens (Keskar et al. 2019, CTRL); 1 means none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output is not to have: where it ends in all of one but the last, that one is not drawn.
    A function of the output so far, as a grammar is."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output; the model's end-of-sequence ids are included unless the client asked to ignore them."""
    min_tokens: int = 0
    """No stop id may be drawn before this many output tokens."""
    logprobs: int | None = None
    """None: none. n >= 0: the chosen token's log-probability and the n most likely ones."""
    prompt_logprobs: int | None = None
    """Alternatives as in `logprobs`, for every prompt position but the first. Such a request matches nothing on
    prefill."""
    grammar: str | None = None
    """What the output must be, as a text that llguidance compiles. Which tokens may be drawn next is a function of it
    and of the output so far; a stop id may where the grammar ends, and ends the output. None: anything."""

    @property
    def needs_history(self) -> bool:
        """Whether a penalty counts the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether a rule of this server's own, which no grammar has, looks at the tokens drawn so far."""
        return self.needs_history or bool(self.bad_words)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities (natural log) at one position, of the raw model distribution before any sampling rule."""

    logprob: float
    """Log-probability of the token at this position."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely ones, best first."""


def sampling_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """The first field no sampler could obey, in words, or None. For whoever takes params from another process."""
    ranges = (
        ("seed", params.seed, 0, _MAX_SEED),
        ("temperature", params.temperature, 0.0, 2.0),
        ("top_p", params.top_p, 0.0, 1.0),
        ("top_k", 1 if params.top_k is None else params.top_k, 1, 1 << 31),
        ("min_p", params.min_p, 0.0, 1.0),
        ("repetition_penalty", params.repetition_penalty, 0.0, 2.0),
        ("presence_penalty", params.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        ("min_tokens", params.min_tokens, 0, 1 << 31),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs or 0, 0, MAX_LOGPROBS),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # false for NaN too
            return f"{name} is outside {low} .. {high}"
    if params.max_tokens < 1:
        return "max_tokens is below 1"
    if params.top_p == 0.0 or params.repetition_penalty == 0.0:
        return "top_p and repetition_penalty must be above 0"
    bad = [token for word in params.bad_words for token in word]
    ids = (*params.stop_token_ids, *bad, *(token for token, _ in params.logit_bias))
    if any(not 0 <= token < vocab_size for token in ids):
        return "a token of stops, biases or bad words is beyond the vocabulary"
    if len(bad) > MAX_BAD_TOKENS or not all(params.bad_words):
        return f"bad words have no token, or more than {MAX_BAD_TOKENS} together"
    if params.grammar is not None and len(params.grammar.encode()) > MAX_GRAMMAR_BYTES:
        return f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes"
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        return "a bias is not a number"
    return None
