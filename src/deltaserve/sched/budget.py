"""Whether pages can be had: free ones plus what eviction would yield, over every pool."""

from collections.abc import Sequence

from deltaserve.base.ids import PageId, PoolId
from deltaserve.cache.allocator import PagePool
from deltaserve.cache.prefix_cache import PrefixCache


class Budget:
    """Reads pools and cache, evicts on demand. Counts are pages; a need is one number for each pool."""

    def __init__(self, cache: PrefixCache, pools: Sequence[PagePool]) -> None:
        self._cache = cache
        self._pools = tuple(pools)

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    def available(self, pool: PoolId) -> int:
        """Free now or after eviction."""
        return self._pools[pool].num_free + self._cache.evictable_pages(pool)

    def fits(self, need: int, reserve: int = 0) -> bool:
        """Whether `need` pages of every pool can be had with `reserve` left over."""
        return all(self.available(PoolId(p)) >= need + reserve for p in range(len(self._pools)))

    def make_room(self, need: int) -> bool:
        """Evict until `need` pages of every pool are free. False, with nothing allocated, if they cannot be had."""
        missing = [max(0, need - pool.num_free) for pool in self._pools]
        if any(missing):
            self._cache.evict(missing)
        return all(pool.num_free >= need for pool in self._pools)

    def allocate(self, need: int) -> tuple[list[PageId], ...] | None:
        """`need` pages of every pool, or of none."""
        if not self.make_room(need):
            return None
        taken: list[list[PageId]] = []
        for pool in self._pools:
            pages = pool.allocate(need)
            if pages is None:
                raise AssertionError("make_room promised pages the pool does not have")
            taken.append(list(pages))
        return tuple(taken)

    def free(self, owned: Sequence[Sequence[PageId]]) -> None:
        for pool, pages in zip(self._pools, owned, strict=False):
            if pages:
                pool.free(tuple(pages))
