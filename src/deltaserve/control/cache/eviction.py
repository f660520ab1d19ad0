"""Order in which unlocked nodes are given up: a policy is a row of ORDERS, behind what its users are done with, and
before what they asked to keep.

Law of every policy: a node stands after every node below it, so the first one is always a leaf, and finding what to
evict takes constant time whatever the size of the tree. It holds because use of a path is noted leaf first, root last,
and because the ancestors of a locked node are locked. Roots hold no pages and never stand here.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum

from deltaserve.control.cache.radix import Node
from deltaserve.core.errors import IntegrityError


class KvEviction(Enum):
    """Which pages of keys and values are evicted first."""

    LRU = "lru"
    """Those used least recently."""
    SLRU = "slru"
    """Those that one request alone has used, then those of several; of both the least recently used."""


class EvictionOrder(ABC):
    """Unlocked nodes in the order in which they are to be evicted."""

    @abstractmethod
    def __iter__(self) -> Iterator[Node]: ...

    @abstractmethod
    def add(self, node: Node) -> None:
        """`node` has just been unlocked: it becomes the most recent. Callers go from leaf to root."""

    def add_upper(self, node: Node) -> None:
        """`node` is the upper part of one that stands here and was `resized`: it is locked or touched next."""
        self.add(node)

    @abstractmethod
    def remove(self, node: Node) -> None:
        """`node` has been locked or has left the tree."""

    @abstractmethod
    def resized(self, node: Node) -> None:
        """`node`, which may stand here, has lost pages."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError when a count is wrong."""

    @abstractmethod
    def _touch(self, node: Node) -> None:
        """`node`, which stands here, becomes the most recent of those that it is told from by use alone."""

    def oldest(self) -> Node | None:
        """The leaf to evict next; None when every node is locked."""
        return next(iter(self), None)

    def touch_path(self, node: Node) -> None:
        """Note the use of the path from the root to `node`: its unlocked nodes become the most recent."""
        step: Node | None = node
        while step is not None and not step.locks:
            if step.parent is not None:
                self._touch(step)
            step = step.parent


class LruOrder(EvictionOrder):
    """Unlocked nodes, least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def add(self, node: Node) -> None:
        self._order[node] = None

    def remove(self, node: Node) -> None:
        del self._order[node]

    def resized(self, node: Node) -> None:
        """Sizes do not count here."""

    def check_integrity(self) -> None:
        """Nothing is counted here."""

    def _touch(self, node: Node) -> None:
        self._order.move_to_end(node)


class _Segment:
    """Nodes, least recently used first, and their pages."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, int] = OrderedDict()
        """Node |-> its pages."""
        self.num_pages = 0

    def add(self, node: Node) -> None:
        self.nodes[node] = node.num_pages
        self.num_pages += node.num_pages

    def remove(self, node: Node) -> None:
        self.num_pages -= self.nodes.pop(node)

    def recount(self, node: Node) -> None:
        """It stays in its place."""
        self.num_pages += node.num_pages - self.nodes[node]
        self.nodes[node] = node.num_pages

    def check_integrity(self) -> None:
        if any(node.num_pages != num_pages for node, num_pages in self.nodes.items()):
            raise IntegrityError("the eviction order has wrong sizes")
        if self.num_pages != sum(self.nodes.values()):
            raise IntegrityError("the eviction order has miscounted its pages")


class SegmentedLruOrder(EvictionOrder):
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
        self._once, self._protected = _Segment(), _Segment()

    def __iter__(self) -> Iterator[Node]:
        yield from self._once.nodes
        yield from self._protected.nodes

    def add(self, node: Node) -> None:
        self.add_upper(node)
        if node.reused:
            self._shrink()

    def add_upper(self, node: Node) -> None:
        """No more pages stand here than before: nobody makes way for it."""
        (self._protected if node.reused else self._once).add(node)

    def remove(self, node: Node) -> None:
        self._segment(node).remove(node)

    def resized(self, node: Node) -> None:
        segment = self._segment(node)
        if node in segment.nodes:
            segment.recount(node)

    def check_integrity(self) -> None:
        self._once.check_integrity()
        self._protected.check_integrity()

    def _touch(self, node: Node) -> None:
        self._segment(node).nodes.move_to_end(node)

    def _segment(self, node: Node) -> _Segment:
        return self._protected if node in self._protected.nodes else self._once

    def _shrink(self) -> None:
        """The last one stays: it was just added."""
        once, protected = self._once, self._protected
        while protected.num_pages > self._PROTECTED * (once.num_pages + protected.num_pages):
            if len(protected.nodes) == 1:
                break
            node = next(iter(protected.nodes))
            protected.remove(node)
            node.reused = False
            once.add(node)


class HintedOrder(EvictionOrder):
    """What nobody comes back to, in order of its end, then all others as `rest` has them, then what is kept for a
    while, least recently used first.

    A node is done with all that is below it, and leaves by its next use, which its ancestors share; it is kept with all
    that is above it: so the law holds across the three. The `reused` of one that is done is unset, so it returns to
    `rest` as what one request has used.
    """

    def __init__(self, rest: EvictionOrder) -> None:
        self._rest = rest
        self._done: OrderedDict[Node, None] = OrderedDict()
        self._kept: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        yield from self._done
        yield from self._rest
        yield from self._kept

    def retire(self, leaf: Node) -> tuple[Node, ...]:
        """Bring forward what no other path shares of the one to `leaf`, as far as it is unlocked; leaf first."""
        branch: list[Node] = []
        step = leaf
        while step.parent is not None and not step.locks and not step.shared and self._all_done(step.children.values()):
            if step not in self._done:
                self.remove(step)
                step.reused = False
                self._done[step] = None
            branch.append(step)
            step = step.parent
        return tuple(branch)

    def touch_to(self, node: Node, end: int) -> None:
        """Note the use of the path to page index `end`, in or at the end of `node`.

        One that is done, and used in part, stays: that part is cut off when it is leased, the other stays done.
        """
        is_cut = end < node.end and node in self._done
        self.touch_path(node.parent if is_cut and node.parent is not None else node)

    def keep_no_longer(self, node: Node) -> None:
        """`node`, which may stand here, is kept no longer: it becomes the most recent of the others. Callers go from
        leaf to root."""
        if node in self._kept:
            del self._kept[node]
            self._rest.add(node)

    def add(self, node: Node) -> None:
        if node.kept:
            self._kept[node] = None
        else:
            self._rest.add(node)

    def add_upper(self, node: Node) -> None:
        if node.kept:
            self._kept[node] = None
        else:
            self._rest.add_upper(node)

    def remove(self, node: Node) -> None:
        for own in (self._done, self._kept):
            if node in own:
                del own[node]
                return
        self._rest.remove(node)

    def resized(self, node: Node) -> None:
        if node not in self._done and node not in self._kept:
            self._rest.resized(node)

    def check_integrity(self) -> None:
        self._rest.check_integrity()
        if not all(self._all_done(node.children.values()) for node in self._done):
            raise IntegrityError("a node is to be evicted before one below it")
        if any(node.reused for node in self._done):
            raise IntegrityError("a node that nobody comes back to is said to be used again")
        if not all(node.kept for node in self._kept) or any(node.kept for node in (*self._done, *self._rest)):
            raise IntegrityError("a node that is kept for a while stands elsewhere, or another one there")

    def _all_done(self, nodes: Collection[Node]) -> bool:
        return all(node in self._done for node in nodes)

    def _touch(self, node: Node) -> None:
        if node in self._done:
            del self._done[node]
            self._rest.add(node)
        elif node in self._kept:
            self._kept.move_to_end(node)
        else:
            self._rest._touch(node)


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


def note_shared(node: Node) -> None:
    """Paths part at `node` or below it, or two requests have computed it."""
    step: Node | None = node
    while step is not None and not step.shared:
        step.shared = True
        step = step.parent
