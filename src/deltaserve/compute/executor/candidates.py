"""Top-k, top-p and min-p over the largest logits of each row, all rows at once.

What these rules leave nearly always lies among the 1024 largest logits. `draw_among` says for which rows that is
certain; only the others need their whole vocabulary in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.sampling import SamplingParams

NUM_CANDIDATES = 1024
_GROUP = 16
"""Logits of which the largest stands for all, in the first of two rounds: half the time of one round."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Rules of n rows that draw, each [n, 1] on the device of the logits."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; the size of the vocabulary: no limit
    top_p: Tensor  # float64; 1.0: no limit
    min_p: Tensor  # float32; 0.0: no limit
    points: Tensor  # float64 in [0, 1): where in the cumulative distribution the token is
    needs_mass: bool
    """Whether some row has a top_p of the whole vocabulary's weight."""

    @classmethod
    def of(
        cls, rows: Sequence[tuple[SamplingParams, float]], vocab_size: int, device: torch.device
    ) -> "SamplingLimits":
        """`rows`: parameters and point of each."""

        def column(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
            return on_device(np.array(values, dtype)[:, None], device)

        params = [row for row, _ in rows]
        return cls(
            column([row.temperature for row in params], np.float32),
            column([min(row.top_k or vocab_size, vocab_size) for row in params], np.int64),
            column([row.top_p for row in params], np.float64),
            column([row.min_p for row in params], np.float32),
            column([point for _, point in rows], np.float64),
            any(row.top_p < 1.0 and row.top_k is None for row in params),
        )


def draw_among(logits: Tensor, limits: SamplingLimits) -> tuple[Tensor, Tensor]:
    """logits [n, V] float32 -> token of each row [n] int64, and whether all it could have drawn were candidates [n]."""
    values, ids = _largest(logits, min(NUM_CANDIDATES, logits.shape[1]))  # [n, C], largest first
    values = values.clamp(max=torch.finfo(values.dtype).max)
    highest = values[:, :1]
    scaled = (values - highest) / limits.temperature
    is_all = values.shape[1] == logits.shape[1]

    ranks = (limits.top_k - 1).clamp(max=values.shape[1] - 1)
    floor = scaled.gather(1, ranks)  # ties with the k-th stay
    has_k = limits.top_k < logits.shape[1]
    ends_by_k = has_k & (scaled[:, -1:] < floor)
    weights = scaled.exp().masked_fill(has_k & (scaled < floor), 0.0)  # [n, C], the first is 1

    sums = weights.cumsum(-1, dtype=torch.float64)
    mass = sums[:, -1:]
    if limits.needs_mass and not is_all:
        whole = (logits - highest).div_(limits.temperature).exp_().sum(-1, keepdim=True)
        mass = torch.where(ends_by_k, mass, whole.to(torch.float64))
    goal = limits.top_p * mass
    last = torch.searchsorted(sums, goal).clamp(max=values.shape[1] - 1)
    has_p = limits.top_p < 1.0
    reached = has_p & (sums[:, -1:] >= goal)
    edge = torch.where(reached, weights.gather(1, last), 0.0)  # ties with the last of the nucleus stay
    edge = torch.maximum(edge, limits.min_p)
    complete = ends_by_k | (~has_k & (weights[:, -1:] < edge) & (reached | ~has_p))
    return _look_up(weights.masked_fill(weights < edge, 0.0), ids, limits.points), complete[:, 0] | is_all


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, as `topk` gives them. They lie in the `count` groups with the largest
    heads."""
    rows, vocab = logits.shape
    groups = vocab // _GROUP
    if groups <= count:
        return logits.topk(count, -1)
    body = logits[:, : groups * _GROUP].view(rows, _GROUP, groups)
    heads = body.amax(1).topk(count, -1, sorted=False).indices  # [n, count]
    strides = torch.arange(_GROUP, device=logits.device)[:, None] * groups
    ids = (heads[:, None] + strides).view(rows, -1)
    rest = torch.arange(groups * _GROUP, vocab, device=logits.device).expand(rows, -1)
    ids = torch.cat((ids, rest), -1)
    found = logits.gather(1, ids).topk(count, -1)
    return found.values, ids.gather(1, found.indices)


def _look_up(weights: Tensor, ids: Tensor, points: Tensor) -> Tensor:
    """[n, C] -> [n]: in the order of the vocabulary, the first whose cumulative weight exceeds the point."""
    ids, order = ids.sort(-1)
    cumulative = weights.gather(1, order).cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return ids.gather(1, found.clamp(max=ids.shape[1] - 1))[:, 0]
