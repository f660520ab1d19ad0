"""Which slots a step's queries read and write."""

import numpy as np
from torch import Tensor

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.memory.state_arena import StateArena


class TorchStates:
    """StepStates of a batch that the host knows, in one arena."""

    def __init__(self, arena: StateArena, table: Table, batch: Batch, page_size: int) -> None:
        self._arena = arena
        self.queries, self.undecided = batch.queries, batch.undecided
        lines = np.array([query.line for query in batch.queries], np.int64)
        starts = np.array([query.q_start for query in batch.queries], np.int64)
        ends = np.array([query.q_end for query in batch.queries], np.int64)
        is_single = not batch.undecided and bool((ends - starts == 1).all())
        self.single_tokens = len(lines) if is_single else None
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
        """Load states, but never what lies in the slot of a query that begins at 0: it may be anything, NaN too."""
        found = self._arena.load(layer, self._sources if some is None else self._sources[some])
        if self._is_first is None:
            return found
        is_first = self._is_first if some is None else self._is_first[some]
        return tuple(values.masked_fill_(is_first[:, None, None, None], 0) for values in found)

    def store(self, layer: int, *values: Tensor, some: Tensor | None = None) -> None:
        """Write each block [B, heads, rows, width]."""
        self._arena.store(layer, self._targets if some is None else self._targets[some], values)


def step_states(pool: KvPool, tables: PageTable, batch: Batch) -> list[TorchStates]:
    """The step's states, one per state group of the pool."""
    cache, arenas = pool.cache, pool.state_arenas
    lines = [tables.table(cache.pool_of(arena.layout.group)) for arena in arenas]
    return [TorchStates(arena, table, batch, cache.page_size) for arena, table in zip(arenas, lines, strict=True)]
