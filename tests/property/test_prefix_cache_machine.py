"""PrefixCache against a dictionary {(namespace, token prefix): pages}, under random operations.

Two pools, two namespaces, prompts over two letters (one letter is one page) with a partial page at the end. The
model knows nothing of nodes or keys: it holds every page by the whole token path that ends in it. In half of the runs
all page keys collide.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.base.errors import StateError
from deltaserve.base.ids import Namespace, PageId
from deltaserve.base.keys import KEY_BYTES
from deltaserve.cache.allocator import PagePool
from deltaserve.cache.pages import PageState
from deltaserve.cache.prefix_cache import Lease, Match
from tests.cache.toys import ALICE, BOB, Toy, spell

LETTERS = "ab"
WORDS = st.text(LETTERS, max_size=6)
NAMESPACES = st.sampled_from([ALICE, BOB])
Path = tuple[Namespace, str]


class Held:
    """A live lease and what it was given."""

    def __init__(self, lease: Lease, word: str) -> None:
        self.lease = lease
        self.word = word
        self.pages = tuple(lease.pages(pool) for pool in (0, 1))


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 4, 16, 64]), num_pages=st.integers(8, 40), colliding=st.booleans())
    def start(self, page_size: int, num_pages: int, colliding: bool) -> None:
        self.toy = Toy(page_size, (num_pages, num_pages + 9), colliding)
        self.cache = self.toy.cache
        self.tree: dict[Path, tuple[PageId, ...]] = {}
        self.held: list[Held] = []
        self.stale: list[Match] = []
        self.pins: list[tuple[PagePool, tuple[PageId, ...]]] = []
        self.known: set[bytes] = set()
        self.next_event = 0

    # ------------------------------------------------------------ helpers

    def cached_part(self, namespace: Namespace, word: str) -> str:
        length = 0
        while length < len(word) and (namespace, word[: length + 1]) in self.tree:
            length += 1
        return word[:length]

    def key(self, path: Path) -> bytes:
        _, keys = self.toy.text(path[1], path[0])
        return keys[-KEY_BYTES:]

    def note_dropped(self) -> set[Path]:
        """Bring the model in line with what an eviction left; returns what went."""
        contents = self.toy.contents()
        size = self.toy.page_size
        gone = {path for path in self.tree if (path[0], spell(path[1], size)) not in contents}
        for path in gone:
            del self.tree[path]
        for namespace, word in self.tree:
            assert len(word) == 1 or (namespace, word[:-1]) in self.tree, "a page outlived the one before it"
        for held in self.held:
            assert self.cached_part(held.lease.namespace, held.word) == held.word, "a leased page was evicted"
        return gone

    def make_room(self, n: int) -> bool:
        """Evict for an allocation of n pages in each pool, as admission does; whether that was enough."""
        self.cache.evict([max(0, n - pool.num_free) for pool in self.toy.pools])
        self.note_dropped()
        return all(pool.num_free >= n for pool in self.toy.pools)

    def expected_pages(self, namespace: Namespace, word: str, pool: int) -> tuple[PageId, ...]:
        return tuple(self.tree[namespace, word[: end + 1]][pool] for end in range(len(word)))

    def check_ended(self, lease: Lease) -> None:
        assert not lease.live
        with pytest.raises(StateError):
            self.cache.release(lease)
        with pytest.raises(StateError):
            lease.pages(0)

    def insert_at(self, held: Held, tail: str, pinned: bool) -> Held | None:
        """Insert `tail` below a lease; None when there is no room for it."""
        namespace, word = held.lease.namespace, held.word + tail
        if not self.make_room(len(tail)):
            return None
        ours = self.toy.allocate(len(tail))
        if pinned:
            for pool, pages in zip(self.toy.pools, ours, strict=True):
                pool.pin(pages)
                self.pins.append((pool, pages))
        num_twins = len(self.cached_part(namespace, word)) - len(held.word)
        done = self.toy.insert(held.lease, word, ours)
        assert done.num_adopted_pages == num_twins
        for index in range(num_twins, len(tail)):
            self.tree[namespace, word[: len(held.word) + index + 1]] = tuple(pages[index] for pages in ours)
        for pool, pages in zip(self.toy.pools, ours, strict=True):
            assert all(pool.state(page) is PageState.FREE for page in pages[:num_twins])
        self.held.remove(held)
        self.held.append(Held(done.lease, word))
        self.check_ended(held.lease)
        return self.held[-1]

    def hold(self, namespace: Namespace, word: str) -> Held:
        """Lease what is cached of a word."""
        lease = self.toy.lease(word, namespace)
        hit = self.cached_part(namespace, word)
        assert lease.num_pages == len(hit)
        for pool in (0, 1):
            assert lease.pages(pool) == self.expected_pages(namespace, hit, pool)
        self.held.append(Held(lease, hit))
        return self.held[-1]

    # ------------------------------------------------------------ rules

    @rule(namespace=NAMESPACES, word=WORDS, extra=st.integers(0, 3), cut=st.none() | st.integers(0, 40))
    def match(self, namespace: Namespace, word: str, extra: int, cut: int | None) -> None:
        tokens, keys = self.toy.text(word, namespace)
        size = self.toy.page_size
        tokens += bytes(4 * min(extra, size - 1))
        max_len = None if cut is None else cut * size // 4
        match = self.cache.match(namespace, tokens, keys, max_len)
        expected = len(self.cached_part(namespace, word))
        if max_len is not None:
            expected = min(expected, max_len // size)
        assert match.num_pages == expected
        assert match.num_tokens == expected * size
        self.stale = [*self.stale[-3:], match]

    @rule(namespace=NAMESPACES, word=WORDS)
    def lease(self, namespace: Namespace, word: str) -> None:
        self.hold(namespace, word)

    @rule(namespace=NAMESPACES, word=WORDS, pinned=st.booleans())
    def serve(self, namespace: Namespace, word: str, pinned: bool) -> None:
        """A whole request at once: the tree fills with unlocked nodes."""
        held = self.hold(namespace, word)
        held = self.insert_at(held, word[len(held.word) :], pinned) or held
        self.held.remove(held)
        self.cache.release(held.lease)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def lease_an_old_match(self, data: st.DataObject) -> None:
        match = data.draw(st.sampled_from(self.stale))
        self.stale.remove(match)
        if match.version != self.cache.version:
            with pytest.raises(StateError):
                self.cache.lease(match)
            return
        lease = self.cache.lease(match)
        assert lease.num_pages == match.num_pages
        word = next((w for n, w in self.tree if n == match.namespace and self.pages_are(lease, n, w)), "")
        assert len(word) == lease.num_pages
        self.held.append(Held(lease, word))

    def pages_are(self, lease: Lease, namespace: Namespace, word: str) -> bool:
        return len(word) == lease.num_pages and lease.pages(0) == self.expected_pages(namespace, word, 0)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tail=st.text(LETTERS, max_size=4), pinned=st.booleans())
    def insert(self, data: st.DataObject, tail: str, pinned: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.insert_at(held, tail, pinned)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.cache.release(held.lease)
        self.check_ended(held.lease)

    @rule(needs=st.tuples(st.integers(0, 6), st.integers(0, 6)))
    def evict(self, needs: tuple[int, int]) -> None:
        before = [pool.num_free for pool in self.toy.pools]
        freed = self.cache.evict(needs)
        gone = self.note_dropped()
        assert freed == tuple(pool.num_free - start for pool, start in zip(self.toy.pools, before, strict=True))
        assert all(count <= len(gone) for count in freed)
        enough = all(count >= need for count, need in zip(freed, needs, strict=True))
        assert enough or self.cache.evictable_pages(0) == 0
        if not self.pins:
            assert len(gone) <= max(needs), "more was evicted than anybody needed"

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.note_dropped()
        leased = {(held.lease.namespace, held.word[: end + 1]) for held in self.held for end in range(len(held.word))}
        assert self.tree.keys() == leased
        assert self.cache.evictable_pages(0) == 0

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        pool, pages = self.pins.pop(index)
        pool.unpin(pages)

    @precondition(lambda self: not self.toy.colliding)
    @rule(missed=st.booleans())
    def receive(self, missed: bool) -> None:
        """A receiver of events. One that missed some forgets all, and goes on from a snapshot."""
        if missed:
            snapshot = self.cache.snapshot()
            self.known, self.next_event = packed_set(snapshot.stored), snapshot.next_event
            assert len(snapshot.stored) == len(self.known) * KEY_BYTES
        else:
            events = self.cache.drain_events()
            assert events.first == self.next_event
            self.known = (self.known | packed_set(events.stored)) - packed_set(events.evicted)
            self.next_event += (len(events.stored) + len(events.evicted)) // KEY_BYTES
        assert self.known == {self.key(path) for path in self.tree}

    # ------------------------------------------------------------ invariants

    @invariant()
    def books_are_right(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_leases == len(self.held)
        leased = {(held.lease.namespace, held.word[: end + 1]) for held in self.held for end in range(len(held.word))}
        for pool in (0, 1):
            assert self.cache.protected_pages(pool) == len(leased)
            assert self.cache.evictable_pages(pool) == len(self.tree) - len(leased)

    @invariant()
    def tree_is_the_model(self) -> None:
        size = self.toy.page_size
        assert self.toy.contents() == {(name, spell(word, size)): pages for (name, word), pages in self.tree.items()}

    @invariant()
    def leases_keep_their_pages(self) -> None:
        for held in self.held:
            assert tuple(held.lease.pages(pool) for pool in (0, 1)) == held.pages
            path = held.lease.path()
            bounds = [0, *(end for _, _, end in path)]
            assert [start for _, start, _ in path] == bounds[:-1]
            assert bounds[-1] == held.lease.num_tokens

    def teardown(self) -> None:
        """Whatever happened: with every lease and pin gone, every page is free or evictable, and then free."""
        if not hasattr(self, "toy"):
            return
        for held in self.held:
            self.cache.release(held.lease)
        for pool, pages in self.pins:
            pool.unpin(pages)
        assert self.cache.protected_pages(0) == 0
        self.cache.clear()
        self.cache.check_integrity()
        assert self.toy.contents() == {}
        assert self.toy.used() == (0, 5)


def packed_set(packed: bytes) -> set[bytes]:
    return {packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)}


PrefixCacheMachine.TestCase.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=40)
TestPrefixCache = PrefixCacheMachine.TestCase
