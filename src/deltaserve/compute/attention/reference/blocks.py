"""Index tensors of a tile plan for one arena, cut into blocks that bound temporary memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deltaserve.compute.attention.scratch_limits import BLOCK_BYTES
from deltaserve.compute.attention.tiles import Bools, EdgeItems, Ints, SplitItems, TilePlan
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvArena


@dataclass(frozen=True, slots=True)
class Pass:
    """Tiles whose scores exist at once. Each tile meets the first items of the block."""

    counts: tuple[int, ...]
    """Items of each tile; n below is their sum."""
    queries: Tensor  # [n * H * R] int64 into query rows [units * H + 1, D]; the last is zero
    targets: Tensor  # [n * H * R] int64 into partial results, see PartTable; padding goes to the one that is waste


@dataclass(frozen=True, slots=True)
class Block:
    """Some items: their keys are gathered once, then multiplied with one tile after the other."""

    width: int
    """Keys per item."""
    kv_rows: Tensor  # [items * H * width / S] int64, see KvArena.gather
    passes: tuple[Pass, ...]
    hidden: Tensor | None = None  # [items, 1, R, n] bool: of the last n keys; those before are hidden from nobody
    stale: Tensor | None = None  # [n] int64: keys, among items * H * width, that nobody sees and may hold anything


@dataclass(frozen=True, slots=True)
class PartTable:
    """Where partial results stand: those of one query row side by side, as many as it has.

    A query row is token * num_heads + head. Behind the last part stand one that is waste and one that is empty.
    """

    num_heads: int
    """Query heads."""
    counts: Ints  # [Tt + 1] parts of each token's rows; the last stands for padding
    starts: Ints  # [Tt + 1] where those of its head 0 begin
    zeros: Ints  # [Tt + 1] where part number 0 of its head 0 would stand

    @classmethod
    def of(cls, plan: TilePlan, num_heads: int) -> "PartTable":
        counts = np.append(plan.num_parts, 0)
        starts = (np.cumsum(counts) - counts) * num_heads
        return cls(num_heads, counts, starts, starts - np.append(plan.first_parts, 0))

    @property
    def num_tokens(self) -> int:
        return len(self.counts) - 1

    @property
    def waste(self) -> int:
        return int(self.starts[-1])

    @property
    def empty(self) -> int:
        return self.waste + 1

    def place(self, tokens: Ints, heads: Ints, parts: Ints) -> Ints:
        """Place of part number `parts` of a query row. Tokens of padding: waste."""
        found = self.zeros[tokens] + heads * self.counts[tokens] + parts
        return np.where(tokens < self.num_tokens, found, self.waste)

    def place_in_order(self, tokens: Ints, heads: Ints, index: Ints) -> Ints:
        """Place of the part at `index` among those that a query row has; beyond its last one: empty."""
        counts = self.counts[tokens]
        return np.where(index < counts, self.starts[tokens] + heads * counts + index, self.empty)


@dataclass(frozen=True, slots=True)
class _Indexer:
    """Turns pages and units into row numbers of one arena."""

    arena: KvArena
    group_size: int
    parts: PartTable

    @property
    def heads(self) -> Ints:
        return np.arange(self.arena.layout.num_heads)[:, None]  # [H, 1]

    def kv_rows(self, pages: Ints) -> Tensor:
        """[n, pages] -> [n * H * pages]"""
        rows = pages[:, None, :] * self.arena.rows_per_page + self.heads * self.arena.rows_per_head
        return self.tensor(rows.reshape(-1))

    def one_pass(self, tiles: Sequence[Ints], parts: Ints) -> Pass:
        """units of each tile [n_i, R], part number of each item [>= n_i]"""
        group, num_heads = self.group_size, self.arena.layout.num_heads
        counts = tuple(len(units) for units in tiles)
        units = np.concatenate(tiles)[:, None, :]  # [n, 1, R]
        part = np.concatenate([parts[:count] for count in counts])[:, None, None]
        tokens, heads = units // group, self.heads * group + units % group  # [n, 1, R], [n, H, R]
        queries = np.minimum(tokens * num_heads * group + heads, self.parts.num_tokens * num_heads * group)
        targets = self.parts.place(tokens, heads, part)
        return Pass(counts, self.tensor(queries.reshape(-1)), self.tensor(targets.reshape(-1)))

    def passes(self, tiles: Sequence[Ints], parts: Ints, width: int) -> tuple[Pass, ...]:
        """The tiles as passes, each of as many tiles as the budget allows."""
        tile_bytes = parts.size * self.arena.layout.num_heads * tiles[0].shape[1] * width * 4
        step = max(1, self.budget // tile_bytes)
        return tuple(self.one_pass(tiles[start : start + step], parts) for start in range(0, len(tiles), step))

    def per_head(self, mask: Bools) -> Bools:
        """[n, width] -> [n, H, width]"""
        return np.repeat(mask[:, None], self.arena.layout.num_heads, 1)

    def tensor(self, values: Ints | Bools) -> Tensor:
        return on_device(np.ascontiguousarray(values), self.arena.bytes.device)

    @property
    def budget(self) -> int:
        return BLOCK_BYTES[self.arena.bytes.device.type]

    def items_per_block(self, width: int) -> int:
        layout = self.arena.layout
        return max(1, self.budget // (layout.num_heads * width * layout.group.head_dim * 4))


def make_blocks(plan: TilePlan, arena: KvArena, parts: PartTable) -> list[Block]:
    """Splits first, then heads and tails."""
    indexer = _Indexer(arena, parts.num_heads // arena.layout.num_heads, parts)
    splits = [] if plan.items is None else list(_split_blocks(indexer, plan.items))
    return splits + [block for edges in plan.edges for block in _edge_blocks(indexer, edges)]


def _split_blocks(indexer: _Indexer, items: SplitItems) -> Iterator[Block]:
    width = items.pages.shape[1] * indexer.arena.layout.page_size
    step = indexer.items_per_block(width)
    for start in range(0, len(items.pages), step):
        pages = items.pages[start : start + step]
        parts = items.splits[start : start + step]
        tiles = [units[start : start + step] for units in items.tiles if len(units) > start]
        yield Block(width, indexer.kv_rows(pages), indexer.passes(tiles, parts, width))


def _edge_blocks(indexer: _Indexer, edges: EdgeItems) -> Iterator[Block]:
    width = edges.pages.shape[1] * indexer.arena.layout.page_size
    step = indexer.items_per_block(width)
    for start in range(0, len(edges.pages), step):
        here = slice(start, start + step)
        edges_pass = indexer.one_pass([edges.units[here]], edges.parts[here])
        hidden, stale = edges.hidden[here], edges.stale[here]
        first = int(hidden.any((0, 1)).argmax())
        yield Block(
            width,
            indexer.kv_rows(edges.pages[here]),
            (edges_pass,),
            indexer.tensor(hidden[:, None, :, first:]) if hidden.any() else None,
            indexer.tensor(np.flatnonzero(indexer.per_head(stale))),
        )
