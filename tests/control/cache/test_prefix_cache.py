"""Match and insert by example. A word is a prompt, one letter is one page."""

from collections.abc import Callable

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.cache.radix import Packed
from deltaserve.core.errors import StateError
from deltaserve.core.tokens import pack_u32
from tests.control.cache.toys import ALICE, BOB, Toy, keys_of

# ---------------------------------------------------------------- match


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_longest_prefix_in_whole_pages(page_size: int) -> None:
    toy = Toy(page_size)
    toy.put("abcd", "abxy")
    for word, hit in {"": "", "a": "a", "abcd": "abcd", "abcdef": "abcd", "abxz": "abx", "abq": "ab", "z": ""}.items():
        assert toy.hit(word) == hit
        match = toy.match(word)
        assert match.num_tokens == match.num_pages * page_size == len(hit) * page_size
    toy.cache.check_integrity()


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_a_partial_page_never_matches(page_size: int) -> None:
    toy = Toy(page_size)
    toy.put("abc")
    tokens, _ = toy.text("abc")
    cut = tokens[:-4]
    assert toy.cache.match(ALICE, cut, keys_of(cut, page_size, ALICE)).num_pages == 2
    longer = tokens + pack_u32([1])
    assert toy.cache.match(ALICE, longer, keys_of(longer, page_size, ALICE)).num_pages == 3


@pytest.mark.parametrize(("max_len", "num_pages"), [(12, 3), (11, 2), (8, 2), (7, 1), (4, 1), (3, 0), (0, 0), (99, 3)])
def test_max_len_is_rounded_down_to_pages(max_len: int, num_pages: int) -> None:
    toy = Toy(4)
    toy.put("abc")
    match = toy.match("abc", max_len=max_len)
    assert match.num_pages == num_pages
    lease = toy.cache.lease(match)
    assert lease.num_tokens == num_pages * 4
    toy.cache.check_integrity()


def test_namespaces_never_match_each_other() -> None:
    toy = Toy()
    toy.put("abc")
    tokens, keys = toy.text("abc")
    assert toy.hit("abc", BOB) == ""
    assert toy.cache.match(BOB, tokens, keys).num_pages == 0, "not even with the other namespace's keys"
    toy.put("abc", namespace=BOB)
    pages = {name: toy.lease("abc", name).pages(0) for name in (ALICE, BOB)}
    assert not set(pages[ALICE]) & set(pages[BOB])


def test_equal_keys_never_make_unequal_tokens_equal() -> None:
    """A collision of the hash, in every place where keys are looked at."""
    toy = Toy(4)
    tokens, keys = toy.text("abcd")
    lease = toy.cache.empty_lease(ALICE)
    toy.cache.release(toy.cache.insert(lease, ALICE, tokens, keys, toy.allocate(4)).lease)
    for word, num_pages in {"xbcd": 0, "axcd": 1, "abxd": 2, "abcx": 3}.items():
        other, _ = toy.text(word)
        match = toy.cache.match(ALICE, other, keys)
        assert match.num_pages == num_pages
        done = toy.cache.insert(toy.cache.lease(match), ALICE, other, keys, toy.allocate(4 - num_pages))
        assert done.num_adopted_pages == 0
        toy.cache.release(done.lease)
        assert toy.cache.match(ALICE, other, keys).num_pages == 4
    assert toy.cache.match(ALICE, tokens, keys).num_pages == 4
    assert toy.cache.evictable_pages(0) == 4 + 4 + 3 + 2 + 1
    toy.cache.check_integrity()


def test_wrong_keys_cannot_bend_the_tree() -> None:
    """Keys that differ where tokens agree: a bug of the caller, but no page may be shared or lost by it."""
    toy = Toy(4)
    toy.put("abcd")
    tokens, _ = toy.text("abcz")
    wrong = keys_of(tokens, 4, BOB)
    assert toy.cache.match(ALICE, tokens, wrong).num_pages == 3
    done = toy.cache.insert(toy.cache.empty_lease(ALICE), ALICE, tokens, wrong, toy.allocate(4))
    assert done.num_adopted_pages == 3
    toy.cache.check_integrity()


def test_a_path_that_leaves_a_node_early_never_reaches_its_children() -> None:
    """The page after the parting is the first page of a child: same tokens, another position."""
    toy = Toy(4)
    toy.put("aab", "aaab")
    assert toy.hit("abb") == "a"
    assert toy.hit("abab") == "a"
    assert toy.hold("abbb").num_pages == 4
    toy.cache.check_integrity()


def test_match_is_capped_by_the_keys_given() -> None:
    toy = Toy(4)
    toy.put("abcd")
    tokens, keys = toy.text("abcd")
    assert toy.cache.match(ALICE, tokens, keys[:32]).num_pages == 2


# ---------------------------------------------------------------- insert


def test_a_duplicate_is_adopted_and_our_pages_are_freed() -> None:
    toy = Toy(4)
    mine, theirs = toy.cache.empty_lease(ALICE), toy.cache.empty_lease(ALICE)
    first = toy.insert(theirs, "abcd").lease
    ours = toy.allocate(6)
    done = toy.insert(mine, "abcdef", ours)
    assert done.num_adopted_pages == 4
    for pool in (0, 1):
        assert done.lease.pages(pool) == first.pages(pool) + ours[pool][4:]
        assert all(toy.pools[pool].state(page) is PageState.FREE for page in ours[pool][:4])
    assert toy.cache.num_leases == 2
    toy.cache.check_integrity()


def test_a_whole_duplicate_is_adopted() -> None:
    toy = Toy(4)
    mine = toy.cache.empty_lease(ALICE)
    toy.put("abcd")
    free = [pool.num_free for pool in toy.pools]
    version = toy.cache.version
    done = toy.insert(mine, "abcd")
    assert done.num_adopted_pages == 4
    assert [pool.num_free for pool in toy.pools] == free
    assert toy.cache.version == version, "nothing that a path shows has changed"
    assert toy.cache.protected_pages(0) == 4
    toy.cache.check_integrity()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_partial_duplicate_splits_the_node_it_ends_in(cut: int) -> None:
    toy = Toy(4)
    mine = toy.cache.empty_lease(ALICE)
    toy.put("abcd")
    word = "abcd"[:cut] + "xy"
    done = toy.insert(mine, word)
    assert done.num_adopted_pages == cut
    assert done.lease.num_pages == cut + 2
    assert (toy.cache.protected_pages(0), toy.cache.evictable_pages(0)) == (cut + 2, 4 - cut)
    assert toy.hit("abcd") == "abcd"
    assert toy.hit(word) == word
    toy.cache.check_integrity()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_duplicate_longer_than_ours_is_cut_where_we_end(cut: int) -> None:
    toy = Toy(4)
    mine = toy.cache.empty_lease(ALICE)
    toy.put("abcd")
    done = toy.insert(mine, "abcd"[:cut])
    assert done.num_adopted_pages == done.lease.num_pages == cut
    toy.cache.check_integrity()


def test_pinned_duplicates_are_held_until_unpinned() -> None:
    toy = Toy(4)
    mine = toy.cache.empty_lease(ALICE)
    toy.put("ab")
    ours = toy.allocate(2)
    for pool, pages in zip(toy.pools, ours, strict=True):
        pool.pin(pages)
    free = [pool.num_free for pool in toy.pools]
    assert toy.insert(mine, "ab", ours).num_adopted_pages == 2
    assert [pool.num_free for pool in toy.pools] == free
    assert [pool.num_held for pool in toy.pools] == [2, 2]
    toy.cache.check_integrity()
    for pool, pages in zip(toy.pools, ours, strict=True):
        pool.unpin(pages)
    assert [pool.num_free for pool in toy.pools] == [count + 2 for count in free]
    toy.cache.check_integrity()


def test_inserting_nothing_renews_the_lease() -> None:
    toy = Toy(4)
    lease = toy.hold("ab")
    pages = lease.pages(0)
    done = toy.insert(lease, "ab")
    assert not lease.live
    assert done.num_adopted_pages == 0
    assert done.lease.pages(0) == pages
    toy.cache.check_integrity()


def test_a_refused_insert_changes_nothing() -> None:
    toy = Toy(4)
    lease = toy.hold("ab")
    tokens, keys = toy.text("abcd")
    good = toy.allocate(2)
    granted = (toy.pools[0].grant(2) or (), good[1])
    taken = toy.pools[1].allocate(1) or ()
    before = (toy.contents(), toy.used(), toy.cache.version, toy.cache.num_leases)
    other_tokens, other_keys = toy.text("axcd")
    bad_calls = {
        "pages not owned": (StateError, (lease, ALICE, tokens, keys, granted)),
        "second pool not owned": (StateError, (lease, ALICE, tokens, keys, (good[0], (good[1][0], good[1][0])))),
        "more window pages than the path has": (ValueError, (lease, ALICE, tokens, keys, ((), good[1] + taken))),
        "a pool is missing": (ValueError, (lease, ALICE, tokens, keys, good[:1])),
        "too few tokens": (ValueError, (lease, ALICE, tokens[:-4], keys, good)),
        "too few keys": (ValueError, (lease, ALICE, tokens, keys[:-16], good)),
        "another namespace": (ValueError, (lease, BOB, tokens, keys, good)),
        "another path": (ValueError, (lease, ALICE, other_tokens, other_keys, good)),
    }
    for why, (error, arguments) in bad_calls.items():
        with pytest.raises(error):
            toy.cache.insert(*arguments)
        assert (toy.contents(), toy.used(), toy.cache.version, toy.cache.num_leases) == before, why
        assert lease.live
        toy.cache.check_integrity()
    assert toy.cache.insert(lease, ALICE, tokens, keys, good).lease.num_pages == 4


# ---------------------------------------------------------------- version, counts, construction


def test_version_changes_on_split_insert_and_evict_only() -> None:
    toy = Toy(4)
    seen = [toy.cache.version]

    def changed() -> bool:
        seen.append(toy.cache.version)
        return seen[-1] != seen[-2]

    lease = toy.hold("abcd")
    assert changed()
    toy.match("abcd")
    assert not changed()
    whole = toy.lease("abcd")
    assert not changed()
    part = toy.lease("ab")
    assert changed()
    for held in (lease, whole, part):
        toy.cache.release(held)
    assert not changed()
    toy.cache.evict((1, 1))
    assert changed()
    toy.cache.evict((0, 0))
    assert not changed()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_packed_ids_of_any_type_are_read_in_place(kind: Callable[[bytes], Packed]) -> None:
    toy = Toy(4)
    tokens, keys = toy.text("abcd")
    lease = toy.cache.empty_lease(ALICE)
    lease = toy.cache.insert(lease, ALICE, kind(tokens), kind(keys), toy.allocate(4)).lease
    other, other_keys = toy.text("abxy")
    assert toy.cache.match(ALICE, kind(other), kind(other_keys)).num_pages == 2
    assert toy.cache.match(ALICE, kind(tokens), kind(keys)).num_pages == 4
    assert toy.cache.match(ALICE, kind(other), kind(keys)).num_pages == 2, "tokens decide, keys only hint"
    longer, longer_keys = toy.text("abcdef")
    lease = toy.cache.insert(lease, ALICE, kind(longer), kind(longer_keys), toy.allocate(2)).lease
    assert toy.hit("abcdefgh") == "abcdef"
    grown = bytearray(longer)
    toy.cache.match(ALICE, grown, longer_keys)
    grown += b"more"  # raises if the cache still had a view of it
    toy.cache.check_integrity()


def test_one_pool_is_enough() -> None:
    toy = Toy(64, (32,))
    toy.put("abcd", "abxy")
    assert toy.lease("abxy").pages(0) == (0, 1, 4, 5)
    assert isinstance(toy.cache, PrefixCache)
    toy.cache.check_integrity()
