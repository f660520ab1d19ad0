"""The reference attention backend, in torch operations, for CPU and CUDA alike.

Guarantee: for one batch and the same KV bytes, results have equal bits whether splits are shared or not. Every query
row meets every split in a tile of one fixed shape, partial results (out, log-sum-exp) are float32 and are merged in
root-to-leaf order. See tiles.py for the partition.
"""

from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Shared, StepAttention
from deltaserve.compute.attention.paged_attention import PagedAttention, PagesInUse, write_slots
from deltaserve.compute.attention.reference.long_query import LongQuery
from deltaserve.compute.attention.reference.tiled_queries import TiledQueries
from deltaserve.compute.attention.tiles import is_tiled, plan_tiles, tiled_members
from deltaserve.compute.memory.kv_pool import KvArena
from deltaserve.compute.memory.page_table import Table
from deltaserve.compute.memory.workspace import Workspace


class TorchAttention(PagedAttention):
    """PagedAttention in torch operations."""

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        return TorchStep(arena, table, batch, rows_per_head, self._workspace)

    def _num_readers(self, batch: Batch, run: Shared) -> int:
        return len(tiled_members(batch, run))


class TorchStep:
    """A step's attention over one arena, in torch operations."""

    def __init__(self, arena: KvArena, table: Table, batch: Batch, group_size: int, scratch: Workspace) -> None:
        self._arena = arena
        self._slots = write_slots(arena, table, batch)
        window_len = arena.layout.group.retention.window_len
        plan = plan_tiles(batch, table, arena.layout.page_size, group_size, window_len)
        self._tiled = None if plan is None else TiledQueries(arena, plan, group_size, scratch)
        self._long = _long_queries(arena, table, batch, scratch)

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Write the step's keys and values: planes [T, H, D] each."""
        self._arena.scatter_planes(layer, self._slots, planes)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]"""
        if self._tiled is not None and not self._long:
            return self._tiled.attend(layer, q, scale, sinks).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], self._arena.layout.group.value_dim)
        if self._tiled is not None:
            tokens = self._tiled.tokens
            tiled = self._tiled.attend(layer, q.index_select(0, tokens), scale, sinks)
            out.index_copy_(0, tokens, tiled.to(q.dtype))
        for query in self._long:
            query.attend(layer, q, scale, sinks, out)
        return out


def _long_queries(arena: KvArena, table: Table, batch: Batch, scratch: Workspace) -> list[LongQuery]:
    out, token = [], 0
    for query in batch.queries:
        if not is_tiled(query, batch.split_tokens, arena.layout.group.retention.window_len):
            out.append(LongQuery(arena, scratch, table, query, token))
        token += query.q_len
    return out


def open_attention(pages: PagesInUse) -> TorchAttention:
    """The backend, on any device."""
    return TorchAttention(pages.pool, pages.tables, pages.query_heads)
