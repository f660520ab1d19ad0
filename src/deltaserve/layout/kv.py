"""Byte arithmetic of one page group on one rank."""

from dataclasses import dataclass

from deltaserve.layout.shard import Shard
from deltaserve.layout.spec import CacheSpec, PageGroup


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
    def head_bytes(self) -> int:
        """Bytes of one head of one page: the unit of a transfer between unequal shards."""
        group = self.group
        return group.num_layers * group.planes * self.page_size * group.head_dim * group.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    def arena_bytes(self, num_pages: int) -> int:
        return num_pages * self.page_bytes


def pool_page_bytes(cache: CacheSpec, shard: Shard = Shard()) -> tuple[int, ...]:
    """Bytes of one page of each pool, over all its groups, on one rank."""
    by_pool = [0] * cache.num_pools
    for group in cache.groups:
        by_pool[cache.pool_of(group)] += KvLayout(group, cache.page_size, shard).page_bytes
    return tuple(by_pool)
