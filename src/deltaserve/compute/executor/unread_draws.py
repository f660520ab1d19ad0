"""Tokens drawn without a look at the device's memory: the next step may take them as its input before anybody has read
them.

They are what `sampler.sample` draws. It repeats over the whole vocabulary what cannot be drawn among the candidates;
here both draws are made, and the device takes one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.executor.candidates import SamplingLimits, draw_among
from deltaserve.compute.executor.row_rules import is_limited
from deltaserve.compute.executor.sampler import (
    WHOLE,
    SampleRow,
    apply_rules,
    look_up,
    point_of,
    scaled,
    takes_largest,
)
from deltaserve.compute.layers.step_ops import unread_peaks
from deltaserve.compute.memory.host_arrays import on_device


class UnreadDraws(NamedTuple):
    """What was drawn for each row, on the device."""

    tokens: Tensor  # [N] int64; where a row is not finite, any token
    is_finite: Tensor  # [N] bool: free of NaN and Inf


def draw_unread(logits: Tensor, rows: Sequence[SampleRow]) -> UnreadDraws:
    """logits [N, V] float32, one line per row, none of which has log-probabilities, bad words or a grammar: those are
    the host's. May overwrite `logits`."""
    vocab = logits.shape[1]
    is_finite, tokens = unread_peaks(logits)
    for index, row in enumerate(rows):
        apply_rules(logits[index], row)
    others = [index for index, row in enumerate(rows) if not takes_largest(row)]
    greedy = [index for index in others if rows[index].is_greedy]
    limited = [index for index in others if not rows[index].is_greedy and is_limited(rows[index].params, vocab)]
    free = sorted(set(others).difference(greedy, limited))
    for lines, draw in ((greedy, _largest), (limited, draw_limited), (free, draw_free)):
        if lines:
            places = on_device(np.array(lines, np.int64), logits.device)
            limits = SamplingLimits.of([(rows[i].params, point_of(rows[i])) for i in lines], vocab, logits.device)
            tokens = tokens.index_copy(0, places, draw(logits.index_select(0, places), limits))
    return UnreadDraws(tokens.clamp(0, vocab - 1), is_finite)


def _largest(logits: Tensor, limits: SamplingLimits) -> Tensor:
    return logits.argmax(-1)


def draw_limited(logits: Tensor, limits: SamplingLimits) -> Tensor:
    """[n, V] -> [n], by top-k, top-p and min-p"""
    found, is_complete = draw_among(logits, limits)
    return torch.where(is_complete, found, _draw_sorted(logits, limits))


def draw_free(logits: Tensor, limits: SamplingLimits) -> Tensor:
    """[n, V] -> [n], from the whole vocabulary"""
    return look_up(scaled(logits, limits.temperature).softmax(-1), limits.points)


def _draw_sorted(logits: Tensor, limits: SamplingLimits) -> Tensor:
    """[n, V] -> [n], over the whole vocabulary in order. Sums are whole numbers, so they are those of the sampler."""
    last = logits.shape[1] - 1
    cold = scaled(logits, limits.temperature)
    ordered = cold.sort(-1, descending=True).values
    floor = ordered.gather(1, (limits.top_k - 1).clamp(max=last))  # ties with the k-th stay
    probs = cold.masked_fill_(cold < floor, float("-inf")).softmax(-1)
    ordered = probs.sort(-1, descending=True).values
    sums = ordered.to(torch.float64).mul_(WHOLE).round_().cumsum(-1)
    reached = torch.searchsorted(sums, limits.top_p * WHOLE).clamp(max=last)
    edge = torch.where(limits.top_p < 1.0, ordered.gather(1, reached), 0.0)  # ties with the nucleus's last stay
    probs = probs.masked_fill(probs < edge, 0.0)
    return look_up(probs.masked_fill(probs < limits.min_p * ordered[:, :1], 0.0), limits.points)
