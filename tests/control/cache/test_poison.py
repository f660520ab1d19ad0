"""A path whose KV is wrong (its logits were not finite) is never matched again, and goes with its last lease."""

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.core.lifetime import KEEP_ALL
from tests.control.cache.toys import ALICE, BOB, STATE, Toy, window


def poison(toy: Toy, word: str, first_page: int = 0) -> None:
    toy.cache.poison(ALICE, *toy.text(word), first_page)
    toy.cache.check_integrity()


def test_an_unleased_path_goes_at_once() -> None:
    toy = Toy(4)
    toy.put("abcd", "abxy", "pq")
    toy.put("abcd", namespace=BOB)
    poison(toy, "abcdef")
    assert [toy.hit(word) for word in ("abcd", "abxy", "pq")] == ["", "", "pq"]
    assert toy.hit("abcd", BOB) == "abcd"
    assert toy.used() == (6, 6 + 5)


def test_what_comes_before_may_be_spared() -> None:
    toy = Toy(4)
    toy.put("abcd", "abxy")
    poison(toy, "abcd", first_page=1)
    assert [toy.hit(word) for word in ("abcd", "abxy")] == ["a", "a"]
    poison(toy, "abcd", first_page=1)
    assert toy.hit("abcd") == "a"


def test_a_leased_path_keeps_its_pages_until_its_last_lease_ends() -> None:
    toy = Toy(4)
    one = toy.hold("abcd")
    other = toy.lease("ab")
    pages = [one.pages(pool) for pool in (0, 1)]
    poison(toy, "abcd")
    assert toy.hit("abcd") == ""
    assert [one.pages(pool) for pool in (0, 1)] == pages
    assert toy.cache.evict((9, 9)) == (0, 0)
    toy.cache.release(other)
    toy.cache.check_integrity()
    assert all(toy.pools[0].state(page) is PageState.CACHED for page in pages[0])
    toy.cache.release(one)
    toy.cache.check_integrity()
    assert toy.used() == (0, 5)
    assert toy.cache._tree.roots == {}


def test_what_is_inserted_below_is_out_of_reach_too() -> None:
    toy = Toy(4)
    lease = toy.hold("ab")
    poison(toy, "ab")
    lease = toy.insert(lease, "abcd").lease
    toy.cache.check_integrity()
    assert lease.num_pages == 4
    assert toy.hit("abcd") == ""
    toy.cache.release(lease)
    assert toy.used() == (0, 5)
    toy.cache.check_integrity()


def test_the_same_tokens_computed_anew_are_cached() -> None:
    toy = Toy(4)
    old = toy.hold("abcd")
    poison(toy, "abcd")
    toy.put("abcd")
    assert toy.hit("abcd") == "abcd"
    toy.cache.release(old)
    toy.cache.check_integrity()
    assert toy.hit("abcd") == "abcd"
    assert toy.used() == (4, 4 + 5)


def test_routers_hear_of_it_once() -> None:
    toy = Toy(4)
    held = toy.hold("abcd")
    toy.cache.drain_events()
    poison(toy, "abcd", first_page=2)
    _, keys = toy.text("abcd")
    assert toy.cache.drain_events().evicted == keys[32:]
    assert toy.cache.snapshot().stored == keys[:32]
    toy.insert(held, "abcdef")
    toy.cache.clear()
    events = toy.cache.drain_events()
    assert (events.stored, events.evicted) == (b"", b"")


def test_a_match_from_before_is_stale() -> None:
    toy = Toy(4)
    toy.put("ab")
    match = toy.match("ab")
    poison(toy, "ab")
    assert match.version != toy.cache.version


def test_windows_and_states_go_with_it() -> None:
    toy = Toy(4, (16, 16, 4), retentions=(KEEP_ALL, window(2), STATE))
    toy.cache.release(toy.insert(toy.cache.empty_lease(ALICE), "abcd", toy.take(4, 4, 1)).lease)
    lease = toy.lease("abcd")
    poison(toy, "abcd")
    assert [len(lease.pages(pool)) for pool in range(3)] == [4, 2, 1]
    toy.cache.release(lease)
    toy.cache.check_integrity()
    assert toy.used() == (0, 5, 0)


@pytest.mark.parametrize("word", ["", "xyz"])
def test_a_path_that_is_not_there_changes_nothing(word: str) -> None:
    toy = Toy(4)
    poison(toy, word)
    toy.put("ab")
    version = toy.cache.version
    poison(toy, word)
    assert toy.cache.version == version
    assert toy.hit("ab") == "ab"
