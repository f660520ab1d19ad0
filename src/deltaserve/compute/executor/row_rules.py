"""Rules by which a row draws, in numbers that a device can hold beside it."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from deltaserve.compute.executor.randomness import stream_of
from deltaserve.core.sampling import SamplingParams

NUM_RULES = 7
"""Columns of 64 bits: stream of random numbers, tokens of the prompt, top-k, way of drawing; as float64 temperature,
top-p, min-p."""
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
        """None: what it draws depends on more than the logits and these rules."""
        if params.logprobs is not None or params.looks_back or params.logit_bias or params.min_tokens:
            return None
        if params.grammar is not None:
            return None
        if is_cold(params):
            return cls.LARGEST
        return cls.LIMITED if is_limited(params, vocab_size) else cls.FREE


def packed_rules(params: SamplingParams, prompt_len: int, way: WayToDraw, vocab_size: int) -> npt.NDArray[np.int64]:
    """[NUM_RULES] of one row."""
    stream = stream_of(params.seed)
    whole = [stream - (1 << 64 if stream >> 63 else 0), prompt_len, min(params.top_k or vocab_size, vocab_size), way]
    floats = np.array([params.temperature if way else 1.0, params.top_p, params.min_p], np.float64)
    return np.concatenate((np.array(whole, np.int64), floats.view(np.int64)))


def idle_rules() -> npt.NDArray[np.int64]:
    """[NUM_RULES] of a line that no row has, which some draw is made for nevertheless."""
    return packed_rules(SamplingParams(max_tokens=1, seed=0, temperature=0.0), 0, WayToDraw.LARGEST, 1)


def is_cold(params: SamplingParams) -> bool:
    """Whether it draws the most likely token."""
    return params.temperature < _COLDEST


def is_limited(params: SamplingParams, vocab_size: int) -> bool:
    """Whether it draws from less than the whole vocabulary."""
    return params.top_p < 1.0 or params.min_p > 0.0 or (params.top_k is not None and params.top_k < vocab_size)
