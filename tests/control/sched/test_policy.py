"""How waiting requests are ranked."""

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.policy import POLICIES
from tests.control.sched.toys import make_request


def test_longest_cached_prefix_first() -> None:
    pool = PagePool(8)
    cache = PrefixCache(2, (pool,))
    cached = make_request([1, 2, 3, 4, 5], max_tokens=1)
    seed = b"\x00" * 16
    cached.grow_keys(seed, 2, 2)
    pages = pool.allocate(2)
    assert pages is not None
    tokens = bytes(cached.tokens[:16])
    cache.insert(cache.empty_lease(cached.namespace), cached.namespace, tokens, bytes(cached.keys), (pages,))
    rank = POLICIES["lpm"](cache)
    assert rank is not None
    other = make_request([9, 9, 9, 9, 9, 9], max_tokens=1)
    assert (rank(cached), rank(other)) == (4, 0)
    assert POLICIES["fcfs"](cache) is None
