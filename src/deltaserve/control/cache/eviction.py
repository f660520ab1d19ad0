"""Order in which unlocked nodes are given up."""

from collections import OrderedDict
from collections.abc import Iterator

from deltaserve.control.cache.radix import Node


class LruOrder:
    """Unlocked nodes, least recently used first.

    Law: a node stands after every node below it, so the first one is always a leaf, and finding what to evict takes
    constant time whatever the size of the tree. It holds because use of a path is noted leaf first, root last, and
    because the ancestors of a locked node are locked. Roots hold no pages and never stand here.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def oldest(self) -> Node | None:
        """The leaf to evict next; None when every node is locked."""
        return next(iter(self._order), None)

    def touch_path(self, node: Node) -> None:
        """Note the use of the path from the root to `node`: its unlocked nodes become the most recent."""
        order = self._order
        step: Node | None = node
        while step is not None and not step.locks:
            if step.parent is not None:
                order.move_to_end(step)
            step = step.parent

    def add(self, node: Node) -> None:
        """`node` has just been unlocked: it becomes the most recent. Callers go from leaf to root."""
        self._order[node] = None

    def remove(self, node: Node) -> None:
        """`node` has been locked or has left the tree."""
        del self._order[node]
