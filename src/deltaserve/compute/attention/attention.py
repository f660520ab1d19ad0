"""The seam between the decoder and whatever computes attention over pages."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Query:
    """One row of a batch computes positions [q_start, q_start + q_len)."""

    line: int
    """Line of the page tables."""
    q_start: int
    q_len: int

    @property
    def q_end(self) -> int:
        return self.q_start + self.q_len


@dataclass(frozen=True, slots=True)
class Shared:
    """Positions [start, end) are the same pages for these queries; multiples of `split_tokens`."""

    start: int
    end: int
    queries: tuple[int, ...]
    """Queries that share: indexes into `Batch.queries`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """How attention reads the KV of one step: see sched/plan.WorkList, whose rules these are."""

    queries: tuple[Query, ...]
    split_tokens: int
    shared: tuple[Shared, ...] = ()
    undecided: tuple[int, ...] = ()
    """Indexes of queries whose last tokens may prove to be none of theirs."""

    @property
    def num_tokens(self) -> int:
        return sum(query.q_len for query in self.queries)

    @property
    def tokens_read(self) -> int:
        """KV positions needed, summed over queries (one layer that sees everything)."""
        return sum(query.q_end for query in self.queries)

    def positions(self) -> npt.NDArray[np.int64]:
        """[T] of its tokens, query after query"""
        lens = np.array([query.q_len for query in self.queries])
        starts = np.array([query.q_start for query in self.queries])
        return np.repeat(starts + lens - lens.cumsum(), lens) + np.arange(lens.sum())


class StepAttention(Protocol):
    """Attention of one step over one page group. Tokens of all queries stand one after the other, in batch order."""

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Store K and V, or the latent [T, H, D], of the step's tokens in their pages.

        `layer` counts within the page group.
        """
        ...

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] after `write_kv` of the layer -> [T, Hq, Dv], contiguous, q's dtype.

        In a group with a window of w, position p sees the keys [p - w + 1, p]. `sinks` [Hq] float32: scores of a key
        that every position sees, and that has no value.
        """
        ...
