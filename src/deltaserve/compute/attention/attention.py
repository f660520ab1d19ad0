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


class StepStates(Protocol):
    """Recurrent states of one step, of one state group: one of each query, in batch order.

    A query [q_start, q_end) goes on from the state after q_start - 1 and leaves the one after q_end - 1. Those may be
    two slots, of which the first is not written: it may be a checkpoint that others go on from, too.
    """

    @property
    def queries(self) -> tuple[Query, ...]:
        """Queries in batch order; () in a fixed step (fixed_step.py), whose rows the device alone knows."""
        ...

    @property
    def single_tokens(self) -> int | None:
        """Number of queries, where each has one token that is no guess; None: `queries` says what they are."""
        ...

    @property
    def undecided(self) -> tuple[int, ...]:
        """Queries that end in guesses: see `Batch.undecided`."""
        ...

    def load(self, layer: int, some: Tensor | None = None) -> tuple[Tensor, ...]:
        """A copy of each block [B, heads, rows, width], zeros where a query begins at position 0.

        `layer` counts within the group. `some` [B] int64: of these queries; None: of all.
        """
        ...

    def store(self, layer: int, *values: Tensor, some: Tensor | None = None) -> None:
        """Write each block [B, heads, rows, width]."""
        ...
