"""The reference attention backend, in torch operations, for CPU and CUDA alike.

A query's positions go in blocks, each over its keys tile by tile with a running softmax in float32, so that memory does
not grow with the context. Blocks and tiles follow from the query alone, and each block has products of its own; blocks
of one shape are computed side by side. So a query's results have equal bits alone, in company, and whether it shares
pages or not.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from deltaserve.compute.attention.attention import Batch, StepAttention
from deltaserve.compute.attention.attention_backend import AttentionBackend, PagesInUse, write_slots
from deltaserve.compute.attention.precision import may_round, rounded_products
from deltaserve.compute.attention.reference.kind import BLOCK_LEN, TILE_BYTES, tile_len
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvArena
from deltaserve.compute.memory.page_table import Table
from deltaserve.compute.memory.workspace import Workspace

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_MANY_POSITIONS = 16
_ALIGNED_DIM = 4
"""Factors are padded to a multiple of so many columns: else the rows of a block begin at addresses that follow from its
company, by which libraries choose kernels (seen with MKL on AMD processors). Models' heads are such multiples."""
_LOWEST = -1e30
"""Largest score of a row that has seen no key yet: finite, so that its difference from a hidden one is no NaN."""


class TorchAttention(AttentionBackend):
    """AttentionBackend in torch operations."""

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        return TorchStep(arena, table, batch, rows_per_head, self._workspace)

    def shared_tokens_read(self, batch: Batch) -> int:
        return 0


class _Block(NamedTuple):
    """Some positions of a query, over some tiles of keys."""

    num_positions: int
    tile_len: int
    line: int
    start: int
    """First position."""
    first_token: int
    """Where its tokens begin in the step."""
    first_tile: int
    num_tiles: int


class TorchStep:
    """A step's attention over one arena, in torch operations."""

    def __init__(self, arena: KvArena, table: Table, batch: Batch, group_size: int, scratch: Workspace) -> None:
        self._arena = arena
        self._slots = write_slots(arena, table, batch)
        self._scratch = scratch
        blocks = sorted(_blocks(batch, arena), key=lambda block: (*block[:2], -block.num_tiles))
        alike = (list(found) for _, found in groupby(blocks, key=lambda block: block[:2]))
        self._blocks = [_EqualBlocks(arena, group_size, found, table) for found in alike]

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Write the step's keys and values: planes [T, H, D] each."""
        self._arena.scatter_planes(layer, self._slots, planes)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]"""
        out = q.new_empty(*q.shape[:-1], self._arena.layout.group.value_dim)
        for blocks in self._blocks:
            with rounded_products() if blocks.may_round(q) else nullcontext():
                found = blocks.attend(layer, q.index_select(0, blocks.tokens), scale, sinks, self._scratch)
            out.index_copy_(0, blocks.tokens, found.to(q.dtype))
        return out


def _blocks(batch: Batch, arena: KvArena) -> Iterator[_Block]:
    layout, token = arena.layout, 0
    window_len, key_bytes = layout.group.retention.window_len, 4 * layout.num_heads * layout.group.head_dim
    for query in batch.queries:
        for start in range(query.q_start, query.q_end, BLOCK_LEN):
            end = min(start + BLOCK_LEN, query.q_end)
            low = 0 if window_len is None else max(0, start - window_len + 1)
            size = max(layout.page_size, tile_len(arena.bytes.device.type, key_bytes, end - start, end - low))
            yield _Block(end - start, size, query.line, start, token, low // size, -(-end // size) - low // size)
            token += end - start


class _Tiles(NamedTuple):
    """One tile of each of the blocks [start, end)."""

    start: int
    end: int
    kv_rows: Tensor  # [b * H * pages] int64, see KvArena.gather
    hidden: Tensor | None  # [b, 1, 1, C, N] bool: key that a position does not see; None: each sees all
    stale: Tensor | None  # int64 into [b * H * N]: keys that nobody sees, and that may hold anything, NaN too


class _EqualBlocks:
    """Blocks of equally many positions C, over tiles of equally many keys N. Every index tensor serves all layers."""

    def __init__(self, arena: KvArena, group_size: int, blocks: Sequence[_Block], table: Table) -> None:
        """`blocks`: those with most tiles first, so that each further tile is one of the first of them."""
        self._arena = arena
        length, self.tile_len = blocks[0][:2]
        self._shape = len(blocks), arena.layout.num_heads, group_size, length
        tokens = np.array([block.first_token for block in blocks])[:, None] + np.arange(length)
        self.tokens = self._tensor(tokens.reshape(-1))  # [n * C]
        row_bytes = 4 * arena.layout.num_heads * self.tile_len
        item_bytes = row_bytes * max(arena.layout.group.head_dim, group_size * length)
        at_once = max(1, TILE_BYTES[arena.bytes.device.type] // item_bytes)
        self._tiles = []
        for number in range(blocks[0].num_tiles):
            count = sum(block.num_tiles > number for block in blocks)
            for start in range(0, count, at_once):
                end = min(start + at_once, count)
                self._tiles.append(_Tiles(start, end, *self._tile(blocks[start:end], number, table)))

    def _tile(self, blocks: Sequence[_Block], number: int, table: Table) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows, hidden and stale keys of the tile of this number of each block."""
        layout, size = self._arena.layout, self.tile_len
        first = np.array([block.first_tile + number for block in blocks])[:, None] * size  # [b, 1]
        start, line = (np.array(values)[:, None] for values in zip(*((b.start, b.line) for b in blocks), strict=True))
        last = start + self._shape[-1] - 1
        in_use = np.minimum(first + np.arange(0, size, layout.page_size), last)  # beyond its end the last page again
        rows = table[line, in_use // layout.page_size].astype(np.int64)[:, None] * self._arena.rows_per_page
        rows = rows + np.arange(layout.num_heads)[:, None] * self._arena.rows_per_head  # [b, H, pages]
        kv_rows = self._tensor(rows.reshape(-1))
        keys = first + np.arange(size)  # [b, N]
        positions = (start + np.arange(self._shape[-1]))[:, :, None]  # [b, C, 1]
        hidden = keys[:, None] > positions
        window_len = layout.group.retention.window_len
        if window_len is not None:
            hidden |= keys[:, None] <= positions - window_len
        if not hidden.any():
            return kv_rows, None, None
        stale = np.flatnonzero(np.repeat(hidden.all(1), layout.num_heads, 0))
        return kv_rows, self._tensor(hidden[:, None, None]), self._tensor(stale) if len(stale) else None

    def may_round(self, q: Tensor) -> bool:
        """Whether factors in the type of `q` may be rounded: it pays where products have many rows."""
        return self._shape[-1] >= _MANY_POSITIONS and may_round(q.dtype, self.tile_len, q.shape[-1])

    def _tensor(self, values: Int64s | Bools) -> Tensor:
        return on_device(values, self._arena.bytes.device)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None, scratch: Workspace) -> Tensor:
        """q [n * C, Hq, D] -> [n * C, Hq, Dv] float32"""
        n, heads, group, length = self._shape
        grouped = q.view(n, length, heads, group, -1).permute(0, 2, 3, 1, 4)
        rows = _padded(grouped.reshape(n * heads, group * length, -1).float().mul_(scale))
        top, total = rows.new_full((2, *self._shape), _LOWEST)
        total.zero_()
        if sinks is not None:  # a key that all see, and that has no value
            top.copy_(sinks.view(1, heads, group, 1))
            total.fill_(1.0)
        top, total = top.view(*rows.shape[:2], 1), total.view(*rows.shape[:2], 1)
        value_dim = self._arena.layout.group.value_dim
        out = rows.new_zeros(*rows.shape[:2], value_dim + _num_missing(value_dim))
        for tiles in self._tiles:
            here = slice(tiles.start * heads, tiles.end * heads)
            self._add(layer, tiles, (rows[here], top[here], total[here], out[here]), scratch)
        found = out.div_(total)[..., :value_dim].view(*self._shape, -1)
        return found.permute(0, 3, 1, 2, 4).reshape(n * length, heads * group, -1)

    def _add(self, layer: int, tiles: _Tiles, state: tuple[Tensor, Tensor, Tensor, Tensor], scratch: Workspace) -> None:
        """`state` of the tiles' blocks [b * H, g * C, ..]: queries, largest score so far, sum of weights, weighed
        values."""
        rows, top, total, out = state
        keys, values = self._gather(layer, tiles, scratch)
        shape = (*rows.shape[:2], self.tile_len)
        scores = torch.bmm(rows, _padded(keys).transpose(1, 2), out=scratch.take("scores", shape, torch.float32))
        if tiles.hidden is not None:
            scores.view(-1, *self._shape[1:], self.tile_len).masked_fill_(tiles.hidden, float("-inf"))
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = (top - highest).exp_()
        weights = scores.sub_(highest).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        out.mul_(shrink).baddbmm_(weights, _padded(values))
        top.copy_(highest)

    def _gather(self, layer: int, tiles: _Tiles, scratch: Workspace) -> tuple[Tensor, Tensor]:
        """K and V [b * H, N, D], [.., Dv] float32, or views of a latent that serves as both."""
        group = self._arena.layout.group
        planes = []
        for plane in range(group.planes):
            size = (len(tiles.kv_rows), self._arena.layout.page_size * group.head_dim)
            found = scratch.take(f"plane{plane}", size, torch.float32)
            planes.append(self._arena.gather(layer, plane, tiles.kv_rows, found, scratch))
        if tiles.stale is not None:  # 0 * NaN is NaN: hidden keys must not only weigh nothing
            planes[-1].view(-1, group.head_dim).index_fill_(0, tiles.stale, 0.0)
        keys, values = (found.view(-1, self.tile_len, group.head_dim) for found in (planes[0], planes[-1]))
        return keys, values[..., : group.value_dim]


def open_attention(pages: PagesInUse) -> TorchAttention:
    """The backend, on any device."""
    return TorchAttention(pages.pool, pages.tables, pages.query_heads)


def _padded(factors: Tensor) -> Tensor:
    """[.., D] with zeros up to a multiple of `_ALIGNED_DIM` columns; itself where it has so many."""
    missing = _num_missing(factors.shape[-1])
    return pad(factors, (0, missing)) if missing else factors


def _num_missing(num_columns: int) -> int:
    return -num_columns % _ALIGNED_DIM
