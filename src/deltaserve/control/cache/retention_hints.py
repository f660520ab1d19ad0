"""What clients asked to keep for a while: until when, and how much of it is whose.

A node is kept with all of its ancestors, so what is kept of a path is its beginning. Kept nodes are evicted behind all
others (eviction.py) until their time is over: it is advice, and memory that is needed is had. A tenant may keep a
quarter of the pool, under whatever salts, all of them together half, so that most of what anybody else has cached is
evicted in the order of its use. Where it has no room left, what it keeps that ends first makes way for what it keeps
now.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from deltaserve.control.cache.radix import Node
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Namespace
from deltaserve.core.namespaces import tenant_of

_MOST_OF_ALL = 2
_MOST_OF_ONE = 4
"""One page in so many."""
_STALE = 8
"""Most times that are remembered for each node that is kept."""


class _EndTimes:
    """Nodes by the end of their time, the earliest first. Of those that end at once the lower ones are first, and no
    node ends behind one above it: so each comes before those above it."""

    def __init__(self) -> None:
        self.until: dict[Node, float] = {}
        self._heap: list[tuple[float, int, int, Node]] = []
        """(end, - start of the node, number of the entry, node). An entry whose end or start is another by now is
        stale."""
        self._num_entries = 0

    def put(self, node: Node, until: float) -> None:
        """It ends then; also after its start has moved."""
        self.until[node] = until
        if len(self._heap) >= _STALE * len(self.until):
            self._heap = [(end, -other.start, index, other) for index, (other, end) in enumerate(self.until.items())]
            heapq.heapify(self._heap)
            self._num_entries = len(self._heap)
            return
        heapq.heappush(self._heap, (until, -node.start, self._num_entries, node))
        self._num_entries += 1

    def pop(self, last: float) -> Node | None:
        """The first one, unless it ends later than `last`. It is here no longer."""
        while self._heap and self._heap[0][0] <= last:
            until, negated_start, _, node = heapq.heappop(self._heap)
            if self.until.get(node) == until and node.start == -negated_start:
                del self.until[node]
                return node
        return None


@dataclass(slots=True)
class _Share:
    """What one tenant keeps."""

    num_pages: int = 0
    ends: _EndTimes = field(default_factory=_EndTimes)


class KeptNodes:
    """Nodes that are kept for a while, and their pages of the FULL pool."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: of the whole pool."""
        self._most_of_all, self._most_of_one = num_pages // _MOST_OF_ALL, num_pages // _MOST_OF_ONE
        self._size: dict[Node, int] = {}
        self._ends = _EndTimes()
        self._of: dict[Namespace, _Share] = {}
        """What each tenant keeps, of those that keep anything."""
        self.num_pages = 0

    def most(self, namespace: Namespace) -> int:
        """Pages that the tenant of this namespace may keep, where all that it keeps makes way."""
        num_others = self.num_pages - self._num_own(namespace)
        return min(self._most_of_all - num_others, self._most_of_one)

    def room(self, namespace: Namespace) -> int:
        """Pages that it may keep beyond those it keeps."""
        return self.most(namespace) - self._num_own(namespace)

    def keep(self, node: Node, until: float) -> None:
        """Nodes of one path from the root on: `until` of one is never later than of the one above it."""
        if until <= self._ends.until.get(node, 0.0):
            return
        if not node.kept:
            node.kept = True
            self._count(node, node.num_pages)
        self._put(node, until)

    def forget(self, node: Node) -> None:
        """It is kept no longer, if it was."""
        if node.kept:
            for ends in (self._ends, self._of[tenant_of(node.namespace)].ends):
                ends.until.pop(node, None)
            self._count(node, 0)
            node.kept = False

    def resized(self, node: Node) -> None:
        """`node`, which may be kept, has lost pages."""
        if node.kept:
            self._count(node, node.num_pages)

    def split(self, upper: Node, node: Node) -> None:
        """`upper` was cut off `node`."""
        if node.kept:
            self._count(node, node.num_pages)
            self._put(node, self._ends.until[node])
            self.keep(upper, self._ends.until[node])

    def due(self, now: float) -> Sequence[Node]:
        """Forget those whose time is over; returns them, those below before those above."""
        found: list[Node] = []
        while (node := self._ends.pop(now)) is not None:
            self.forget(node)
            found.append(node)
        return found

    def first_to_end(self, namespace: Namespace, num_pages: int, but: Collection[Node]) -> list[Node]:
        """What a tenant keeps that ends first, without the path `but`: so many pages, as far as there are as many, and
        the rest of the last node; those below before those above."""
        share = self._of.get(tenant_of(namespace))
        popped: list[Node] = []
        found: list[Node] = []
        while share is not None and num_pages > 0 and (node := share.ends.pop(inf)) is not None:
            popped.append(node)
            if node not in but:
                found.append(node)
                num_pages -= node.num_pages
        for node in popped:
            self._put(node, self._ends.until[node])
        return found

    def check_integrity(self, nodes: Sequence[Node]) -> None:
        """`nodes`: all of the tree that a match can reach. Raises IntegrityError."""
        kept, until = {node for node in nodes if node.kept}, self._ends.until
        if (
            kept != until.keys()
            or kept != self._size.keys()
            or any(self._size[node] != node.num_pages for node in kept)
        ):
            raise IntegrityError("what is kept for a while is not what the tree says")
        if self.num_pages != sum(node.num_pages for node in kept):
            raise IntegrityError("pages that are kept for a while are miscounted")
        own: dict[Namespace, dict[Node, float]] = {}
        for node in kept:
            own.setdefault(tenant_of(node.namespace), {})[node] = until[node]
            above = node.parent
            if above is not None and above.parent is not None and until.get(above, 0.0) < until[node]:
                raise IntegrityError("a node is kept longer than one above it")
        if own != {tenant: share.ends.until for tenant, share in self._of.items()}:
            raise IntegrityError("what a tenant keeps for a while is not what the tree says")
        if any(share.num_pages != sum(node.num_pages for node in share.ends.until) for share in self._of.values()):
            raise IntegrityError("pages that a tenant keeps for a while are miscounted")

    def _num_own(self, namespace: Namespace) -> int:
        share = self._of.get(tenant_of(namespace))
        return 0 if share is None else share.num_pages

    def _put(self, node: Node, until: float) -> None:
        self._ends.put(node, until)
        self._of[tenant_of(node.namespace)].ends.put(node, until)

    def _count(self, node: Node, num_pages: int) -> None:
        more = num_pages - self._size.pop(node, 0)
        if num_pages:
            self._size[node] = num_pages
        self.num_pages += more
        tenant = tenant_of(node.namespace)
        share = self._of.setdefault(tenant, _Share())
        share.num_pages += more
        if not share.num_pages:
            del self._of[tenant]
