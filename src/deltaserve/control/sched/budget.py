"""Whether pages can be had: free ones plus what eviction would yield, over every pool."""

from collections.abc import Sequence

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.request import Request
from deltaserve.core.hints import MAX_RETAIN_MS
from deltaserve.core.ids import Namespace, PageId, PoolId

_AHEAD = 64
"""One page in so many is evicted ahead of need."""


class Budget:
    """Reads pools and cache, evicts on demand. Counts are pages; a need is one number for each pool."""

    def __init__(self, cache: PrefixCache, pools: Sequence[PagePool]) -> None:
        self._cache = cache
        self._pools = tuple(pools)
        self._none = (0,) * len(self._pools)
        self._ahead = self._pools[0].num_pages // _AHEAD

    def available(self, pool: PoolId) -> int:
        """Free now or after eviction."""
        return self._pools[pool].num_free + self._cache.evictable_pages(pool)

    def fits(self, needs: Sequence[int], reserve: Sequence[int] | None = None) -> bool:
        """Whether `needs[pool]` pages of each pool can be had with `reserve[pool]` left over."""
        reserve = self._none if reserve is None else reserve
        pools = enumerate(zip(needs, reserve, strict=True))
        return all(self.available(PoolId(pool)) >= need + left for pool, (need, left) in pools)

    def short(self, needs: Sequence[int], reserve: Sequence[int]) -> tuple[PoolId, ...]:
        """The pools of which too little can be had."""
        pools = enumerate(zip(needs, reserve, strict=True))
        return tuple(PoolId(p) for p, (need, left) in pools if self.available(PoolId(p)) < need + left)

    def comes_back(self, short: Sequence[PoolId]) -> bool:
        """Whether freed pages of these pools are still read, by a transfer or a copy: they are to be had behind it."""
        return any(self._pools[pool].num_held for pool in short)

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until `needs[pool]` pages of each pool are free. False if they cannot be had.

        Of the first pool somewhat more is evicted: among few free pages the allocator finds no runs, and a transfer
        takes a descriptor for each run.
        """
        missing = [max(0, need - pool.num_free) for need, pool in zip(needs, self._pools, strict=True)]
        if any(missing):
            ahead = self._ahead if missing[0] else 0
            self._cache.evict((missing[0] + ahead, *missing[1:]))
        return self._are_free(needs)

    def allocate(self, needs: Sequence[int]) -> tuple[list[PageId], ...] | None:
        """`needs[pool]` pages of each pool, or of none."""
        if not self._are_free(needs) and not (self.fits(needs) and self.make_room(needs)):
            return None
        taken: list[list[PageId]] = []
        for need, pool in zip(needs, self._pools, strict=True):
            pages = pool.allocate(need)
            if pages is None:
                raise AssertionError("make_room promised pages the pool does not have")
            taken.append(list(pages))
        return tuple(taken)

    def _are_free(self, needs: Sequence[int]) -> bool:
        return all(pool.num_free >= need for need, pool in zip(needs, self._pools, strict=True))

    def free_pages(self, pool: PoolId, pages: Sequence[PageId]) -> None:
        if pages:
            self._pools[pool].free(tuple(pages))

    def free(self, owned: Sequence[Sequence[PageId]]) -> None:
        for pool, pages in zip(self._pools, owned, strict=False):
            if pages:
                pool.free(tuple(pages))

    def enter_tree(
        self, namespace: Namespace, tokens: bytes, keys: bytes, first: int, pages: Sequence[Sequence[PageId]]
    ) -> bool:
        """Have pages from page index `first` on, which came from elsewhere, enter the tree behind the FULL pages that
        were there when they were asked for. Where those are gone they are freed, and it returns False. `tokens` and
        `keys`: of the path up to their end."""
        first_len = first * self._cache.page_size
        match = self._cache.match(namespace, tokens, keys, first_len)
        if match.reach < first_len:
            self.free(pages)
            return False
        handed_over = tuple(map(tuple, pages))
        inserted = self._cache.insert(self._cache.lease_kv(match, first_len), namespace, tokens, keys, handed_over)
        self._cache.release(inserted.lease)
        return True

    def reclaim(self, request: Request) -> None:
        """Take a request's own pages and its lease from it."""
        self.free(request.disown())
        if request.lease is not None:
            self._cache.release(request.lease)
            request.lease = None

    def settle(self, request: Request) -> None:
        """`reclaim` at its end: what it says of the requests to come counts now."""
        lease, hints = request.lease, request.hints
        if lease is not None and hints.done:
            request.lease = None
            self._cache.retire(lease)
        elif lease is not None and hints.retain_ms:
            self._cache.retain(lease, min(hints.retain_ms, MAX_RETAIN_MS) / 1000)
        self.reclaim(request)
