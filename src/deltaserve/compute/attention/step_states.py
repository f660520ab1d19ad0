"""Which slots a step's queries read and write."""

import numpy as np
from torch import Tensor

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.memory.state_arena import StateArena


class StepStates:
    """Recurrent states of one step, of one state group: one of each query, in batch order.

    A query [q_start, q_end) goes on from the state after q_start - 1 and leaves the one after q_end - 1. Those may be
    two slots, of which the first is not written: it may be a checkpoint that others go on from, too.
    """

    def __init__(self, arena: StateArena, table: Table, batch: Batch, page_size: int) -> None:
        self._arena = arena
        self.queries = batch.queries
        self.undecided = batch.undecided
        """Queries that end in guesses: see `Batch.undecided`."""
        lines = np.array([query.line for query in batch.queries], np.int64)
        starts = np.array([query.q_start for query in batch.queries], np.int64)
        ends = np.array([query.q_end for query in batch.queries], np.int64)
        self._is_first = self._tensor(starts == 0) if (starts == 0).any() else None
        self._sources = self._slots(table, lines, np.maximum(starts - 1, 0) // page_size)
        self._targets = self._slots(table, lines, (ends - 1) // page_size)

    def _slots(
        self,
        table: Table,
        lines: np.ndarray[tuple[int], np.dtype[np.int64]],
        indexes: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> Tensor:
        return self._tensor(table[lines, indexes].astype(np.int64))

    def _tensor(self, values: np.ndarray[tuple[int], np.dtype[np.int64 | np.bool_]]) -> Tensor:
        return on_device(values, self._arena.bytes.device)

    def load(self, layer: int, some: Tensor | None = None) -> tuple[Tensor, ...]:
        """A copy of each block [B, heads, rows, width], zeros where a query begins at position 0: what lies in its slot
        may be anything, NaN too.

        `layer` counts within the group. `some` [B] int64: of these queries; None: of all.
        """
        found = self._arena.load(layer, self._sources if some is None else self._sources[some])
        if self._is_first is None:
            return found
        is_first = self._is_first if some is None else self._is_first[some]
        return tuple(values.masked_fill_(is_first[:, None, None, None], 0) for values in found)

    def store(self, layer: int, *values: Tensor, some: Tensor | None = None) -> None:
        """Write each block [B, heads, rows, width]."""
        self._arena.store(layer, self._targets if some is None else self._targets[some], values)


def step_states(pool: KvPool, tables: PageTable, batch: Batch) -> list[StepStates]:
    """The step's states, one per state group of the pool."""
    cache, arenas = pool.cache, pool.state_arenas
    lines = [tables.table(cache.pool_of(arena.layout.group)) for arena in arenas]
    return [StepStates(arena, table, batch, cache.page_size) for arena, table in zip(arenas, lines, strict=True)]
