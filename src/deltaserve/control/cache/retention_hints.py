"""What clients asked to keep for a while: until when, and how much of it is whose.

A node is kept with all of its ancestors, so what is kept of a path is its beginning. Kept nodes are evicted behind all
others (eviction.py) until their time is over: it is advice, and memory that is needed is had. A tenant may keep a
quarter of the pool, under whatever salts, all of them together half, so that most of what anybody else has cached is
evicted in the order of its use.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from deltaserve.control.cache.radix import Node
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Namespace
from deltaserve.core.namespaces import tenant_of

_MOST_OF_ALL = 2
_MOST_OF_ONE = 4
"""One page in so many."""
_STALE = 8
"""Most times that are remembered for each node that is kept."""


class KeptNodes:
    """Nodes that are kept for a while, and their pages of the FULL pool."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: of the whole pool."""
        self._most_of_all, self._most_of_one = num_pages // _MOST_OF_ALL, num_pages // _MOST_OF_ONE
        self._until: dict[Node, float] = {}
        self._size: dict[Node, int] = {}
        self._of: Counter[Namespace] = Counter()
        """Pages of each tenant."""
        self._ends: list[tuple[float, int, Node]] = []
        """A heap of times, each with a number of its own; some are put off by now."""
        self._num_ends = 0
        self.num_pages = 0

    def room(self, namespace: Namespace) -> int:
        """Pages that the tenant of this namespace may keep beyond those it keeps."""
        return max(0, min(self._most_of_all - self.num_pages, self._most_of_one - self._of[tenant_of(namespace)]))

    def keep(self, node: Node, until: float) -> None:
        """Nodes of one path from the root on: `until` of one is never later than of the one above it."""
        if until <= self._until.get(node, 0.0):
            return
        if node not in self._until:
            self._count(node, node.num_pages)
        self._until[node], node.kept = until, True
        self._note_end(node)

    def forget(self, node: Node) -> None:
        """It is kept no longer, if it was."""
        if node in self._until:
            self._count(node, 0)
            del self._until[node]
            node.kept = False

    def resized(self, node: Node) -> None:
        """`node`, which may be kept, has lost pages."""
        if node in self._until:
            self._count(node, node.num_pages)

    def split(self, upper: Node, node: Node) -> None:
        """`upper` was cut off `node`."""
        if node in self._until:
            self._count(node, node.num_pages)
            self.keep(upper, self._until[node])

    def due(self, now: float) -> Sequence[Node]:
        """Nodes whose time is over, those below before those above; with each of them all that are kept below it."""
        found: dict[Node, None] = {}
        while self._ends and self._ends[0][0] <= now:
            _, _, node = heapq.heappop(self._ends)
            if self._until.get(node, now + 1) <= now:
                found[node] = None
        return sorted(found, key=lambda node: -node.start)

    def check_integrity(self, nodes: Sequence[Node]) -> None:
        """`nodes`: all of the tree that a match can reach. Raises IntegrityError."""
        kept = {node for node in nodes if node.kept}
        if kept != self._until.keys() or any(self._size[node] != node.num_pages for node in kept):
            raise IntegrityError("what is kept for a while is not what the tree says")
        if self.num_pages != sum(node.num_pages for node in kept):
            raise IntegrityError("pages that are kept for a while are miscounted")
        for node in kept:
            above = node.parent
            if above is not None and above.parent is not None and self._until.get(above, 0.0) < self._until[node]:
                raise IntegrityError("a node is kept longer than one above it")

    def _note_end(self, node: Node) -> None:
        if len(self._ends) > _STALE * len(self._until):
            self._ends = [(until, number, node) for number, (node, until) in enumerate(self._until.items())]
            heapq.heapify(self._ends)
            self._num_ends = len(self._ends)
            return
        heapq.heappush(self._ends, (self._until[node], self._num_ends, node))
        self._num_ends += 1

    def _count(self, node: Node, num_pages: int) -> None:
        more = num_pages - self._size.pop(node, 0)
        if num_pages:
            self._size[node] = num_pages
        self.num_pages += more
        tenant = tenant_of(node.namespace)
        self._of[tenant] += more
        if not self._of[tenant]:
            del self._of[tenant]
