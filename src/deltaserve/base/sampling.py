"""What a request asks of the sampler. Pure data; the arithmetic is in runner/sampler.py."""

import msgspec


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
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens (Keskar et al. 2019, CTRL)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output; the model's end-of-sequence ids are included unless the client asked to ignore them."""
    min_tokens: int = 0
    """No stop id may be drawn before this many output tokens."""
    logprobs: int | None = None
    """None: none. n >= 0: the chosen token's log-probability and the n most likely ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for every prompt position but the first. Such a request matches nothing on prefill."""

    @property
    def needs_history(self) -> bool:
        """Whether the next distribution depends on the tokens drawn so far (such rows force overlap depth 0)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities (natural log) at one position, of the raw model distribution before any sampling rule."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely ones, best first."""
