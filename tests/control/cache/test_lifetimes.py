"""FULL, WINDOW and STATE pools side by side, by example. A word is a prompt, one letter is one page."""

import pytest

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PageState
from deltaserve.control.cache.prefix_cache import Insertion, Lease, Match, PrefixCache, StateEviction
from deltaserve.core.ids import PageId
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.control.cache.toys import ALICE, STATE, Toy, longest, taken, window

FULL_POOL, WINDOW_POOL, STATE_POOL = 0, 1, 2


class Hybrid(Toy):
    """Three pools of different sizes; the window needs two pages."""

    def __init__(self, window_pages: int = 2, eviction: StateEviction = StateEviction.RECENCY) -> None:
        super().__init__(4, (64, 40, 12), retentions=(KEEP_ALL, window(window_pages), STATE), state_eviction=eviction)

    def give(self, lease: Lease, word: str, num_window: int | None = None, num_states: int = 1) -> Insertion:
        """Insert all of `word` below `lease` with so many window pages (default: all new ones) and states."""
        num_new = len(word) - lease.num_pages
        counts = (num_new, num_new if num_window is None else num_window, num_states)
        done = self.insert(lease, word, self.take(*counts))
        self.cache.check_integrity()
        return done

    def keep(self, word: str, num_window: int | None = None, num_states: int = 1) -> None:
        """The same below what is cached, and release it."""
        self.cache.release(self.give(self.lease(word), word, num_window, num_states).lease)
        self.cache.check_integrity()

    def reach(self, word: str) -> str:
        return word[: self.match(word).reach // self.page_size]

    def longest(self, word: str) -> tuple[str, str, str]:
        """Per pool: the longest prefix at which it could continue."""
        match = self.match(word)
        full, window_len, state = (longest(self.cache, match, pool) // self.page_size for pool in range(3))
        return word[:full], word[:window_len], word[:state]


# ---------------------------------------------------------------- match


def test_a_hit_needs_every_lifetime() -> None:
    toy = Hybrid()
    toy.keep("abcd")
    assert toy.hit("abcdef") == "abcd"
    assert toy.hit("abcx") == "", "no state stands at c, and none above"
    assert toy.longest("abcx") == ("abc", "abc", "")
    toy.keep("ab")
    assert toy.hit("abcx") == "ab"
    assert toy.reach("abcx") == "abc"


def test_a_window_is_usable_where_its_whole_tail_is() -> None:
    toy = Hybrid()
    toy.keep("abcdef", num_window=2)
    assert toy.hit("abcdef") == "abcdef"
    assert toy.longest("abcdex") == ("abcde", "", ""), "page d of the window was never there"
    toy.keep("ghijkl", num_window=1)
    assert toy.hit("ghijkl") == ""
    assert toy.longest("ghijkl") == ("ghijkl", "", "ghijkl")


def test_a_window_may_lie_across_nodes() -> None:
    toy = Hybrid(window_pages=3)
    toy.keep("abcd", num_window=3)
    toy.keep("abcdef", num_window=2)
    assert len(toy.lease("abcdef").path()) == 2
    assert toy.hit("abcdef") == "abcdef"


def test_a_prompt_shorter_than_the_window_needs_all_of_it() -> None:
    toy = Hybrid(window_pages=5)
    toy.keep("abc")
    assert toy.hit("abcd") == "abc"
    toy.cache.evict((0, 1, 0))
    assert toy.hit("abcd") == ""


def test_a_window_of_one_token_needs_nothing() -> None:
    toy = Toy(4, (8, 16), retentions=(KEEP_ALL, Retention(Lifetime.WINDOW, 1)))
    toy.put("abc")
    toy.cache.evict((0, 8))
    assert toy.hit("abcd") == "abc"
    assert toy.hit("abx") == "ab"


def test_falling_back_goes_on_until_all_agree() -> None:
    """A state without its window, a window without a state, and only then a place that has both."""
    toy = Hybrid()
    toy.keep("ab")
    toy.keep("abcdef", num_states=0)
    toy.keep("abcdefgh", num_window=1)
    assert toy.longest("abcdefghi") == ("abcdefgh", "abcdef", "abcdefgh")
    assert toy.hit("abcdefghi") == "ab"
    toy = Hybrid()
    toy.keep("ab")
    toy.keep("abcdef", num_window=0)
    toy.keep("abcdefgh", num_window=2, num_states=0)
    assert toy.longest("abcdefgh") == ("abcdefgh", "abcdefgh", "abcdef")
    assert toy.hit("abcdefgh") == "ab"


def test_the_first_pool_alone_must_be_full() -> None:
    with pytest.raises(ValueError):
        PrefixCache(4, (PagePool(4),), (STATE,))
    with pytest.raises(ValueError):
        PrefixCache(4, (PagePool(4), PagePool(4)), (KEEP_ALL,))
    with pytest.raises(ValueError):
        PrefixCache(4, (PagePool(4), PagePool(4)), (KEEP_ALL, KEEP_ALL))


# ---------------------------------------------------------------- leases


def test_a_lease_holds_of_each_pool_what_continuing_needs() -> None:
    toy = Hybrid()
    toy.keep("abcdef")
    lease = toy.lease("abcdef")
    assert [lease.first_page(pool) for pool in range(3)] == [0, 4, 5]
    assert [len(lease.pages(pool)) for pool in range(3)] == [6, 2, 1]
    assert [toy.cache.protected_pages(pool) for pool in range(3)] == [6, 2, 1]
    assert [toy.cache.evictable_pages(pool) for pool in range(3)] == [0, 4, 0]
    kept = [lease.pages(pool) for pool in range(3)]
    assert toy.cache.evict((9, 9, 9)) == (0, 4, 0)
    assert [lease.pages(pool) for pool in range(3)] == kept
    assert toy.hit("abcdef") == "abcdef"
    toy.cache.check_integrity()


def test_a_shrunken_window_gives_pages_up_one_by_one() -> None:
    toy = Hybrid(window_pages=3)
    toy.keep("abcdef")
    lease = toy.lease("abcdef")
    pages = lease.pages(WINDOW_POOL)
    for num_tokens, num_left in [(24, 3), (27, 3), (28, 2), (33, 1), (36, 0), (99, 0)]:
        toy.cache.shrink(lease, num_tokens)
        assert lease.pages(WINDOW_POOL) == pages[3 - num_left :]
        assert lease.first_page(WINDOW_POOL) == 6 - num_left
        assert toy.cache.protected_pages(WINDOW_POOL) == num_left
        toy.cache.check_integrity()
    toy.cache.shrink(lease, 24)
    assert lease.pages(WINDOW_POOL) == (), "what was given up is not taken again"
    assert len(lease.pages(FULL_POOL)) == 6
    toy.cache.release(lease)
    toy.cache.check_integrity()


def test_two_leases_lock_a_window_as_far_as_the_longer_one() -> None:
    toy = Hybrid(window_pages=3)
    toy.keep("abcdef")
    one, other = toy.lease("abcdef"), toy.lease("abcdef")
    toy.cache.shrink(one, 32)
    assert toy.cache.evictable_pages(WINDOW_POOL) == 3
    toy.cache.shrink(other, 28)
    assert toy.cache.evictable_pages(WINDOW_POOL) == 4
    toy.cache.check_integrity()
    toy.cache.release(other)
    assert toy.cache.evictable_pages(WINDOW_POOL) == 5
    toy.cache.release(one)
    toy.cache.check_integrity()


def test_a_released_state_may_go_while_its_kv_is_leased() -> None:
    toy = Hybrid()
    toy.keep("abcd")
    lease = toy.lease("abcd")
    toy.cache.shrink(lease, 17)
    assert lease.pages(STATE_POOL) == ()
    assert toy.cache.evict((0, 0, 1)) == (0, 0, 1)
    assert toy.hit("abcd") == ""
    assert toy.reach("abcd") == "abcd"
    assert len(lease.pages(FULL_POOL)) == 4
    toy.cache.release(lease)
    toy.cache.check_integrity()


def test_a_kv_lease_reaches_as_far_as_the_full_pages() -> None:
    """Decode: the state comes from prefill anyway, and of the window what its prompt will need, whole or not at all."""
    toy = Hybrid()
    toy.keep("abcd", num_states=0)
    assert toy.hit("abcdef") == ""
    tokens, keys = toy.text("abcdefgh")
    for num_tokens, first in [(16, 2), (20, 3), (21, 3), (24, 4), (32, 4)]:
        lease = toy.cache.lease_kv(toy.cache.match(ALICE, tokens, keys), num_tokens)
        assert lease.num_pages == 4
        assert [lease.first_page(pool) for pool in range(3)] == [0, first, 4]
        toy.cache.check_integrity()
        toy.cache.release(lease)
    toy.cache.evict((0, 3, 0))
    lease = toy.cache.lease_kv(toy.match("abcd"), 16)
    assert (lease.pages(WINDOW_POOL), lease.first_page(WINDOW_POOL)) == ((), 4), "half a window is none"


def test_a_lease_grows_with_the_tree() -> None:
    toy = Hybrid()
    toy.keep("abcd")
    lease = toy.cache.lease_kv(toy.match("abcdef"), 24)
    tokens, keys = toy.text("abcdefgh")
    assert toy.cache.lengthen(lease, tokens, keys) is lease
    toy.keep("abcdefxy")
    longer = toy.cache.lengthen(lease, tokens, keys)
    assert not lease.live
    assert longer.num_pages == 6
    assert [longer.first_page(pool) for pool in range(3)] == [0, 6, 6]
    assert longer.pages(FULL_POOL) == toy.lease("abcdefxy").pages(FULL_POOL)[:6]
    toy.cache.check_integrity()
    other_tokens, other_keys = toy.text("zbcdefgh")
    with pytest.raises(ValueError):
        toy.cache.lengthen(longer, other_tokens, other_keys)
    assert longer.live


# ---------------------------------------------------------------- insert


def test_pages_behind_the_window_need_not_be_handed_over() -> None:
    toy = Hybrid()
    lease = toy.give(toy.cache.empty_lease(ALICE), "abcdef", num_window=2).lease
    assert [lease.first_page(pool) for pool in range(3)] == [0, 4, 5]
    assert toy.cache.protected_pages(WINDOW_POOL) == 2
    lease = toy.give(lease, "abcdefghij", num_window=2, num_states=0).lease
    assert [lease.first_page(pool) for pool in range(3)] == [0, 8, 10]
    toy.cache.release(lease)
    assert toy.hit("abcdefghij") == "abcdef"


def test_a_missing_window_is_filled_in_above_the_lease() -> None:
    toy = Hybrid()
    toy.keep("abcdef", num_window=0)
    lease = toy.cache.lease_kv(toy.match("abcdef"), 24)
    version = toy.cache.version
    lease = toy.give(lease, "abcdef", num_window=2, num_states=0).lease
    assert toy.cache.version != version
    assert lease.first_page(WINDOW_POOL) == 4
    assert toy.hit("abcdef") == "abcdef"
    toy.cache.release(lease)
    assert toy.hit("abcdef") == "abcdef"


def test_duplicates_are_adopted_pool_by_pool() -> None:
    """The tree has all KV and the last window page; ours fill the gap, the others are freed."""
    toy = Hybrid()
    mine = toy.cache.empty_lease(ALICE)
    toy.keep("abcdef", num_window=1)
    theirs = toy.cache.lease_kv(toy.match("abcdef"), 24)
    ours = toy.take(6, 3, 1)
    done = toy.insert(mine, "abcdef", ours)
    toy.cache.check_integrity()
    assert done.num_adopted_pages == 6
    assert done.lease.pages(FULL_POOL) == theirs.pages(FULL_POOL)
    states = [toy.pools[STATE_POOL].state(page) for page in ours[STATE_POOL]]
    assert states == [PageState.FREE]
    kept = [toy.pools[WINDOW_POOL].state(page) is PageState.CACHED for page in ours[WINDOW_POOL]]
    assert kept == [True, True, False]
    assert done.lease.pages(WINDOW_POOL)[0] == ours[WINDOW_POOL][1]
    assert toy.hit("abcdef") == "abcdef"


def test_a_path_does_not_grow_past_its_checkpoint() -> None:
    toy = Hybrid()
    toy.keep("ab")
    toy.keep("abcd", num_states=0)
    assert len(toy.lease("abcd").path()) == 1
    assert toy.hit("abcd") == "ab"
    lease = toy.cache.lease_kv(toy.match("abcd"), 16)
    assert [(start, end) for _, start, end in lease.path()] == [(0, 8), (8, 16)]
    lease = toy.give(lease, "abcde", num_states=0).lease
    assert len(lease.path()) == 2, "without a state at its end the second node grows"


def test_a_leaf_does_not_grow_over_a_hole_in_its_window() -> None:
    toy = Hybrid()
    lease = toy.give(toy.cache.empty_lease(ALICE), "ab", num_states=0).lease
    lease = toy.give(lease, "abcd", num_states=0).lease
    assert len(lease.path()) == 1
    lease = toy.give(lease, "abcdef", num_window=1, num_states=0).lease
    assert len(lease.path()) == 2


def test_a_state_may_be_put_on_a_path_that_is_there() -> None:
    toy = Hybrid()
    toy.keep("abcdef", num_states=0)
    toy.keep("abc")
    assert toy.hit("abcdef") == "abc"
    assert toy.reach("abcdef") == "abcdef"
    assert toy.cache.evictable_pages(STATE_POOL) == 1


def test_a_split_keeps_the_state_at_its_end() -> None:
    toy = Hybrid()
    toy.keep("abcd")
    held = toy.lease("abcd")
    toy.keep("abxy")
    assert len(held.path()) == 2
    assert len(held.pages(STATE_POOL)) == 1
    assert toy.hit("abcd") == "abcd"
    assert held.pages(WINDOW_POOL) == toy.lease("abcd").pages(WINDOW_POOL)
    toy.cache.check_integrity()


@pytest.mark.parametrize("counts", [(1, 2, 1), (2, 5, 0), (2, 2, 2), (2, 2)], ids=["full", "window", "states", "pools"])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, ...]) -> None:
    toy = Hybrid()
    lease = toy.give(toy.cache.empty_lease(ALICE), "ab").lease
    tokens, keys = toy.text("abcd" if counts[0] == 2 else "abc")
    pages = tuple(taken(pool.allocate(n)) for pool, n in zip(toy.pools, counts, strict=False))
    if counts == (1, 2, 1):
        pages = ((), pages[1], (*pages[2], PageId(99)))
    before = (toy.contents(), toy.used())
    with pytest.raises(ValueError):
        toy.cache.insert(lease, ALICE, tokens, keys, pages)
    assert (toy.contents(), toy.used()) == before
    assert lease.live
    toy.cache.check_integrity()


def test_the_root_has_no_state() -> None:
    toy = Hybrid()
    lease = toy.cache.empty_lease(ALICE)
    with pytest.raises(ValueError):
        toy.cache.insert(lease, ALICE, b"", b"", ((), (), taken(toy.pools[STATE_POOL].allocate(1))))


# ---------------------------------------------------------------- eviction


def test_each_pool_has_its_own_order() -> None:
    toy = Hybrid()
    for word in ("abcd", "efgh", "ijkl"):
        toy.keep(word)
    toy.match("abcd")
    toy.cache.evict((0, 0, 1))
    assert [toy.hit(word) for word in ("abcd", "efgh", "ijkl")] == ["abcd", "", "ijkl"]
    toy.match("abcd")
    toy.cache.evict((0, 3, 0))
    assert [toy.hit(word) for word in ("abcd", "ijkl")] == ["abcd", "ijkl"], "the window of efgh went first"
    assert toy.reach("efgh") == "efgh"
    toy.cache.check_integrity()


def test_by_cost_the_state_goes_that_is_computed_again_soonest() -> None:
    toy = Hybrid(eviction=StateEviction.COST)
    for word in ("abcdef", "abcdefg", "xy"):
        toy.keep(word)
    left = ["abcdefg", "xy", "abcdef"]
    while left:
        assert [word for word in ("abcdefg", "xy", "abcdef") if toy.hit(word) == word] == left
        toy.cache.evict((0, 0, 1))
        toy.cache.check_integrity()
        del left[0]
        assert toy.reach("abcdefg") == "abcdefg"


def test_use_of_a_long_path_is_use_of_its_last_window_only() -> None:
    toy = Hybrid()
    toy.keep("ab")
    toy.keep("abcdef")
    toy.keep("xy")
    toy.match("abcdef")
    toy.cache.evict((0, 2, 0))
    assert toy.hit("ab") == ""
    assert toy.hit("xy") == "xy"
    assert toy.hit("abcdef") == "abcdef"


def test_a_trimmed_leaf_loses_its_state_and_the_window_of_what_went() -> None:
    toy = Hybrid()
    toy.keep("abcdef", num_window=3)
    assert toy.cache.evict((2, 0, 0)) == (2, 2, 1)
    assert toy.longest("abcdef") == ("abcd", "", "")
    assert toy.cache.evictable_pages(WINDOW_POOL) == 1
    toy.cache.check_integrity()


def test_evicting_windows_and_states_keeps_the_path() -> None:
    toy = Hybrid()
    toy.keep("abcdef")
    version = toy.cache.version
    assert toy.cache.evict((0, 6, 1)) == (0, 6, 1)
    assert toy.cache.version != version
    assert (toy.hit("abcdef"), toy.reach("abcdef")) == ("", "abcdef")
    assert toy.cache.drain_events().evicted == b"", "routers count full pages"


def test_clear_empties_every_pool() -> None:
    toy = Hybrid()
    toy.keep("abcdef")
    lease = toy.cache.lease_kv(toy.match("ab"), 999)
    assert toy.cache.clear() == (4, 6, 1)
    toy.cache.check_integrity()
    toy.cache.release(lease)
    assert toy.cache.clear() == (2, 0, 0)


def test_a_stale_match_is_known_when_only_a_state_went() -> None:
    toy = Hybrid()
    toy.keep("abcd")
    match: Match = toy.match("abcd")
    toy.cache.evict((0, 0, 1))
    assert match.version != toy.cache.version
