"""What the front knows of trees: numbering, snapshots, bounds, prefix lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.front.residency import Residency
from deltaserve.core.ids import Namespace, PeerName
from deltaserve.core.keys import KEY_BYTES, extend_keys, seed_key
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Events

NOW = 100.0
WORKER = PeerName("decode-0")
PAGE = 4


def chain(num_pages: int, branch: int = 0) -> bytes:
    """Keys of a prompt that differs from other branches from its first page on."""
    tokens = pack_u32(range(branch * 1000, branch * 1000 + num_pages * PAGE))
    return extend_keys(seed_key(b"secret", "model", PAGE, Namespace("a")), tokens, PAGE)


def snapshot(stored: bytes, first: int = 0) -> Events:
    return Events(first=first, stored=stored, evicted=b"", snapshot=True)


def pages(keys: bytes, start: int, end: int) -> bytes:
    return keys[start * KEY_BYTES : end * KEY_BYTES]


def test_an_unknown_worker_holds_nothing() -> None:
    assert Residency(100).hit_len(WORKER, chain(3), PAGE, NOW) == 0


@pytest.mark.parametrize("num_held", range(6))
def test_the_longest_resident_prefix_is_found(num_held: int) -> None:
    residency, keys = Residency(100), chain(5)
    assert residency.apply(WORKER, snapshot(pages(keys, 0, num_held) + chain(7, branch=1)))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == num_held * PAGE
    assert residency.hit_len(WORKER, chain(5, branch=2), PAGE, NOW) == 0
    assert residency.hit_len(PeerName("decode-1"), keys, PAGE, NOW) == 0


def test_changes_count_on_from_a_snapshot_whose_keys_count_nothing() -> None:
    residency, keys = Residency(100), chain(5)
    assert residency.apply(WORKER, snapshot(pages(keys, 0, 2), first=40))
    assert residency.apply(WORKER, Events(first=40, stored=pages(keys, 2, 5), evicted=b""))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 5 * PAGE
    assert residency.apply(WORKER, Events(first=43, stored=chain(1, 1), evicted=pages(keys, 4, 5)))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 4 * PAGE
    assert residency.apply(WORKER, Events(first=45, stored=b"", evicted=b""))


@pytest.mark.parametrize("first", [0, 39, 41, 45])
def test_a_gap_or_repeat_asks_for_a_snapshot_and_teaches_nothing(first: int) -> None:
    residency, keys = Residency(100), chain(5)
    residency.apply(WORKER, snapshot(pages(keys, 0, 2), first=40))
    assert not residency.apply(WORKER, Events(first=first, stored=pages(keys, 2, 5), evicted=b""))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 2 * PAGE
    assert not residency.apply(WORKER, Events(first=40, stored=pages(keys, 2, 5), evicted=b""))
    assert residency.apply(WORKER, snapshot(keys, first=50))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 5 * PAGE


def test_changes_before_any_snapshot_ask_for_one() -> None:
    assert not Residency(100).apply(WORKER, Events(first=0, stored=chain(1), evicted=b""))


def test_a_forgotten_worker_needs_a_snapshot() -> None:
    residency = Residency(100)
    residency.apply(WORKER, snapshot(chain(3), first=5))
    residency.forget(WORKER)
    assert residency.hit_len(WORKER, chain(3), PAGE, NOW) == 0
    assert not residency.apply(WORKER, Events(first=5, stored=chain(3), evicted=b""))


@pytest.mark.parametrize(("stored", "evicted"), [(chain(2)[:-1], b""), (b"", chain(2)[:-1])])
def test_a_torn_key_list_teaches_nothing(stored: bytes, evicted: bytes) -> None:
    residency = Residency(100)
    residency.apply(WORKER, snapshot(chain(3)))
    assert not residency.apply(WORKER, Events(first=0, stored=stored, evicted=evicted))
    assert residency.hit_len(WORKER, chain(3), PAGE, NOW) == 3 * PAGE


def test_a_full_view_keeps_its_prefixes_and_takes_more_after_evictions() -> None:
    residency, keys = Residency(3), chain(5)
    residency.apply(WORKER, snapshot(keys))
    assert residency.num_resident(WORKER) == 3
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 3 * PAGE
    residency.apply(WORKER, Events(first=0, stored=pages(keys, 3, 4), evicted=pages(keys, 2, 3)))
    assert residency.num_resident(WORKER) == 3
    residency.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_for_prefix_closed_trees_the_answer_is_exact(changes: list[tuple[int, int]]) -> None:
    """Each change sets how many pages of one branch are resident."""
    residency, held, number = Residency(1000), dict.fromkeys(range(4), 0), 0
    residency.apply(WORKER, snapshot(b""))
    for branch, count in changes:
        keys, had = chain(6, branch), held[branch]
        events = Events(first=number, stored=pages(keys, had, count), evicted=pages(keys, count, had))
        assert residency.apply(WORKER, events)
        held[branch], number = count, number + abs(count - had)
    for branch, count in held.items():
        assert residency.hit_len(WORKER, chain(6, branch), PAGE, NOW) == count * PAGE
    residency.check_integrity()


def test_what_was_placed_a_moment_ago_counts_as_held() -> None:
    residency, keys = Residency(100), chain(5)
    residency.expect(WORKER, keys, NOW)
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 5 * PAGE
    assert residency.hit_len(WORKER, chain(3), PAGE, NOW) == 3 * PAGE
    assert residency.hit_len(WORKER, chain(9), PAGE, NOW) == 5 * PAGE
    assert residency.hit_len(PeerName("decode-1"), keys, PAGE, NOW) == 0
    assert residency.hit_len(WORKER, keys, PAGE, NOW + 60.0) == 0, "Events would have told of it"
    residency.forget(WORKER)
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 0


def test_of_what_was_placed_and_what_is_held_the_longer_counts() -> None:
    residency, keys = Residency(100), chain(5)
    residency.expect(WORKER, keys[:32], NOW)
    assert residency.apply(WORKER, Events(first=0, stored=keys, evicted=b"", snapshot=True))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 5 * PAGE
    assert residency.apply(WORKER, Events(first=0, stored=b"", evicted=keys[16:]))
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 2 * PAGE


def test_few_prompts_are_expected_and_none_without_a_full_page() -> None:
    residency = Residency(100)
    residency.expect(WORKER, b"", NOW)
    assert residency.hit_len(WORKER, b"", PAGE, NOW) == 0
    chains = [chain(1) + bytes([number]) * 16 for number in range(9)]
    for keys in chains:
        residency.expect(WORKER, keys, NOW)
    assert residency.hit_len(WORKER, chains[-1], PAGE, NOW) == 2 * PAGE
    assert residency.hit_len(WORKER, chains[0], PAGE, NOW) == PAGE, "the first page is common to all"
    for number in range(2000):
        residency.expect(WORKER, number.to_bytes(16, "big"), NOW)
    residency.check_integrity()


def test_what_another_worker_computed_is_expected_no_more() -> None:
    """Prompts that begin alike, and are still to be computed there, are."""
    residency, keys, longer = Residency(100), chain(3), chain(5)
    residency.expect(WORKER, keys, NOW)
    residency.unexpect(WORKER, keys)
    assert residency.hit_len(WORKER, keys, PAGE, NOW) == 0
    for each in (keys, longer):
        residency.expect(WORKER, each, NOW)
    residency.unexpect(WORKER, longer)
    assert residency.hit_len(WORKER, longer, PAGE, NOW) == 3 * PAGE
    residency.unexpect(WORKER, chain(2, branch=1))
    residency.check_integrity()
