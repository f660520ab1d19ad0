"""A small prefix cache of several lifetimes, prompts spelled as letters (one letter is one page), and a look inside."""

from dataclasses import dataclass

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.block_log import BlockLog
from deltaserve.control.cache.eviction import KvEviction
from deltaserve.control.cache.prefix_cache import Insertion, Lease, Match, PrefixCache, StateEviction
from deltaserve.core.ids import Namespace, PageId
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32

ALICE, BOB = Namespace("alice"), Namespace("bob")
Pages = tuple[tuple[PageId, ...], ...]

LONG_WINDOW = Retention(Lifetime.WINDOW, 1 << 16)
"""Longer than any prompt: a match needs every page, as in a FULL pool."""
STATE = Retention(Lifetime.STATE)


def window(num_pages: int, page_size: int = 4) -> Retention:
    """The window that needs exactly the last `num_pages` pages to continue at a page boundary."""
    return Retention(Lifetime.WINDOW, num_pages * page_size + 1)


def spell(word: str, page_size: int) -> bytes:
    """Packed ids of a word. Two letters differ in the last token of their page only."""
    return b"".join(pack_u32([7] * (page_size - 1) + [ord(letter)]) for letter in word)


def keys_of(tokens: bytes, page_size: int, namespace: Namespace) -> bytes:
    return extend_keys(seed_key(b"secret", "model", page_size, namespace), tokens, page_size)


def longest(cache: PrefixCache, match: Match, pool: int) -> int:
    """Tokens of the longest matched prefix at which this pool alone could continue: its last window or state."""
    end, node, tail = match.reach // cache.page_size, match.node, cache._tail_of.get(pool)
    while tail is not None and node is not None and end and (shorter := tail.shorten(node, end)) < end:
        end = shorter
        while node.parent is not None and node.start >= end:
            node = node.parent
    return end * cache.page_size


def taken(pages: tuple[PageId, ...] | None) -> tuple[PageId, ...]:
    """Pages of an allocation that must succeed."""
    assert pages is not None
    return pages


@dataclass
class Toy:
    """A cache with pools of unequal sizes: their page ids never run in step, so a mixed-up pool shows."""

    page_size: int = 4
    pool_pages: tuple[int, ...] = (64, 80)
    colliding: bool = False
    """Every page has the same key: the worst a hash could do."""
    retentions: tuple[Retention, ...] = (KEEP_ALL, LONG_WINDOW)
    state_eviction: StateEviction = StateEviction.RECENCY
    max_blocks: int = 20
    eviction: KvEviction = KvEviction.LRU

    def __post_init__(self) -> None:
        self.pools = tuple(PagePool(num_pages) for num_pages in self.pool_pages)
        if len(self.pools) > 1:
            taken(self.pools[1].allocate(5))
        retentions = self.retentions[: len(self.pools)]
        blocks = BlockLog(self.max_blocks)
        self.cache = PrefixCache(self.page_size, self.pools, retentions, self.state_eviction, blocks, self.eviction)

    def text(self, word: str, namespace: Namespace = ALICE) -> tuple[bytes, bytes]:
        """(tokens, keys) of a word."""
        tokens = spell(word, self.page_size)
        keys = keys_of(tokens, self.page_size, namespace)
        return tokens, bytes(len(keys)) if self.colliding else keys

    def allocate(self, n: int) -> Pages:
        return tuple(taken(pool.allocate(n)) for pool in self.pools)

    def take(self, *counts: int) -> Pages:
        """So many pages of each pool."""
        return tuple(taken(pool.allocate(n)) for pool, n in zip(self.pools, counts, strict=True))

    def match(self, word: str, namespace: Namespace = ALICE, max_len: int | None = None) -> Match:
        tokens, keys = self.text(word, namespace)
        return self.cache.match(namespace, tokens, keys, max_len)

    def hit(self, word: str, namespace: Namespace = ALICE) -> str:
        """The cached part of a word."""
        return word[: self.match(word, namespace).num_pages]

    def lease(self, word: str, namespace: Namespace = ALICE) -> Lease:
        return self.cache.lease(self.match(word, namespace))

    def insert(self, lease: Lease, word: str, pages: Pages | None = None) -> Insertion:
        """Insert all of `word` below `lease`, with fresh pages unless given."""
        tokens, keys = self.text(word, lease.namespace)
        pages = self.allocate(len(word) - lease.num_pages) if pages is None else pages
        return self.cache.insert(lease, lease.namespace, tokens, keys, pages)

    def hold(self, word: str, namespace: Namespace = ALICE) -> Lease:
        """Match, lease and insert a word; returns the lease over all of it."""
        return self.insert(self.lease(word, namespace), word).lease

    def put(self, *words: str, namespace: Namespace = ALICE) -> None:
        """Insert words and release them, oldest first."""
        for word in words:
            self.cache.release(self.hold(word, namespace))
        self.cache.check_integrity()

    def used(self) -> tuple[int, ...]:
        """Pages of each pool that are not allocatable."""
        return tuple(pool.num_pages - pool.num_free for pool in self.pools)

    def contents(self) -> dict[tuple[Namespace, bytes], tuple[PageId | None, ...]]:
        """(namespace, tokens from position 0 to the end of a page) |-> what each pool holds for that page index."""
        size = self.page_size * TOKEN_BYTES
        found: dict[tuple[Namespace, bytes], tuple[PageId | None, ...]] = {}
        for node in self.cache._tree.nodes():
            above, step = b"", node.parent
            while step is not None:
                above, step = step.tokens + above, step.parent
            absent = [(None,) * (node.num_pages - len(pages)) for pages in node.pages]
            columns = [(*gone, *pages) for gone, pages in zip(absent, node.pages, strict=True)]
            for index, pages in enumerate(zip(*columns, strict=True)):
                found[node.namespace, above + node.tokens[: (index + 1) * size]] = pages
        return found
