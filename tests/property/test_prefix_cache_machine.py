"""PrefixCache against a dictionary {(namespace, token prefix): what each pool holds}, under random operations.

Three pools of different sizes (FULL, WINDOW, STATE), two namespaces, prompts over two letters (one letter is one page)
with a partial page at the end. The model knows nothing of nodes, keys or order: it holds every page by the whole token
path that ends in it, a state by the path up to it, and asks of a prefix whether all that continuing needs is there. In
half of the runs all page keys collide.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.block_log import BlockChange, BlocksForgotten, BlocksRemoved, BlocksStored
from deltaserve.control.cache.eviction import KvEviction
from deltaserve.control.cache.pages import PageState
from deltaserve.control.cache.prefix_cache import Lease, Match, StateEviction
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace, PageId
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.tokens import TOKEN_BYTES
from tests.control.cache.toys import ALICE, BOB, STATE, Toy, longest, spell

LETTERS = "ab"
WORDS = st.text(LETTERS, max_size=6)
NAMESPACES = st.sampled_from([ALICE, BOB])
POOLS = range(3)
FULL_POOL, WINDOW_POOL, STATE_POOL = POOLS
TAIL_POOLS = (WINDOW_POOL, STATE_POOL)
Path = tuple[Namespace, str]
Held_pages = tuple[PageId | None, ...]


@dataclass(eq=False)
class Held:
    """A live lease and what it was given."""

    lease: Lease
    word: str
    severed: bool = False

    def __post_init__(self) -> None:
        self.note()

    def note(self) -> None:
        self.firsts = tuple(self.lease.first_page(pool) for pool in POOLS)
        self.pages = tuple(self.lease.pages(pool) for pool in POOLS)

    @property
    def namespace(self) -> Namespace:
        return self.lease.namespace


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_pages=st.integers(8, 40),
        num_window=st.integers(6, 30),
        num_states=st.integers(1, 10),
        window_len=st.integers(1, 80),
        colliding=st.booleans(),
        eviction=st.tuples(st.sampled_from(StateEviction), st.sampled_from(KvEviction)),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        num_window: int,
        num_states: int,
        window_len: int,
        colliding: bool,
        eviction: tuple[StateEviction, KvEviction],
    ) -> None:
        sizes, window = (num_pages, num_window + 5, num_states), Retention(Lifetime.WINDOW, window_len)
        states, kv = eviction
        self.toy = Toy(page_size, sizes, colliding, (KEEP_ALL, window, STATE), states, eviction=kv)
        self.cache = self.toy.cache
        self.tree: dict[Path, Held_pages] = {}
        self.held: list[Held] = []
        self.now = 0
        self.stale: list[tuple[Match, str]] = []
        self.pins: list[tuple[PagePool, tuple[PageId, ...]]] = []
        self.known: set[bytes] = set()
        self.next_event = 0
        self.blocks: dict[bytes, tuple[Namespace, bytes, bytes]] = {}

    # ------------------------------------------------------------ the model

    def cached_part(self, namespace: Namespace, word: str) -> str:
        length = 0
        while length < len(word) and (namespace, word[: length + 1]) in self.tree:
            length += 1
        return word[:length]

    def first_needed(self, pool: int, end: int) -> int:
        return self.cache.retentions[pool].first_needed(end * self.toy.page_size, self.toy.page_size)

    def has(self, namespace: Namespace, word: str, pool: int, first: int, end: int) -> bool:
        return all(self.tree[namespace, word[: index + 1]][pool] is not None for index in range(first, end))

    def longest(self, namespace: Namespace, word: str, pools: tuple[int, ...]) -> int:
        """Largest number of pages of a cached word at which all of these pools could continue."""
        ends = range(len(word), 0, -1)
        good = (end for end in ends if all(self.has(namespace, word, p, self.first_needed(p, end), end) for p in pools))
        return next(good, 0)

    def usable_part(self, namespace: Namespace, word: str) -> str:
        return word[: self.longest(namespace, self.cached_part(namespace, word), tuple(POOLS))]

    def key(self, path: Path) -> bytes:
        _, keys = self.toy.text(path[1], path[0])
        return keys[-KEY_BYTES:]

    def leased(self, pool: int) -> set[PageId]:
        return {page for held in self.held for page in held.pages[pool]}

    def note_dropped(self) -> list[int]:
        """Bring the model in line with what an eviction left; returns how many pages each pool lost."""
        contents = self.toy.contents()
        size = self.toy.page_size
        lost = [0, 0, 0]
        leased = [self.leased(pool) for pool in POOLS]
        for path, before in list(self.tree.items()):
            after = contents.get((path[0], spell(path[1], size)), (None, None, None))
            for pool in POOLS:
                if before[pool] != after[pool]:
                    assert after[pool] is None, "a page was exchanged"
                    assert before[pool] not in leased[pool], "a leased page was evicted"
                    lost[pool] += 1
            if after[FULL_POOL] is None:
                assert after == (None, None, None), "what other pools hold outlived the path"
                del self.tree[path]
            else:
                self.tree[path] = after
        for namespace, word in self.tree:
            assert len(word) == 1 or (namespace, word[:-1]) in self.tree, "a page outlived the one before it"
        return lost

    def make_room(self, needs: tuple[int, ...]) -> bool:
        """Evict for an allocation of so many pages in each pool, as admission does; whether that was enough."""
        pools = self.toy.pools
        self.cache.evict([max(0, need - pool.num_free) for need, pool in zip(needs, pools, strict=True)])
        self.note_dropped()
        return all(pool.num_free >= need for need, pool in zip(needs, pools, strict=True))

    def check_ended(self, lease: Lease) -> None:
        assert not lease.live
        with pytest.raises(StateError):
            self.cache.release(lease)
        with pytest.raises(StateError):
            lease.pages(0)

    def swap(self, old: Held, new: Held) -> Held:
        self.held.remove(old)
        self.held.append(new)
        self.check_ended(old.lease)
        return new

    # ------------------------------------------------------------ insert

    def insert_at(self, held: Held, tail: str, num_window: int, num_states: int, pinned: bool) -> Held | None:
        """Insert `tail` below a lease; None when there is no room for it."""
        namespace, word = held.namespace, held.word + tail
        needs = (len(tail), min(num_window, len(word)), min(num_states, len(word)))
        if not self.make_room(needs):
            return None
        ours = tuple(pool.allocate(n) or () for pool, n in zip(self.toy.pools, needs, strict=True))
        if pinned:
            for pool, pages in zip(self.toy.pools, ours, strict=True):
                pool.pin(pages)
                self.pins.append((pool, pages))
        done = self.toy.insert(held.lease, word, ours)
        assert done.lease.num_pages == len(word)
        for index in POOLS:
            assert done.lease.first_page(index) == self.expected_first(held, len(word), index, needs[index])
        if not held.severed:
            num_duplicates = len(self.cached_part(namespace, word)) - len(held.word)
            assert done.num_adopted_pages == num_duplicates
            self.note_inserted(namespace, word, ours)
        return self.swap(held, Held(done.lease, word, held.severed))

    def expected_first(self, held: Held, end: int, pool: int, num_handed_over: int) -> int:
        """What the old lease held and what was handed over, as far back as it has no gap and the end needs it."""
        had = {*range(held.firsts[pool], len(held.word)), *range(end - num_handed_over, end)}
        first = end
        while first > self.first_needed(pool, end) and first - 1 in had:
            first -= 1
        return first

    def note_inserted(self, namespace: Namespace, word: str, ours: tuple[tuple[PageId, ...], ...]) -> None:
        for pool, pages in enumerate(ours):
            duplicates = []
            for index, page in enumerate(pages, len(word) - len(pages)):
                path = namespace, word[: index + 1]
                found = self.tree.setdefault(path, (None, None, None))
                if found[pool] is None:
                    self.tree[path] = (*found[:pool], page, *found[pool + 1 :])
                else:
                    duplicates.append(page)
            assert all(self.toy.pools[pool].state(page) is PageState.FREE for page in duplicates)

    # ------------------------------------------------------------ rules

    @rule(namespace=NAMESPACES, word=WORDS, extra=st.integers(0, 3), cut=st.none() | st.integers(0, 40))
    def match(self, namespace: Namespace, word: str, extra: int, cut: int | None) -> None:
        tokens, keys = self.toy.text(word, namespace)
        size = self.toy.page_size
        tokens += bytes(4 * min(extra, size - 1))
        max_len = None if cut is None else cut * size // 4
        match = self.cache.match(namespace, tokens, keys, max_len)
        limit = len(word) if max_len is None else max_len // size
        cached = self.cached_part(namespace, word[:limit])
        assert match.reach == len(cached) * size
        assert match.num_pages == len(self.usable_part(namespace, cached))
        assert match.num_tokens == match.num_pages * size
        for pool in POOLS:
            assert longest(self.cache, match, pool) == self.longest(namespace, cached, (pool,)) * size
        self.stale = [*self.stale[-3:], (match, cached)]

    def hold(self, namespace: Namespace, word: str) -> Held:
        """Lease what is usable of a word, as a worker does that computes the rest."""
        usable = self.usable_part(namespace, word)
        held = Held(self.toy.lease(word, namespace), usable)
        assert held.lease.num_pages == len(usable)
        for pool in POOLS:
            assert held.firsts[pool] == self.first_needed(pool, len(usable))
        self.held.append(held)
        self.check_pages(held)
        return held

    def check_pages(self, held: Held) -> None:
        for pool in POOLS:
            indexes = range(held.firsts[pool], len(held.word))
            assert held.pages[pool] == tuple(self.tree[held.namespace, held.word[: i + 1]][pool] for i in indexes)

    @rule(namespace=NAMESPACES, word=WORDS)
    def lease(self, namespace: Namespace, word: str) -> None:
        self.hold(namespace, word)

    @rule(namespace=NAMESPACES, word=WORDS, beyond=st.integers(0, 50))
    def lease_kv(self, namespace: Namespace, word: str, beyond: int) -> None:
        """As a worker does whose missing part is sent to it."""
        num_tokens = len(word) * self.toy.page_size + beyond
        lease = self.cache.lease_kv(self.toy.match(word, namespace), num_tokens)
        self.held.append(Held(lease, self.cached_part(namespace, word)))
        self.check_kv_lease(self.held[-1], num_tokens)

    def check_kv_lease(self, held: Held, num_tokens: int) -> None:
        end = len(held.word)
        assert held.lease.num_pages == end
        for pool in POOLS:
            needed = min(end, self.cache.retentions[pool].first_seen(num_tokens, self.toy.page_size))
            is_state = self.cache.retentions[pool].lifetime is Lifetime.STATE
            whole = not is_state and self.has(held.namespace, held.word, pool, needed, end)
            assert held.firsts[pool] == (needed if whole else end)
        self.check_pages(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tail=st.text(LETTERS, max_size=4))
    def lengthen(self, data: st.DataObject, tail: str) -> None:
        held = data.draw(st.sampled_from(self.held))
        word = held.word + tail
        longer = self.cache.lengthen(held.lease, *self.toy.text(word, held.namespace))
        if longer is held.lease:
            assert held.severed or self.cached_part(held.namespace, word) == held.word
            return
        new = self.swap(held, Held(longer, word[: longer.num_pages], held.severed))
        if not held.severed:
            assert new.word == self.cached_part(held.namespace, word)
            self.check_kv_lease(new, len(word) * self.toy.page_size)

    @rule(namespace=NAMESPACES, word=WORDS, num_window=st.integers(0, 6), state=st.integers(0, 1), pinned=st.booleans())
    def serve(self, namespace: Namespace, word: str, num_window: int, state: int, pinned: bool) -> None:
        """A whole request at once: the tree fills with unlocked nodes."""
        held = self.hold(namespace, word)
        held = self.insert_at(held, word[len(held.word) :], num_window, state, pinned) or held
        self.held.remove(held)
        self.cache.release(held.lease)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def lease_an_old_match(self, data: st.DataObject) -> None:
        match, cached = data.draw(st.sampled_from(self.stale))
        self.stale.remove((match, cached))
        if match.version != self.cache.version:
            with pytest.raises(StateError):
                self.cache.lease(match)
            return
        assert self.cached_part(match.namespace, cached) == cached
        assert match.num_pages == len(self.usable_part(match.namespace, cached)), "it changed behind the version"
        held = Held(self.cache.lease(match), cached[: match.num_pages])
        self.held.append(held)
        self.check_pages(held)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        tail=st.text(LETTERS, max_size=4),
        num_window=st.integers(0, 8),
        state=st.integers(0, 1),
        pinned=st.booleans(),
    )
    def insert(self, data: st.DataObject, tail: str, num_window: int, state: int, pinned: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.insert_at(held, tail, num_window, state, pinned)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), beyond=st.integers(0, 100))
    def shrink(self, data: st.DataObject, beyond: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        firsts, pages = held.firsts, held.pages
        num_tokens = held.lease.num_tokens + beyond
        self.cache.shrink(held.lease, num_tokens)
        held.note()
        for pool in POOLS:
            needed = self.cache.retentions[pool].first_needed(num_tokens, self.toy.page_size)
            first = max(firsts[pool], min(len(held.word), needed))
            assert (held.firsts[pool], held.pages[pool]) == (first, pages[pool][first - firsts[pool] :])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_done=st.booleans(), seconds=st.sampled_from([0, 0, 1, 3, 20]), passed=st.integers(0, 4))
    def release(self, data: st.DataObject, is_done: bool, seconds: int, passed: int) -> None:
        """`is_done`: of a conversation that nobody comes back to; `seconds`: of one that goes on within so long."""
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.now += passed
        self.cache.tell_time(float(self.now))
        if seconds:
            assert self.cache.retain(held.lease, seconds) <= held.lease.num_pages
            assert self.cache.num_retained <= self.cache.pools[FULL_POOL].num_pages // 2
        if is_done:
            num_own = sum(held.namespace == name and held.word.startswith(word) for name, word in self.tree)
            assert self.cache.retire(held.lease) <= num_own
        else:
            self.cache.release(held.lease)
        self.check_ended(held.lease)

    @rule(namespace=NAMESPACES, word=WORDS, first=st.integers(0, 3))
    def poison(self, namespace: Namespace, word: str, first: int) -> None:
        """All that was computed from the poisoned part of the path is out of reach; leases keep their pages."""
        cached = self.cached_part(namespace, word)
        self.cache.poison(namespace, *self.toy.text(word, namespace), first)
        if len(cached) <= first:
            return
        top = cached[: first + 1]
        leased = [self.leased(pool) for pool in POOLS]
        for path in [path for path in self.tree if path[0] == namespace and path[1].startswith(top)]:
            page = self.tree.pop(path)[FULL_POOL]
            assert page is not None
            kept = self.toy.pools[FULL_POOL].state(page) is PageState.CACHED
            assert kept == (page in leased[FULL_POOL])
        for held in self.held:
            held.severed |= held.namespace == namespace and held.word.startswith(top)

    @rule(needs=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)))
    def evict(self, needs: tuple[int, int, int]) -> None:
        before = [pool.num_free for pool in self.toy.pools]
        evictable = [self.cache.evictable_pages(pool) for pool in POOLS]
        freed = self.cache.evict(needs)
        self.note_dropped()
        gone = [evictable[pool] - self.cache.evictable_pages(pool) for pool in POOLS]
        assert freed == tuple(pool.num_free - start for pool, start in zip(self.toy.pools, before, strict=True))
        for pool, need in enumerate(needs):
            assert freed[pool] <= gone[pool]
            assert freed[pool] >= need or self.cache.evictable_pages(pool) == 0
        if not self.pins:
            assert gone[FULL_POOL] == min(needs[FULL_POOL], evictable[FULL_POOL]), "more than anybody needed"
            if not gone[FULL_POOL]:
                assert gone == [min(need, had) for need, had in zip(needs, evictable, strict=True)]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.note_dropped()
        assert all(self.cache.evictable_pages(pool) == 0 for pool in POOLS)

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
            self.known, self.next_event = packed_set(snapshot.stored), snapshot.first
            assert len(snapshot.stored) == len(self.known) * KEY_BYTES
        else:
            events = self.cache.drain_events()
            assert events.first == self.next_event
            self.known = (self.known | packed_set(events.stored)) - packed_set(events.evicted)
            self.next_event += (len(events.stored) + len(events.evicted)) // KEY_BYTES
        assert self.known == {self.key(path) for path in self.tree}

    @precondition(lambda self: not self.toy.colliding)
    @rule()
    def listen(self) -> None:
        """Somebody else, who is told pages with their ids and knows no keys but as names of pages."""
        for change in self.cache.drain_blocks():
            hear(self.blocks, change, self.toy.page_size)
        assert sorted(paths_of(self.blocks)) == sorted(
            (name, spell(word, self.toy.page_size)) for name, word in self.tree
        )

    # ------------------------------------------------------------ invariants

    @invariant()
    def accounts_are_right(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_leases == len(self.held)
        for pool in POOLS:
            leased = self.leased(pool)
            in_tree = self.toy.pools[pool].count(PageState.CACHED)
            assert self.cache.protected_pages(pool) == len(leased)
            assert self.cache.evictable_pages(pool) == in_tree - len(leased)

    @invariant()
    def tree_is_the_model(self) -> None:
        size = self.toy.page_size
        assert self.toy.contents() == {(name, spell(word, size)): pages for (name, word), pages in self.tree.items()}

    @invariant()
    def leases_keep_their_pages(self) -> None:
        for held in self.held:
            assert tuple(held.lease.pages(pool) for pool in POOLS) == held.pages
            assert tuple(held.lease.first_page(pool) for pool in POOLS) == held.firsts
            path = held.lease.path()
            bounds = [0, *(end for _, _, end in path)]
            assert [start for _, start, _ in path] == bounds[:-1]
            assert bounds[-1] == held.lease.num_tokens
            if not held.severed:
                self.check_pages(held)

    def teardown(self) -> None:
        """Whatever happened: with every lease and pin gone, every page is free or evictable, and then free."""
        if not hasattr(self, "toy"):
            return
        for held in self.held:
            self.cache.release(held.lease)
        for pool, pages in self.pins:
            pool.unpin(pages)
        assert [self.cache.protected_pages(index) for index in POOLS] == [0, 0, 0]
        self.cache.clear()
        self.cache.check_integrity()
        assert self.toy.contents() == {}
        assert self.toy.used() == (0, 5, 0)


def packed_set(packed: bytes) -> set[bytes]:
    return {packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)}


def hear(blocks: dict[bytes, tuple[Namespace, bytes, bytes]], change: BlockChange, page_size: int) -> None:
    """What a listener does: page |-> (namespace, page before it, ids)."""
    match change:
        case BlocksForgotten():
            blocks.clear()
        case BlocksRemoved(keys):
            for key in split(keys, KEY_BYTES):
                del blocks[key]
        case BlocksStored(namespace, parent, keys, tokens):
            assert not parent or parent in blocks
            pages = split(tokens, page_size * TOKEN_BYTES)
            for key, page in zip(split(keys, KEY_BYTES), pages, strict=True):
                assert key not in blocks
                blocks[key] = namespace, parent, page
                parent = key


def paths_of(blocks: Mapping[bytes, tuple[Namespace, bytes, bytes]]) -> Iterator[tuple[Namespace, bytes]]:
    """The whole path of ids of each page."""
    for namespace, parent, page in blocks.values():
        path = page
        while parent:
            _, parent, before = blocks[parent]
            path = before + path
        yield namespace, path


def split(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]


PrefixCacheMachine.TestCase.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=40)
TestPrefixCache = PrefixCacheMachine.TestCase
