"""Pages over every pool: all or none, eviction for the shortfall, leased pages never."""

from deltaserve.control.sched.budget import Budget
from deltaserve.core.ids import PoolId
from tests.control.cache.toys import Toy


def toy_with(word: str) -> tuple[Toy, Budget]:
    toy = Toy(pool_pages=(8, 15))  # ten and eight: the second pool has five pages taken
    toy.put(word)
    return toy, Budget(toy.cache, toy.pools)


def test_available_is_free_and_evictable() -> None:
    toy, budget = toy_with("abc")
    assert [budget.available(PoolId(p)) for p in (0, 1)] == [8, 10]
    lease = toy.lease("ab")
    assert [budget.available(PoolId(p)) for p in (0, 1)] == [6, 8]
    toy.cache.release(lease)


def test_fits_asks_every_pool() -> None:
    _, budget = toy_with("abc")
    assert budget.fits((8, 8))
    assert budget.fits((5, 5), reserve=(3, 3))
    assert not budget.fits((9, 8))
    assert not budget.fits((6, 5), reserve=(3, 3))


def test_allocation_evicts_the_shortfall_and_no_more() -> None:
    toy, budget = toy_with("abc")
    taken = budget.allocate((6, 6))
    assert taken is not None
    assert [len(pages) for pages in taken] == [6, 6]
    assert toy.hit("abc") == "ab"
    budget.free(taken)
    assert toy.hit("abc") == "ab"


def test_a_large_pool_is_evicted_a_little_ahead_of_need() -> None:
    """So that the pages of a grant can be chosen to lie side by side."""
    toy = Toy(pool_pages=(128, 300))
    toy.put("".join(chr(0x100 + page) for page in range(126)))
    budget = Budget(toy.cache, toy.pools)
    assert budget.make_room((2, 1))
    assert toy.pools[0].num_free == 2
    assert budget.make_room((3, 1))
    assert toy.pools[0].num_free == 5
    assert budget.make_room((5, 1))
    assert toy.pools[0].num_free == 5


def test_all_or_none() -> None:
    toy, budget = toy_with("abc")
    lease = toy.lease("abc")
    assert budget.allocate((6, 6)) is None
    assert [pool.num_free for pool in toy.pools] == [5, 7]
    assert budget.allocate((0, 0)) == ([], [])
    toy.cache.release(lease)


def test_freeing_nothing_is_fine() -> None:
    _, budget = toy_with("a")
    budget.free(())
    budget.free(([], []))
