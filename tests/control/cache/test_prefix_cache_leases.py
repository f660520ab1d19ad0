"""Leases and eviction by example. A word is a prompt, one letter is one page."""

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace
from tests.control.cache.toys import ALICE, BOB, Toy

# ---------------------------------------------------------------- leases


def test_a_lease_gives_pages_and_path_of_each_pool() -> None:
    toy = Toy(4)
    first, second = toy.allocate(2), toy.allocate(3)
    lease = toy.insert(toy.cache.empty_lease(ALICE), "ab", first).lease
    other = toy.insert(toy.lease("ab"), "abcde", second).lease
    for pool in (0, 1):
        assert lease.pages(pool) == first[pool]
        assert other.pages(pool) == first[pool] + second[pool]
    ((upper, start, end),) = lease.path()
    assert (start, end) == (0, 8)
    assert other.path()[0] == (upper, 0, 8)
    assert [(start, end) for _, start, end in other.path()] == [(0, 8), (8, 20)]


def test_a_path_that_grows_alone_stays_one_node() -> None:
    """Chunks of a prompt and turns of a conversation: a match must not get slower with their number."""
    toy = Toy(4)
    lease = toy.cache.empty_lease(ALICE)
    for word in ("ab", "abc", "abcdef"):
        lease = toy.insert(lease, word).lease
        assert len(lease.path()) == 1
        toy.cache.check_integrity()
    toy.cache.release(lease)
    turn = toy.hold("abcdefgh")
    assert len(turn.path()) == 1
    assert toy.hit("abcdefgh") == "abcdefgh"


def test_a_node_another_lease_ends_at_does_not_grow() -> None:
    toy = Toy(4)
    held = toy.hold("ab")
    pages = held.pages(0)
    longer = toy.hold("abcd")
    assert len(longer.path()) == 2
    assert held.pages(0) == pages
    assert longer.pages(0)[:2] == pages
    toy.cache.check_integrity()


def test_an_unlocked_leaf_reached_below_the_lease_grows() -> None:
    toy = Toy(4)
    cold = toy.cache.empty_lease(ALICE)
    toy.put("ab")
    done = toy.insert(cold, "abcd")
    assert done.num_adopted_pages == 2
    assert len(done.lease.path()) == 1
    assert (toy.cache.protected_pages(0), toy.cache.evictable_pages(0)) == (4, 0)
    toy.cache.check_integrity()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_lease_may_end_inside_a_node(cut: int) -> None:
    toy = Toy(4)
    pages = toy.allocate(4)
    toy.cache.release(toy.insert(toy.cache.empty_lease(ALICE), "abcd", pages).lease)
    lease = toy.lease("abcd"[:cut] + "xyz")
    assert lease.pages(1) == pages[1][:cut]
    assert (toy.cache.protected_pages(1), toy.cache.evictable_pages(1)) == (cut, 4 - cut)
    toy.cache.check_integrity()
    toy.cache.evict((4, 4))
    assert toy.hit("abcd") == "abcd"[:cut]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_leased_node_is_split(cut: int) -> None:
    toy = Toy(4)
    whole = toy.hold("abcd")
    pages = [whole.pages(pool) for pool in (0, 1)]
    part = toy.lease("abcd"[:cut])
    assert [whole.pages(pool) for pool in (0, 1)] == pages
    assert part.pages(0) == pages[0][:cut]
    assert [(start, end) for _, start, end in whole.path()] == [(0, cut * 4), (cut * 4, 16)]
    assert whole.path()[0] == part.path()[0]
    toy.cache.check_integrity()
    toy.cache.release(whole)
    assert (toy.cache.protected_pages(0), toy.cache.evictable_pages(0)) == (cut, 4 - cut)
    toy.cache.release(part)
    assert toy.cache.protected_pages(0) == 0
    toy.cache.check_integrity()


def test_double_release_raises_and_changes_nothing() -> None:
    toy = Toy(4)
    keeper, lease = toy.hold("abc"), toy.lease("abc")
    toy.cache.release(lease)
    assert not lease.live
    with pytest.raises(StateError):
        toy.cache.release(lease)
    assert keeper.live
    assert (toy.cache.protected_pages(0), toy.cache.num_leases) == (3, 1)
    toy.cache.check_integrity()


def test_an_ended_lease_cannot_be_used() -> None:
    toy = Toy(4)
    lease = toy.hold("ab")
    newer = toy.insert(lease, "abc").lease
    tokens, keys = toy.text("abcd")
    pages = toy.allocate(1)
    for use in (
        lambda: toy.cache.release(lease),
        lambda: toy.cache.insert(lease, ALICE, tokens, keys, pages),
        lambda: lease.pages(0),
        lambda: lease.path(),
    ):
        with pytest.raises(StateError):
            use()
    assert newer.num_pages == 3
    assert toy.pools[0].state(pages[0][0]) is PageState.OWNED
    toy.cache.check_integrity()


def test_a_lease_of_another_cache_is_refused() -> None:
    one, other = Toy(4), Toy(4)
    lease = one.hold("ab")
    with pytest.raises(StateError):
        other.cache.release(lease)
    with pytest.raises(StateError):
        other.cache.lease(one.match("ab"))
    assert lease.live


def test_a_stale_match_cannot_be_leased() -> None:
    toy = Toy(4, (8, 16))
    toy.put("abcd")
    match = toy.match("abxy")
    toy.cache.evict((3, 3))
    with pytest.raises(StateError):
        toy.cache.lease(match)
    toy.put("xyz")
    stale = toy.match("abcd")
    toy.lease("x")
    with pytest.raises(StateError, match="changed"):
        toy.cache.lease(stale)
    assert toy.cache.num_leases == 1
    toy.cache.check_integrity()


def test_an_empty_match_leases_nothing_even_if_its_namespace_came_and_went() -> None:
    toy = Toy(4)
    cold = toy.cache.empty_lease(BOB)
    match = toy.match("ab", BOB)
    toy.cache.release(cold)
    lease = toy.cache.lease(match)
    assert (lease.num_tokens, lease.pages(0), lease.path()) == (0, (), ())
    done = toy.insert(lease, "ab")
    toy.cache.release(done.lease)
    assert toy.hit("ab", BOB) == "ab"
    toy.cache.check_integrity()


def test_a_namespace_leaves_nothing_behind() -> None:
    toy = Toy(4)
    for index in range(20):
        name = Namespace(f"tenant-{index}")
        assert toy.match("abc", name).num_pages == 0
        toy.cache.release(toy.cache.empty_lease(name))
        toy.put("abc", namespace=name)
    toy.cache.clear()
    assert toy.contents() == {}
    assert toy.cache._tree.roots == {}
    toy.cache.check_integrity()


# ---------------------------------------------------------------- eviction


def test_the_least_recently_used_leaf_goes_first() -> None:
    toy = Toy(4)
    toy.put("ab", "cd", "ef")
    toy.match("ab")
    assert toy.cache.evict((2, 0)) == (2, 2)
    assert [toy.hit(word) for word in ("cd", "ef", "ab")] == ["", "ef", "ab"]
    toy.cache.evict((2, 2))
    assert [toy.hit(word) for word in ("ef", "ab")] == ["", "ab"]


def test_release_makes_a_path_the_most_recent() -> None:
    toy = Toy(4)
    first = toy.hold("ab")
    toy.put("cd")
    toy.cache.release(first)
    toy.cache.evict((2, 2))
    assert toy.hit("ab") == "ab"
    assert toy.hit("cd") == ""


def test_a_leaf_loses_its_tail_first() -> None:
    toy = Toy(4)
    toy.put("abcdef")
    version = toy.cache.version
    assert toy.cache.evict((2, 2)) == (2, 2)
    assert toy.hit("abcdef") == "abcd"
    assert toy.cache.version != version
    toy.put("abcdef")
    assert toy.hit("abcdef") == "abcdef"
    toy.cache.check_integrity()


def test_a_parent_goes_after_its_children() -> None:
    toy = Toy(4)
    toy.put("abcd", "abxy", "abpq")
    for left in (6, 4, 2, 0):
        toy.cache.evict((2, 2))
        assert toy.cache.evictable_pages(0) == left
        toy.cache.check_integrity()
        assert toy.hit("ab") == ("ab" if left else "")


def test_leased_pages_are_never_evicted() -> None:
    toy = Toy(4)
    toy.put("abcd", "xy")
    lease = toy.lease("abq")
    pages = lease.pages(0)
    assert toy.cache.evict((99, 99)) == (4, 4)
    assert toy.hit("abcd") == "ab"
    assert lease.pages(0) == pages
    assert all(toy.pools[0].state(page) is PageState.CACHED for page in pages)
    assert toy.cache.evict((1, 1)) == (0, 0)
    toy.cache.check_integrity()


def test_full_pages_take_the_window_with_them_and_not_the_other_way_round() -> None:
    toy = Toy(4)
    toy.put("abcdef")
    assert toy.cache.evict((1, 4)) == (1, 4)
    assert [toy.cache.evictable_pages(pool) for pool in (0, 1)] == [5, 2]
    assert toy.cache.evict((4, 1)) == (4, 2)
    assert toy.cache.evict((0, 0)) == (0, 0)
    with pytest.raises(ValueError):
        toy.cache.evict((1,))


def test_evicting_pinned_pages_frees_them_later() -> None:
    toy = Toy(4)
    lease = toy.hold("ab")
    pages = lease.pages(0)
    toy.pools[0].pin(pages)
    toy.cache.release(lease)
    toy.put("cd")
    assert toy.cache.evict((2, 2)) == (2, 4)
    assert toy.pools[0].num_held == 2
    toy.pools[0].unpin(pages)
    assert toy.used() == (0, 5)
    toy.cache.check_integrity()


def test_needs_that_cannot_be_met_free_what_there_is() -> None:
    toy = Toy(4)
    toy.put("abc")
    assert toy.cache.evict((99, 1)) == (3, 3)
    assert toy.contents() == {}


def test_clear_spares_leases() -> None:
    toy = Toy(4)
    toy.put("abcd", "xyz")
    toy.put("abcd", namespace=BOB)
    lease = toy.lease("ab")
    assert toy.cache.clear() == (9, 9)
    assert toy.hit("abcd") == "ab"
    toy.cache.check_integrity()
    toy.cache.release(lease)
    toy.cache.clear()
    assert toy.used() == (0, 5)
    assert toy.cache.clear() == (0, 0)
    toy.cache.check_integrity()


def test_five_rounds_show_no_drift() -> None:
    """Hit or miss, success or failure, retraction: afterwards every page is free or evictable, and none is lost."""
    toy = Toy(4)
    toy.put("abcd")
    for _ in range(5):
        hit, miss = toy.lease("abcdef"), toy.lease("xy")
        delta = toy.allocate(2)
        hit = toy.insert(hit, "abcdef", delta).lease
        granted = toy.pools[0].grant(2) or ()
        toy.pools[0].revoke(granted)
        toy.pools[0].drain(granted)
        for lease in (hit, miss):
            toy.cache.release(lease)
        toy.cache.evict((2, 2))
        assert toy.cache.num_leases == 0
        assert toy.used() == (4, 9)
        assert toy.cache.evictable_pages(0) == 4
        toy.cache.check_integrity()
