"""Order in which unlocked nodes are given up: a policy is a row of ORDERS.

Law of every policy: a node stands after every node below it, so the first one is always a leaf, and finding what to
evict takes constant time whatever the size of the tree. It holds because use of a path is noted leaf first, root last,
and because the ancestors of a locked node are locked. Roots hold no pages and never stand here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Protocol

from deltaserve.control.cache.radix import Node
from deltaserve.core.errors import IntegrityError


class KvEviction(Enum):
    """Which pages of keys and values are evicted first."""

    LRU = "lru"
    """Those used least recently."""
    SLRU = "slru"
    """Those that one request alone has used, then those of several; of both the least recently used."""


class EvictionOrder(Protocol):
    """Unlocked nodes in the order in which they are to be evicted."""

    def __iter__(self) -> Iterator[Node]: ...

    def oldest(self) -> Node | None:
        """The leaf to evict next; None when every node is locked."""

    def touch_path(self, node: Node) -> None:
        """Note the use of the path from the root to `node`: its unlocked nodes become the most recent."""

    def add(self, node: Node) -> None:
        """`node` has just been unlocked: it becomes the most recent. Callers go from leaf to root."""

    def remove(self, node: Node) -> None:
        """`node` has been locked or has left the tree."""

    def resized(self, node: Node) -> None:
        """`node`, which may stand here, has lost pages."""

    def check_integrity(self) -> None:
        """Raises IntegrityError when a count is wrong."""


class LruOrder:
    """Unlocked nodes, least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def oldest(self) -> Node | None:
        return next(iter(self._order), None)

    def touch_path(self, node: Node) -> None:
        order = self._order
        step: Node | None = node
        while step is not None and not step.locks:
            if step.parent is not None:
                order.move_to_end(step)
            step = step.parent

    def add(self, node: Node) -> None:
        self._order[node] = None

    def remove(self, node: Node) -> None:
        del self._order[node]

    def resized(self, node: Node) -> None:
        """Sizes do not count here."""

    def check_integrity(self) -> None:
        """Nothing is counted here."""


class SegmentedLruOrder:
    """Two segments: what one request has used, and behind it, protected, what a second one has leased.

    A burst of prompts that never come again passes through the first segment and leaves the second alone. That holds
    at most four fifths of all pages here; what is used least recently beyond that goes back to the first one, so that a
    new conversation lives until its second turn. (Karedy et al., Segmented LRU, 1994; SGLang names it `slru`.)

    A node's `reused` is set with that of all its ancestors, and unset in the order of eviction, so it is never set
    below a node where it is not: the law holds across the segments.
    """

    _PROTECTED = 0.8
    """Largest share of the second segment."""

    def __init__(self) -> None:
        self._once: OrderedDict[Node, int] = OrderedDict()  # node |-> its pages
        self._protected: OrderedDict[Node, int] = OrderedDict()
        self._num_pages = 0
        self._num_protected = 0

    def __iter__(self) -> Iterator[Node]:
        yield from self._once
        yield from self._protected

    def oldest(self) -> Node | None:
        return next(iter(self._once or self._protected), None)

    def touch_path(self, node: Node) -> None:
        step: Node | None = node
        while step is not None and not step.locks:
            if step.parent is not None:
                self._segment(step).move_to_end(step)
            step = step.parent

    def add(self, node: Node) -> None:
        self._num_pages += node.num_pages
        if node.reused:
            self._protected[node] = node.num_pages
            self._num_protected += node.num_pages
            self._shrink()
        else:
            self._once[node] = node.num_pages

    def remove(self, node: Node) -> None:
        segment = self._segment(node)
        num_pages = segment.pop(node)
        self._num_pages -= num_pages
        if segment is self._protected:
            self._num_protected -= num_pages

    def resized(self, node: Node) -> None:
        segment = self._segment(node)
        if node in segment:
            lost = segment[node] - node.num_pages
            segment[node] = node.num_pages
            self._num_pages -= lost
            if segment is self._protected:
                self._num_protected -= lost

    def check_integrity(self) -> None:
        for segment in (self._once, self._protected):
            if any(node.num_pages != num_pages for node, num_pages in segment.items()):
                raise IntegrityError("the eviction order has wrong sizes")
        if (self._num_pages, self._num_protected) != (
            sum(self._once.values()) + sum(self._protected.values()),
            sum(self._protected.values()),
        ):
            raise IntegrityError("the eviction order has miscounted its pages")

    def _segment(self, node: Node) -> OrderedDict[Node, int]:
        return self._protected if node in self._protected else self._once

    def _shrink(self) -> None:
        """The last one stays: it was just added."""
        while self._num_protected > self._PROTECTED * self._num_pages and len(self._protected) > 1:
            node, num_pages = self._protected.popitem(last=False)
            node.reused = False
            self._num_protected -= num_pages
            self._once[node] = num_pages


ORDERS: Mapping[KvEviction, Callable[[], EvictionOrder]] = {
    KvEviction.LRU: LruOrder,
    KvEviction.SLRU: SegmentedLruOrder,
}


def note_reuse(node: Node) -> None:
    """A second request leases the path to `node`."""
    step: Node | None = node
    while step is not None and not step.reused:
        step.reused = True
        step = step.parent
