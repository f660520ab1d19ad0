"""Rules by which a row draws, in numbers that a device can hold beside it."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltaserve.compute.executor.randomness import stream_of
from deltaserve.core.sampling import SamplingParams

NUM_RULES = 11
"""Columns of 64 bits: stream of random numbers, tokens of the prompt, top-k, way of drawing, number of biases; as
float64 temperature, top-p, min-p, penalties of repetition, frequency and presence."""
MOST_BIASES = 512
"""Tokens of a row with a bias or a ban until later; no recorded step draws for a row that has more."""
BIAS_WIDTH = 3
"""Columns of a bias in 64 bits: token, as float64 what is added, position from which the token may be drawn."""
LARGEST_BIAS = 1e20
"""The device draws for no row with a larger one: whatever is added to a logit, a banned one is less."""
LARGEST_LOGIT = float(np.finfo(np.float32).max)
BANNED_LOGIT = -1e30
"""Logit of a token that may not be drawn: finite, also over the coldest temperature, and its probability is 0."""
_COLDEST = 1e-5
"""Below this temperature a draw is the most likely token, and float32 could not divide by much smaller ones."""


class WayToDraw(IntEnum):
    """Each includes those before it."""

    LARGEST = 0
    FREE = 1
    """From the whole vocabulary."""
    LIMITED = 2
    """By top-k, top-p or min-p."""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "WayToDraw | None":
        """None: what it draws depends on more than the logits, these rules and how often it had which token."""
        if params.logprobs is not None or params.bad_words or params.grammar is not None:
            return None
        if not _has_room(params, vocab_size):
            return None
        if is_cold(params):
            return cls.LARGEST
        return cls.LIMITED if is_limited(params, vocab_size) else cls.FREE


class DrawKind(NamedTuple):
    """What a step computes to draw."""

    way: WayToDraw
    """At least the widest that one of its rows needs."""
    is_adjusted: bool = False
    """Whether rules of some row change its logits first."""

    @classmethod
    def of(cls, way: WayToDraw, is_adjusted: bool) -> "DrawKind":
        """The kind of a step whose rows need these. One kind is recorded of all that are adjusted: the kernels of a
        wider way have nothing to do where no row needs it."""
        return cls(WayToDraw.LIMITED if is_adjusted else way, is_adjusted)


def packed_rules(params: SamplingParams, prompt_len: int, way: WayToDraw, vocab_size: int) -> npt.NDArray[np.int64]:
    """[NUM_RULES] of one row."""
    stream = stream_of(params.seed)
    top_k, num_biases = min(params.top_k or vocab_size, vocab_size), len(_biased(params) | _banned(params))
    whole = [stream - (1 << 64 if stream >> 63 else 0), prompt_len, top_k, way, num_biases]
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    floats = np.array([params.temperature if way else 1.0, params.top_p, params.min_p, *penalties], np.float64)
    return np.concatenate((np.array(whole, np.int64), floats.view(np.int64)))


def packed_biases(params: SamplingParams, prompt_len: int) -> npt.NDArray[np.int64]:
    """[number of biases, BIAS_WIDTH] of one row, no token twice. Stop tokens may be drawn from the least length on."""
    added, banned = dict(params.logit_bias), _banned(params)
    tokens = sorted(added.keys() | banned)
    packed = np.zeros((len(tokens), BIAS_WIDTH), np.int64)
    packed[:, 0] = tokens
    packed[:, 1] = np.array([added.get(token, 0.0) for token in tokens], np.float64).view(np.int64)
    packed[:, 2] = [prompt_len + params.min_tokens if token in banned else 0 for token in tokens]
    return packed


def is_adjusted(params: SamplingParams) -> bool:
    """Whether rules that stand on the device change its logits."""
    return params.needs_history or bool(params.logit_bias or _banned(params))


def idle_rules() -> npt.NDArray[np.int64]:
    """[NUM_RULES] of a line that no row has, which some draw is made for nevertheless."""
    return packed_rules(SamplingParams(max_tokens=1, seed=0, temperature=0.0), 0, WayToDraw.LARGEST, 1)


def _has_room(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the device can keep what is added to its logits. A token that is named twice gets two rounded sums, and
    where all are banned there is none to draw: both are left to the host."""
    biased, banned = _biased(params), _banned(params)
    if len(biased) < len(params.logit_bias) or any(abs(bias) > LARGEST_BIAS for _, bias in params.logit_bias):
        return False
    return len(banned) < vocab_size and len(biased | banned) <= MOST_BIASES


def _biased(params: SamplingParams) -> set[int]:
    return {token for token, _ in params.logit_bias}


def _banned(params: SamplingParams) -> set[int]:
    """Tokens that it may not draw before its least length."""
    return set(params.stop_token_ids) if params.min_tokens else set()


def is_cold(params: SamplingParams) -> bool:
    """Whether it draws the most likely token."""
    return params.temperature < _COLDEST


def is_limited(params: SamplingParams, vocab_size: int) -> bool:
    """Whether it draws from less than the whole vocabulary."""
    return params.top_p < 1.0 or params.min_p > 0.0 or (params.top_k is not None and params.top_k < vocab_size)
