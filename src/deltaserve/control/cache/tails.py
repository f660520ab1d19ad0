"""What the nodes of a tree hold in one WINDOW or STATE pool: presence, locks, order of eviction, counts.

To continue at page index e a path needs the pages [first_needed(e), e) of such a pool, a tail of it; what lies above
may be gone. A lease locks its tail alone: pages before it are evicted although the FULL pages there are leased.

    page indexes of a node    [start .......... held_from)[ evictable ... first lock)[ locked ......... end)
                               gone (or never there)        in the eviction order      needed by a lease
"""

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from itertools import islice

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.newcomers import Newcomers
from deltaserve.control.cache.radix import Node
from deltaserve.core.ids import PageId
from deltaserve.core.lifetime import Lifetime, Retention

_COMPARED = 16
"""Least recently used states that are compared by what they would cost."""


class StateEviction(Enum):
    """Which state is evicted first."""

    RECENCY = "lru"
    """The least recently used one."""
    COST = "cost"
    """The one that costs least to compute again, for its bytes, among those used least recently: all have equally many,
    so it is the one with the fewest tokens behind the state before it (Marconi's score, within a bound)."""


class TailPool:
    """Accounting of pool number `index`. Nodes are evicted least recently used first, each from its first page on."""

    def __init__(
        self,
        index: int,
        pool: PagePool,
        retention: Retention,
        page_size: int,
        state_eviction: StateEviction = StateEviction.RECENCY,
    ) -> None:
        self.index = index
        by_cost = state_eviction is StateEviction.COST and retention.lifetime is Lifetime.STATE
        self._num_compared = _COMPARED if by_cost else 1
        self.pool = pool
        self.num_held = 0
        """How many pages of this pool the tree holds."""
        self.num_evictable = 0
        self._retention = retention
        self._page_size = page_size
        self._order: OrderedDict[Node, int] = OrderedDict()  # node |-> its evictable pages, >= 1; oldest first
        self._locks: dict[Node, dict[int, int]] = {}  # node |-> first locked page index of a lease |-> such leases
        self._newcomers: Newcomers | None = None

    def tell(self, newcomers: Newcomers) -> None:
        """Have `newcomers` told of pages that enter and leave the tree from now on."""
        self._newcomers = newcomers

    @property
    def order(self) -> Iterator[tuple[Node, int]]:
        """(node, evictable pages), least recently used first."""
        return iter(self._order.items())

    @property
    def locks(self) -> dict[Node, dict[int, int]]:
        """Node |-> {first page index locked: leases}. A lock holds to the end of the node."""
        return self._locks

    @property
    def lifetime(self) -> Lifetime:
        return self._retention.lifetime

    def first_needed(self, end: int) -> int:
        """First page index needed to continue at page index `end`."""
        return self._retention.first_needed(end * self._page_size, self._page_size)

    # ------------------------------------------------------------ presence

    def shorten(self, node: Node, end: int) -> int:
        """`end` if all that it needs is there, else the next candidate: the start of the node that lacks a page.

        In a node that lacks its first page no shorter end is usable: what it would need lies before what is held.
        """
        needed = self.first_needed(end)
        lacking = self._lacking(node, needed) if needed < end else None
        return end if lacking is None else lacking.start

    def first_held(self, node: Node, num_tokens: int) -> int:
        """First page index of what continuing at `num_tokens` needs of the path of `node`; its end if any is gone."""
        needed = min(self._retention.first_seen(num_tokens, self._page_size), node.end)
        return needed if self._lacking(node, needed) is None else node.end

    def _lacking(self, node: Node, needed: int) -> Node | None:
        """Deepest node of the path that lacks a page from page index `needed` on."""
        step = node
        while (held_from := step.held_from(self.index)) > needed:
            if held_from > step.start or step.parent is None:
                return step
            step = step.parent
        return None

    # ------------------------------------------------------------ locks

    def lock(self, node: Node, start: int) -> None:
        """Keep the pages [start, node.end) of the path of `node`."""
        for step in _up(node, start):
            locks = self._locks.setdefault(step, {})
            locks[start] = locks.get(start, 0) + 1
            self._count(step)

    def unlock(self, node: Node, start: int) -> None:
        """Undo one `lock`; what no other lease needs becomes the most recently used."""
        for step in _up(node, start):
            locks = self._locks[step]
            locks[start] -= 1
            if not locks[start]:
                del locks[start]
            if not locks:
                del self._locks[step]
            self._count(step)
            if step in self._order:
                self._order.move_to_end(step)

    def touch(self, node: Node, end: int) -> None:
        """Note the use of what continuing at `end` needs; `node` covers `end`."""
        for step in _up(node, self.first_needed(end)):
            if step in self._order:
                self._order.move_to_end(step)

    def retire(self, node: Node) -> None:
        """Evict what no lease needs of `node` before all else."""
        if node in self._order:
            self._order.move_to_end(node, last=False)

    # ------------------------------------------------------------ pages come and go

    def may_extend(self, leaf: Node, num_new: int, num_handed_over: int) -> bool:
        """Whether a leaf that grows by `num_new` pages would still hold a suffix: no hole, and no state inside."""
        if not leaf.pages[self.index]:
            return True
        return self._retention.lifetime is Lifetime.WINDOW and num_handed_over >= num_new

    def stored(self, node: Node, num_pages: int) -> None:
        """`num_pages` CACHED pages were put at the end of `node`."""
        self.num_held += num_pages
        self._count(node)
        if num_pages:
            self._tell_stored(node, node.end - num_pages, node.pages[self.index][-num_pages:])

    def fill(self, node: Node, end: int, pages: tuple[PageId, ...]) -> int:
        """Put OWNED pages of the page indexes before `end` on the path of `node` where they are gone, free the others.

        Returns how many were put there.
        """
        duplicates: list[PageId] = []
        num_before = self.num_held
        step = node
        while pages:
            while step.parent is not None and step.start >= end:
                step = step.parent
            first = max(step.start, end - len(pages))
            ours, pages = pages[first - end :], pages[: first - end]
            num_missing = max(0, min(step.held_from(self.index), end) - first)
            if num_missing:
                missing = ours[:num_missing]
                self.pool.cache(missing)
                step.set_pages(self.index, missing + step.pages[self.index])
                self.num_held += num_missing
                self._tell_stored(step, first, missing)
            duplicates += ours[num_missing:]
            self._count(step)
            end = first
        self.pool.free(duplicates)
        return self.num_held - num_before

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was cut off the head of `lower`."""
        locks = self._locks.get(lower)
        if locks is not None and (above := {start: n for start, n in locks.items() if start < upper.end}):
            self._locks[upper] = above
        self._count(lower)
        self._count(upper)

    def lost(self, node: Node, num_pages: int) -> None:
        """`num_pages` pages of an unlocked node went with its FULL pages; they are the caller's to evict."""
        self.num_held -= num_pages
        self._count(node)

    def evict(self, num_pages: int) -> int:
        """Evict so many pages, or all evictable ones; returns how many."""
        dropped: list[PageId] = []
        while len(dropped) < num_pages and self._order:
            oldest = list(islice(self._order, self._num_compared))
            node = min(oldest, key=self._num_lost) if len(oldest) > 1 else oldest[0]
            dropped += self._take(node, min(self._order[node], num_pages - len(dropped)))
        self.pool.evict(dropped)
        return len(dropped)

    def _num_lost(self, node: Node) -> int:
        """Page indexes to be computed again to have what `node` holds, if all before it stays."""
        step = node.parent
        while step is not None and not step.pages[self.index]:
            step = step.parent
        return node.end - (step.end if step is not None else 0)

    def forget(self, node: Node) -> bool:
        """Evict what `node` holds, unless a lease needs it; whether that was anything."""
        held = node.pages[self.index]
        if not held or node in self._locks:
            return False
        self.pool.evict(self._take(node, len(held)))
        return True

    def _take(self, node: Node, num_pages: int) -> tuple[PageId, ...]:
        held, first = node.pages[self.index], node.held_from(self.index)
        node.set_pages(self.index, held[num_pages:])
        self.num_held -= num_pages
        self._count(node)
        if self._newcomers is not None and not node.severed:
            self._newcomers.gone(self.index, node.keys_of(first, first + num_pages))
        return held[:num_pages]

    def _tell_stored(self, node: Node, first: int, pages: tuple[PageId, ...]) -> None:
        """`pages` of page indexes of `node` from `first` on are in the tree now."""
        if self._newcomers is not None and not node.severed:
            self._newcomers.stored(self.index, node.keys_of(first, first + len(pages)), pages)

    def _count(self, node: Node) -> None:
        """Count a node anew; one with evictable pages has a place in the order."""
        num_evictable = len(node.pages[self.index])
        locks = self._locks.get(node)
        if locks:
            num_evictable -= node.end - max(node.start, min(locks))
        self.num_evictable += num_evictable - self._order.get(node, 0)
        if num_evictable:
            self._order[node] = num_evictable
        else:
            self._order.pop(node, None)


def _up(node: Node, start: int) -> Iterator[Node]:
    """Nodes that cover page indexes [start, node.end) of the path, deepest first."""
    step: Node | None = node
    while step is not None and step.end > start:
        yield step
        step = step.parent
