"""PrefixCache: match, lease, insert, release, evict. The one holder of CACHED pages.

    page indexes of a path   [0 ......... lease.num_pages)[ ...... adopted ...... )[ ...... new ...... )
    before insert             leased, in the tree          ours OWNED, twins in tree  ours OWNED
    after insert              leased, in the tree          ours freed, twins leased   in the tree, leased

A lease locks the path from its node to the root; locked nodes are never evicted. Counts are in pages; every node holds
equally many pages in every pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from deltaserve.base.errors import StateError
from deltaserve.base.ids import Namespace, PageId
from deltaserve.base.keys import KEY_BYTES, key_at, num_keys
from deltaserve.base.tokens import TOKEN_BYTES
from deltaserve.cache.allocator import PagePool
from deltaserve.cache.events import EventLog, TreeEvents, TreeSnapshot
from deltaserve.cache.eviction import LruOrder
from deltaserve.cache.integrity import Books, check_books
from deltaserve.cache.pages import PageEvent
from deltaserve.cache.radix import Node, RadixTree

__all__ = ["Insertion", "Lease", "Match", "PrefixCache", "TreeEvents", "TreeSnapshot"]


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix of some tokens. Holds nothing: `lease` it before the tree changes, or match again."""

    namespace: Namespace
    num_tokens: int
    """Multiple of the page size; 0 is an ordinary match."""
    num_pages: int
    version: int
    """Of the tree it was found in."""
    node: Node | None = field(repr=False)
    """Deepest node of the match, which may end inside it; None when nothing matched."""
    cache: "PrefixCache" = field(repr=False)


class Lease:
    """A locked path of the tree, from the root to `num_tokens`. Made by PrefixCache, ended exactly once."""

    __slots__ = ("_live", "_node", "_page_size", "num_pages", "num_tokens")

    def __init__(self, node: Node, page_size: int) -> None:
        self._node = node
        self._page_size = page_size
        self._live = True
        self.num_pages = node.end
        self.num_tokens = node.end * page_size

    @property
    def live(self) -> bool:
        """False after `release` or `insert` took it."""
        return self._live

    @property
    def namespace(self) -> Namespace:
        return self._node.namespace

    def pages(self, pool: int) -> tuple[PageId, ...]:
        """Pages of page indexes [0, num_pages) in one pool. Raises StateError when no longer live."""
        return tuple(chain.from_iterable(node.pages[pool] for node in self._nodes()))

    def path(self) -> tuple[tuple[int, int, int], ...]:
        """(node id, start, end) in tokens, root to leaf, gapless. Equal node ids of two leases mean equal pages.

        Stays true while `PrefixCache.version` does. Raises StateError when no longer live.
        """
        size = self._page_size
        return tuple((node.id, node.start * size, node.end * size) for node in self._nodes())

    def _nodes(self) -> list[Node]:
        """Nodes that hold pages, root to leaf."""
        if not self._live:
            raise StateError("use of a lease that has ended")
        nodes = []
        node = self._node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` made of the pages handed over."""

    lease: Lease
    """Over the whole path, the handed-over part included. Its pages are the ones to use from now on."""
    num_adopted_pages: int
    """Page indexes whose twin was in the tree already: ours were freed, in every pool."""


class PrefixCache:
    """Radix tree over the pages of `pools`. One per engine; every method is quick and none blocks."""

    def __init__(self, page_size: int, pools: tuple[PagePool, ...]) -> None:
        self.page_size = page_size
        self.pools = pools
        self._page_bytes = page_size * TOKEN_BYTES
        self._tree = RadixTree(page_size, len(pools))
        self._lru = LruOrder()
        self._events = EventLog()
        self._leases: set[Lease] = set()
        self._num_evictable = 0  # pages of unlocked nodes, of each pool
        self._num_protected = 0  # pages of locked nodes, of each pool
        self._version = 0

    @property
    def version(self) -> int:
        """Changes whenever a node is made, split, trimmed or removed: then `Lease.path` must be read again."""
        return self._version

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def evictable_pages(self, pool: int) -> int:
        """Pages `evict` can take. Those still pinned are counted, but free nothing until they are unpinned."""
        return self._num_evictable

    def protected_pages(self, pool: int) -> int:
        """Pages in the tree that a lease keeps there."""
        return self._num_protected

    def match(self, namespace: Namespace, tokens: bytes, keys: bytes, max_len: int | None = None) -> Match:
        """Longest cached prefix in whole pages, of at most `max_len` tokens; makes it the most recently used.

        `tokens`: packed ids from position 0; `keys`: packed page keys of at least as many pages as may match.
        """
        max_len = len(tokens) // TOKEN_BYTES if max_len is None else max_len
        limit = min(max_len // self.page_size, len(tokens) // self._page_bytes, num_keys(keys))
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(namespace, 0, 0, self._version, None, self)
        node, end = self._tree.descend(root, tokens, keys, limit)
        self._lru.touch_path(node)
        return Match(namespace, end * self.page_size, end, self._version, node if end else None, self)

    def lease(self, match: Match) -> Lease:
        """Lock the matched path. Raises StateError when the tree has changed since the match."""
        if match.cache is not self or match.version != self._version:
            raise StateError("the tree has changed since this match")
        node = match.node
        if node is None:
            return self.empty_lease(match.namespace)
        if match.num_pages < node.end:
            node = self._split(node, match.num_pages)
        self._lock(node, None)
        return self._new_lease(node)

    def empty_lease(self, namespace: Namespace) -> Lease:
        """Lease of no pages, for a request without a hit: it too inserts into its lease."""
        root = self._tree.root(namespace)
        self._lock(root, None)
        return self._new_lease(root)

    def insert(
        self,
        lease: Lease,
        namespace: Namespace,
        tokens: bytes,
        keys: bytes,
        pages: tuple[tuple[PageId, ...], ...],
    ) -> Insertion:
        """Hand over OWNED pages of page indexes [lease.num_pages, lease.num_pages + n), n in every pool; ends `lease`.

        `tokens` and `keys` are those of the whole path from position 0. Where the tree has the same tokens already,
        its pages are adopted and ours freed. Raises ValueError or StateError, and then nothing has changed.
        """
        self._check_live(lease)
        first = lease.num_pages
        limit = first + self._num_handed_over(pages)
        self._check_path(lease, namespace, tokens, keys, limit)
        for pool, handed_over in zip(self.pools, pages, strict=True):
            pool.require(handed_over, PageEvent.CACHE)

        node, end = self._tree.descend(lease._node, tokens, keys, limit)
        if end < node.end:
            node = self._split(node, end)
        for pool, handed_over in zip(self.pools, pages, strict=True):
            pool.free(handed_over[: end - first])
        if end < limit:
            new_pages = tuple(handed_over[end - first :] for handed_over in pages)
            size = self._page_bytes
            path_tail = tokens[end * size : limit * size], keys[end * KEY_BYTES : limit * KEY_BYTES]
            node = self._store(node, lease, *path_tail, new_pages)
        self._lock(node, lease._node)
        self._end(lease)
        return Insertion(self._new_lease(node), end - first)

    def release(self, lease: Lease) -> None:
        """Unlock a path: nodes no other lease locks become evictable, most recently used. A second time raises."""
        self._check_live(lease)
        self._end(lease)
        node = lease._node
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self._lru.add(node)
                self._num_protected -= node.num_pages
                self._num_evictable += node.num_pages
            node = node.parent
        node.locks -= 1
        self._tree.forget_if_empty(node)

    def evict(self, needs: Sequence[int]) -> tuple[int, ...]:
        """Free at least `needs[pool]` pages of each pool, least recently used leaf first, its tail before its head.

        Leased pages stay. Returns the pages that became allocatable, per pool: fewer than asked when all that is
        left is leased or pinned, more in one pool when another needed more.
        """
        if len(needs) != len(self.pools):
            raise ValueError(f"{len(needs)} needs for {len(self.pools)} pools")
        before = [pool.num_free for pool in self.pools]
        goals = [start + need for start, need in zip(before, needs, strict=True)]
        while (missing := max(goal - pool.num_free for goal, pool in zip(goals, self.pools, strict=True))) > 0:
            if not self._drop_oldest(missing):
                break
        return tuple(pool.num_free - start for pool, start in zip(self.pools, before, strict=True))

    def clear(self) -> tuple[int, ...]:
        """Drop everything no lease protects. Returns the pages that became allocatable, per pool."""
        before = [pool.num_free for pool in self.pools]
        self._drop_oldest(self._num_evictable)
        return tuple(pool.num_free - start for pool, start in zip(self.pools, before, strict=True))

    def drain_events(self) -> TreeEvents:
        """What entered and left the tree since the last call."""
        return self._events.drain()

    def snapshot(self) -> TreeSnapshot:
        """All keys in the tree now, for a receiver that missed events; the next drain continues it."""
        return TreeSnapshot(b"".join(node.keys for node in self._tree.nodes()), self._events.next_event)

    def check_integrity(self) -> None:
        """Recompute locks, counts, order and page states, pools included. Raises IntegrityError."""
        leased = [lease._node for lease in self._leases]
        check_books(
            Books(self._tree, self._lru, self.pools, leased, self._num_evictable, self._num_protected),
        )

    def _num_handed_over(self, pages: tuple[tuple[PageId, ...], ...]) -> int:
        counts = {len(handed_over) for handed_over in pages}
        if len(pages) != len(self.pools) or len(counts) != 1:
            raise ValueError(f"{len(self.pools)} pools need equally many pages each, got {[len(p) for p in pages]}")
        return counts.pop()

    def _check_path(self, lease: Lease, namespace: Namespace, tokens: bytes, keys: bytes, limit: int) -> None:
        """Chained keys: if the last leased page's key agrees, so do all the tokens before it."""
        if len(tokens) < limit * self._page_bytes or num_keys(keys) < limit:
            raise ValueError(f"pages up to index {limit} need as many full pages of tokens and keys")
        if namespace != lease.namespace:
            raise ValueError("the lease is of another namespace")
        if lease.num_pages and not lease._node.keys.endswith(key_at(keys, lease.num_pages - 1)):
            raise ValueError("the lease is of another token path")

    def _check_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StateError("a lease is ended exactly once, by the cache that made it")

    def _new_lease(self, node: Node) -> Lease:
        lease = Lease(node, self.page_size)
        self._leases.add(lease)
        return lease

    def _end(self, lease: Lease) -> None:
        self._leases.remove(lease)
        lease._live = False

    def _lock(self, node: Node, above: Node | None) -> None:
        """Lock `node` and its ancestors up to, not including, `above`."""
        step: Node | None = node
        while step is not above and step is not None:
            if not step.locks and step.parent is not None:
                self._lru.remove(step)
                self._num_evictable -= step.num_pages
                self._num_protected += step.num_pages
            step.locks += 1
            step = step.parent

    def _split(self, node: Node, index: int) -> Node:
        """Upper part of `node`, cut at `index`. The caller locks it next, so its place in the order is not yet law."""
        upper = self._tree.split(node, index)
        upper.locks = node.locks
        if not upper.locks:
            self._lru.add(upper)
        self._version += 1
        return upper

    def _store(
        self, node: Node, lease: Lease, tokens: bytes, keys: bytes, pages: tuple[tuple[PageId, ...], ...]
    ) -> Node:
        """Put OWNED pages below the end of `node`, which the path of `lease` has reached. The caller locks it next."""
        for pool, new in zip(self.pools, pages, strict=True):
            pool.cache(new)
        self._events.stored(keys)
        self._version += 1
        num_others = node.locks - (node is lease._node)
        if node.parent is None or node.children or num_others:
            node = self._tree.add(node, tokens, keys, pages)
            self._lru.add(node)
        else:
            self._tree.extend(node, tokens, keys, pages)
        num_new = num_keys(keys)
        if node.locks:
            self._num_protected += num_new
        else:
            self._num_evictable += num_new
        return node

    def _drop_oldest(self, num_pages: int) -> int:
        """Evict `num_pages` pages, or all evictable ones; returns how many. One batch per pool, not one per leaf."""
        dropped: tuple[list[PageId], ...] = tuple([] for _ in self.pools)
        missing = num_pages
        while missing and (leaf := self._lru.oldest()) is not None:
            kept = max(0, leaf.num_pages - missing)
            missing -= leaf.num_pages - kept
            for batch, pages in zip(dropped, leaf.pages, strict=True):
                batch += pages[kept:]
            self._drop_tail(leaf, kept)
        for pool, batch in zip(self.pools, dropped, strict=True):
            pool.evict(batch)
        if missing < num_pages:
            self._version += 1
        return num_pages - missing

    def _drop_tail(self, leaf: Node, kept: int) -> None:
        """Cut an unlocked leaf to its first `kept` pages, or off. Its pages are the caller's."""
        self._events.evicted(leaf.keys[kept * KEY_BYTES :])
        self._num_evictable -= leaf.num_pages - kept
        if kept:
            self._tree.trim(leaf, leaf.start + kept)
            return
        self._lru.remove(leaf)
        parent = self._tree.remove(leaf)
        if parent.parent is None:
            self._tree.forget_if_empty(parent)
