"""The reference attention backend, in torch operations, for CPU and CUDA alike.

Guarantee: for one batch and the same KV bytes, results have equal bits whether splits are shared or not. Every query
row meets every split in a tile of one fixed shape, partial results (out, log-sum-exp) are float32 and are merged in
root-to-leaf order. See tiles.py for the partition.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from deltaserve.device.attention import Batch, StepAttention
from deltaserve.device.blocks import Block, make_blocks
from deltaserve.device.kv_pool import KvArena, KvPool
from deltaserve.device.long_query import LongQuery
from deltaserve.device.page_table import PageTable, Table
from deltaserve.device.precision import may_round, rounded_products
from deltaserve.device.tiles import TilePlan, is_tiled, plan_tiles, tiled_members
from deltaserve.device.workspace import Workspace

_K, _V = 0, 1


class TorchAttention:
    """AttentionBackend over a KvPool. Queries have `num_heads` heads on this rank."""

    def __init__(self, pool: KvPool, tables: PageTable, num_heads: int) -> None:
        self._pool = pool
        self._tables = tables
        self._num_heads = num_heads
        self._workspace = Workspace(pool.arenas[0].bytes.device)

    def begin_step(self, batch: Batch) -> Sequence[StepAttention]:
        steps = []
        for arena in self._pool.arenas:
            table = self._tables.table(self._pool.cache.pool_of(arena.layout.group))
            steps.append(TorchStep(arena, table, batch, self._num_heads // arena.layout.num_heads, self._workspace))
        return steps

    def shared_tokens_read(self, batch: Batch) -> int:
        saved = 0
        for run in batch.shared:
            readers = len(tiled_members(batch, run))
            saved += max(0, readers - 1) * (run.end - run.start)
        return saved


class TorchStep:
    """StepAttention over one arena."""

    def __init__(self, arena: KvArena, table: Table, batch: Batch, group_size: int, scratch: Workspace) -> None:
        self._arena = arena
        self._slots = _write_slots(arena, table, batch)
        plan = plan_tiles(batch, table, arena.layout.page_size, group_size)
        self._tiled = None if plan is None else _TiledQueries(arena, plan, group_size, scratch)
        self._long = _long_queries(arena, table, batch, scratch)

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v [T, H, D]"""
        dim = k.shape[-1]
        self._arena.scatter(layer, _K, self._slots, k.reshape(-1, dim))
        self._arena.scatter(layer, _V, self._slots, v.reshape(-1, dim))

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]"""
        if self._tiled is not None and not self._long:
            return self._tiled.attend(layer, q, scale).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._tiled is not None:
            tokens = self._tiled.tokens
            out.index_copy_(0, tokens, self._tiled.attend(layer, q.index_select(0, tokens), scale).to(q.dtype))
        for query in self._long:
            query.attend(layer, q, scale, out)
        return out


class _TiledQueries:
    """All short queries of a step."""

    def __init__(self, arena: KvArena, plan: TilePlan, group_size: int, scratch: Workspace) -> None:
        self._arena = arena
        self._scratch = scratch
        self._blocks = make_blocks(plan, arena, group_size)
        device, dim = arena.bytes.device, arena.layout.group.head_dim
        self.tokens = torch.from_numpy(plan.tokens).to(device)  # [Tt]
        self._num_parts = plan.max_splits + 1
        num_rows = plan.padding * arena.layout.num_heads
        parts = num_rows * self._num_parts + 1
        # The last row of queries stays zero. Parts a query does not have keep weight e^-inf = 0 and value 0.
        self._queries = self._take("queries", num_rows + 1, dim).zero_()  # [Rq + 1, D]
        self._outs = self._take("outs", parts, dim).zero_()  # [Rq * M + 1, D]
        self._lses = self._take("lses", parts).fill_(float("-inf"))  # [Rq * M + 1] natural log

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [Tt, Hq, D] -> [Tt, Hq, D] float32"""
        dim = q.shape[-1]
        torch.mul(q, scale, out=self._queries[:-1].view(q.shape))
        rounds = may_round(q.dtype, self._blocks[0].width, dim)  # splits stand first and have one width
        with rounded_products() if rounds else nullcontext():
            for block in self._blocks:
                self._run(block, layer)
        if self._num_parts == 1:
            return self._outs[:-1].view(q.shape).clone()
        weights = self._lses[:-1].view(-1, 1, self._num_parts).softmax(-1)  # [Rq, 1, M]
        return torch.bmm(weights, self._outs[:-1].view(-1, self._num_parts, dim)).view(q.shape)

    def _run(self, block: Block, layer: int) -> None:
        k, v = self._gather(layer, _K, block), self._gather(layer, _V, block)  # [items * H, width, D]
        heads, dim = self._arena.layout.num_heads, k.shape[-1]
        if block.stale is not None:  # 0 * NaN is NaN: hidden keys must not only weigh nothing
            v.view(-1, dim).index_fill_(0, block.stale, 0.0)
        for tile in block.tiles:
            batch = tile.num_items * heads
            q = self._take("tile", len(tile.queries), dim)
            q = torch.index_select(self._queries, 0, tile.queries, out=q).view(batch, -1, dim)  # [batch, R, D]
            scores = self._take("scores", batch, q.shape[1], block.width)
            _multiply_keys(q, k[:batch], scores)
            if block.hidden is not None:
                scores.view(tile.num_items, heads, -1, block.width).masked_fill_(block.hidden, float("-inf"))
            weights = torch.softmax(scores, -1, out=self._take("weights", *scores.shape))
            out = torch.bmm(weights, v[:batch], out=self._take("out", *q.shape))
            self._outs.index_copy_(0, tile.targets, out.view(-1, dim))
            if self._num_parts > 1:
                # The largest weight is e^(top - lse).
                lse = scores.amax(-1) - weights.amax(-1).log()
                self._lses.index_copy_(0, tile.targets, lse.view(-1))

    def _gather(self, layer: int, plane: int, block: Block) -> Tensor:
        """[items * H, width, D] float32"""
        layout = self._arena.layout
        dim = layout.group.head_dim
        out = self._take(f"plane{plane}", len(block.kv_rows), layout.page_size * dim)
        self._arena.gather(layer, plane, block.kv_rows, out, self._scratch)
        return out.view(-1, block.width, dim)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._scratch.take(name, shape, torch.float32)


def _multiply_keys(q: Tensor, k: Tensor, out: Tensor) -> None:
    """q [b, R, D], k [b, width, D] -> out [b, R, width]"""
    if k.shape[1] == 1:  # bmm changes its kernel with the batch size here, and so the bits
        torch.sum(q * k, -1, keepdim=True, out=out)
    else:
        torch.bmm(q, k.transpose(1, 2), out=out)


def _long_queries(arena: KvArena, table: Table, batch: Batch, scratch: Workspace) -> list[LongQuery]:
    out, token = [], 0
    for query in batch.queries:
        if not is_tiled(query):
            out.append(LongQuery(arena, scratch, table, query, token))
        token += query.q_len
    return out


def _write_slots(arena: KvArena, table: Table, batch: Batch) -> Tensor:
    """[T * H] int64: where each token of the step is stored, see KvArena.scatter."""
    page_size = arena.layout.page_size
    positions = np.concatenate([np.arange(query.q_start, query.q_end) for query in batch.queries])
    lines = np.repeat([query.line for query in batch.queries], [query.q_len for query in batch.queries])
    pages = table[lines, positions // page_size].astype(np.int64)[:, None]  # [T, 1]
    heads = np.arange(arena.layout.num_heads)  # [H]
    rows = pages * arena.rows_per_page + heads * arena.rows_per_head
    slots = rows * page_size + (positions % page_size)[:, None]
    return torch.from_numpy(slots.reshape(-1)).to(arena.bytes.device)
