"""Attention backends over a KvPool: one step for each page group, scratch kept between steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, StepAttention, StepStates
from deltaserve.compute.attention.plan import sharers
from deltaserve.compute.attention.step_states import step_states
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.compute.native.native_library import NativeContext


class BackendUnavailable(Exception):
    """Why a backend does not compute, in words for an operator."""


class PagesInUse(NamedTuple):
    """What attention is computed over."""

    pool: KvPool
    tables: PageTable
    query_heads: Sequence[int]
    """Query heads of each page group, on this rank."""
    native: NativeContext | None
    """What the process computes with natively."""

    @property
    def device(self) -> torch.device:
        return self.pool.arenas[0].bytes.device


class AttentionBackend(ABC):
    """Computes attention over the pages of a KvPool. Index tensors are made once per step, not per layer."""

    def __init__(self, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> None:
        """`query_heads`: of each page group, on this rank."""
        self._pool = pool
        self._tables = tables
        self._query_heads = tuple(query_heads)
        self._workspace = Workspace(pool.arenas[0].bytes.device)

    @abstractmethod
    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        """`rows_per_head`: query heads to a KV head."""

    def begin_step(self, batch: Batch) -> Sequence[StepAttention]:
        """One StepAttention per page group, in the order of the CacheSpec. Page tables are read now."""
        return [self.begin_group(batch, group) for group in range(len(self._query_heads))]

    def begin_group(self, batch: Batch, group: int) -> StepAttention:
        """Attention of a step as `begin_step` prepares it, for the page group of this index alone."""
        arena, table, rows_per_head = self._place(group)
        return self._begin(arena, table, batch, rows_per_head)

    def _place(self, group: int) -> tuple[KvArena, Table, int]:
        """Where a page group lies, and its query heads to a KV head."""
        arena, num_heads = self._pool.page_arenas[group], self._query_heads[group]
        table = self._tables.table(self._pool.cache.pool_of(arena.layout.group))
        return arena, table, num_heads // arena.layout.num_heads

    def begin_states(self, batch: Batch) -> Sequence[StepStates]:
        """States of a step, one per state group."""
        return step_states(self._pool, self._tables, batch)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that are kept between steps."""
        return self._workspace.num_bytes

    def free_scratch(self) -> None:
        """A step that failed may have grown it beyond what there is. Steps begun before are over."""
        self._workspace.clear()

    def shared_tokens_read(self, batch: Batch) -> int:
        """Positions among `batch.tokens_read` that this backend does not read again because of sharing."""
        return sum(max(0, len(sharers(batch, run)) - 1) * (run.end - run.start) for run in batch.shared)


def write_slots(arena: KvArena, table: Table, batch: Batch) -> Tensor:
    """[T * H] int64: where each token of the step is stored, see KvArena.scatter."""
    page_size = arena.layout.page_size
    positions = batch.positions()
    lines = np.repeat([query.line for query in batch.queries], [query.q_len for query in batch.queries])
    pages = table[lines, positions // page_size].astype(np.int64)[:, None]  # [T, 1]
    heads = np.arange(arena.layout.num_heads)  # [H]
    rows = pages * arena.rows_per_page + heads * arena.rows_per_head
    slots = rows * page_size + (positions % page_size)[:, None]
    return on_device(slots.reshape(-1), arena.bytes.device)
