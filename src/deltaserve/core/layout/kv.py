"""Byte arithmetic of groups on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheGroup, CacheSpec, HeadBlock, PageGroup, StateGroup


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Arena `[P, H, L, planes, S, D]` (page, kv head of this rank, layer, K|V, token, dim), contiguous."""

    group: PageGroup
    page_size: int
    shard: Shard = Shard()

    @property
    def num_heads(self) -> int:
        first, end = self.shard.heads(self.group.num_kv_heads)
        return end - first

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """[H, L, planes, S, D]"""
        group = self.group
        return (self.num_heads, group.num_layers, group.planes, self.page_size, group.head_dim)

    @property
    def page_bytes(self) -> int:
        return group_page_bytes(self.group, self.page_size, self.shard)


class StateBlock(NamedTuple):
    """Where one block lies in a slot of a rank, in elements: [heads, layers, rows, width]."""

    start: int
    num_heads: int
    num_layers: int
    num_rows: int
    """Rows of one layer."""
    row_width: int

    @property
    def size(self) -> int:
        return self.num_heads * self.num_layers * self.num_rows * self.row_width


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Slots `[P, bytes of a slot]`; in a slot one block after the other."""

    group: StateGroup
    shard: Shard = Shard()

    @property
    def blocks(self) -> tuple[StateBlock, ...]:
        return tuple(self._placed())

    def _placed(self) -> Iterator[StateBlock]:
        start, layers = 0, self.group.num_layers
        for block in self.group.blocks:
            held = _num_held(block, self.shard)
            placed = StateBlock(start, held, layers, block.num_rows // layers, block.row_width)
            yield placed
            start += placed.size

    @property
    def page_bytes(self) -> int:
        return group_page_bytes(self.group, 1, self.shard)


def group_page_bytes(group: CacheGroup, page_size: int, shard: Shard = Shard()) -> int:
    """Bytes of one page, or slot, of a group on one rank."""
    elements = sum(_num_held(block, shard) * block.num_rows * block.row_width for block in group.blocks)
    return elements * group.page_len(page_size) * group.dtype.itemsize


def _num_held(block: HeadBlock, shard: Shard) -> int:
    first, end = shard.heads(block.num_heads)
    return end - first


def pool_page_bytes(cache: CacheSpec, shard: Shard = Shard()) -> tuple[int, ...]:
    """Bytes of one page of each pool, over all its groups, on one rank."""
    by_pool = [0] * cache.num_pools
    for group in cache.groups:
        by_pool[cache.pool_of(group)] += group_page_bytes(group, cache.page_size, shard)
    return tuple(by_pool)
