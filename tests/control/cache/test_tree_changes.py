"""Numbered changes, and the snapshot that heals a gap."""

from deltaserve.control.cache.block_log import BlockLog, BlocksRemoved
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.cache.tree_changes import MAX_PENDING_KEYS, EventLog, FiledEventLog
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.wire.messages import Events
from tests.control.cache.toys import ALICE, BOB, Toy


def split_keys(packed: bytes) -> set[bytes]:
    return {packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)}


def told(first: int, stored: bytes, evicted: bytes) -> Events:
    return Events(first=first, stored=stored, evicted=evicted)


def replay(known: set[bytes], events: Events) -> set[bytes]:
    """What a receiver does with them."""
    return (known | split_keys(events.stored)) - split_keys(events.evicted)


def test_stored_and_evicted_keys_are_numbered() -> None:
    toy = Toy(4)
    toy.put("abc")
    _, keys = toy.text("abc")
    assert toy.cache.drain_events() == told(0, keys, b"")
    toy.cache.evict((1, 1))
    toy.put("x", namespace=BOB)
    _, other = toy.text("x", BOB)
    assert toy.cache.drain_events() == told(3, other, keys[32:])
    assert toy.cache.drain_events() == told(5, b"", b"")


def test_adopted_pages_and_splits_are_no_events() -> None:
    toy = Toy(4)
    toy.put("abcd")
    cold = toy.cache.empty_lease(ALICE)
    toy.cache.drain_events()
    toy.insert(cold, "abcd")
    toy.lease("ab")
    assert toy.cache.drain_events() == told(4, b"", b"")


def test_within_one_drain_the_last_change_of_a_key_wins() -> None:
    toy = Toy(4)
    toy.put("ab")
    toy.cache.clear()
    toy.put("a")
    _, keys = toy.text("ab")
    events = toy.cache.drain_events()
    assert events == told(0, keys[:16], keys[16:])


def test_replay_equals_snapshot() -> None:
    toy = Toy(4)
    known: set[bytes] = set()
    for word in ("abcd", "abxy", "pq", "abcz"):
        toy.put(word)
        known = replay(known, toy.cache.drain_events())
        toy.cache.evict((1, 1))
        known = replay(known, toy.cache.drain_events())
        assert known == split_keys(toy.cache.snapshot().stored)


def test_a_snapshot_is_continued_by_the_next_drain() -> None:
    """Changes pending at the snapshot come again with the drain; they must not undo what happened since."""
    toy = Toy(4)
    toy.put("ab", "xy")
    toy.cache.drain_events()
    toy.cache.evict((2, 2))
    toy.put("cd")
    snapshot = toy.cache.snapshot()
    known = split_keys(snapshot.stored)
    toy.put("ab")
    toy.cache.release(toy.lease("xy"))
    toy.cache.evict((2, 2))
    events = toy.cache.drain_events()
    assert events.first == snapshot.first == 4
    assert replay(known, events) == split_keys(toy.cache.snapshot().stored)


def test_what_nobody_drains_is_bounded_and_leaves_a_gap() -> None:
    log = EventLog()
    for _ in range(MAX_PENDING_KEYS):
        log.stored(bytes(KEY_BYTES))
    assert log.drain() == told(0, bytes(KEY_BYTES), b"")
    log.stored(bytes(KEY_BYTES) * MAX_PENDING_KEYS)
    log.evicted(bytes(KEY_BYTES))
    log.stored(b"k" * KEY_BYTES)
    assert log.drain() == told(1 + MAX_PENDING_KEYS + 1, b"k" * KEY_BYTES, b"")


def key(number: int) -> bytes:
    return bytes([number]) * KEY_BYTES


def test_a_page_is_there_as_long_as_tree_or_file_holds_it() -> None:
    log = FiledEventLog()
    log.stored(key(1) + key(2))
    log.filed(key(1))
    assert log.drain() == told(0, key(1) + key(2), b"")
    log.evicted(key(2) + key(1))
    assert log.drain() == told(2, b"", key(2))
    assert log.beside_tree() == key(1)
    log.stored(key(1))
    assert log.beside_tree() == b""
    log.evicted(key(1))
    log.unfiled(key(1))
    assert log.drain() == told(3, b"", key(1))
    assert log.beside_tree() == b""


def test_what_the_file_forgets_is_still_in_the_tree() -> None:
    log = FiledEventLog()
    log.stored(key(1))
    log.filed(key(1))
    log.unfiled(key(1))
    assert log.drain() == told(0, key(1), b"")
    log.evicted(key(1))
    assert log.drain() == told(1, b"", key(1))


def removed(blocks: BlockLog) -> list[bytes]:
    """Keys that others were told to be gone since the last call."""
    taken = blocks.take()
    assert taken is not None
    return [change.keys for change in taken if isinstance(change, BlocksRemoved)]


def test_routers_of_others_hear_that_a_page_is_gone_when_neither_holds_it() -> None:
    blocks = BlockLog(100)
    log = FiledEventLog(blocks)
    log.stored(key(1) + key(2) + key(3))
    log.filed(key(1))
    log.filed(key(2))
    assert log.evicted(key(2) + key(3)) == key(3)  # whoever evicts tells of it
    assert removed(blocks) == []
    log.unfiled(key(2))
    log.unfiled(key(1))
    assert removed(blocks) == [key(2)]
    assert log.evicted(key(1)) == key(1)


def test_a_tree_with_a_file_tells_others_when_neither_holds_a_page() -> None:
    toy, blocks = Toy(4), BlockLog(100)
    log = FiledEventLog(blocks)
    retentions = toy.retentions[: len(toy.pools)]
    toy.cache = PrefixCache(toy.page_size, toy.pools, retentions, blocks=blocks, events=log)
    toy.put("abc")
    _, keys = toy.text("abc")
    first, second = keys[:KEY_BYTES], keys[KEY_BYTES : 2 * KEY_BYTES]
    log.filed(first)
    log.filed(second)
    toy.cache.clear()
    changes = toy.cache.drain_blocks()
    assert [change.keys for change in changes if isinstance(change, BlocksRemoved)] == [keys[2 * KEY_BYTES :]]
    log.unfiled(second)
    assert toy.cache.drain_blocks() == (BlocksRemoved(second),)


def test_a_page_that_is_stored_when_it_has_left_the_tree_is_told() -> None:
    log = FiledEventLog()
    log.stored(key(1))
    log.evicted(key(1))
    assert log.drain() == told(0, b"", key(1))
    log.filed(key(1))
    assert log.drain() == told(1, key(1), b"")
