"""What a tree looks like to whoever operates a worker: where its pages are, and which of them are leased.

A look is bounded: it reads the first nodes from the roots down, level by level, and tells what is leased or kept, then
what has the most pages below it. A request that is computed meanwhile waits for it no longer than for any other
message.
"""

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator

from deltaserve.control.cache.radix import Node, RadixTree
from deltaserve.core.ids import Namespace, Room
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.namespaces import tenant_of
from deltaserve.core.wire.messages import TreeNode, TreeShape

MOST_SEEN = 4096
"""Nodes that one look reads: some milliseconds of Python."""
MOST_TOLD = 512
"""Nodes that one look tells, some 50 KB."""
_MOST_ROOMS = 8
_LABEL_BYTES = 6


def shape_of(tree: RadixTree, num_pages: int, holders: Iterable[tuple[Node, Room]], max_nodes: int) -> TreeShape:
    """At most `max_nodes` nodes of the tree, which has `num_pages`. `holders`: where the leases of which requests
    end."""
    seen = _SeenNodes(tree)
    rooms: dict[Node, list[Room]] = defaultdict(list)
    for node, room in holders:
        rooms[node].append(room)
    places: dict[int, int] = {}
    told: list[TreeNode] = []
    for index in seen.largest(min(max(0, max_nodes), MOST_TOLD)):
        node, parent = seen.nodes[index], seen.parents[index]
        places[index] = len(told)
        told.append(
            TreeNode(
                parent=None if parent is None else places[parent],
                label=_root_label(node.namespace) if parent is None else _label(node),
                num_pages=node.num_pages,
                num_below=seen.below[index],
                num_leases=node.locks,
                is_kept=node.kept,
                rooms=tuple(rooms[node][:_MOST_ROOMS]) if node in rooms else (),
            )
        )
    return TreeShape(
        page_size=tree.page_size,
        num_pages=num_pages,
        nodes=tuple(told),
        num_seen=len(seen.nodes),
        num_unseen=seen.num_unseen,
    )


class _SeenNodes:
    """The first nodes of a tree, level by level, and the pages below each."""

    def __init__(self, tree: RadixTree) -> None:
        self.nodes: list[Node] = list(tree.roots.values())[:MOST_SEEN]
        self.parents: list[int | None] = [None] * len(self.nodes)
        self.children: list[range] = []
        self.num_unseen = len(tree.roots) - len(self.nodes)
        for index, node in enumerate(self.nodes):  # which grows meanwhile
            first, found = len(self.nodes), list(node.children.values())
            self.nodes += found[: MOST_SEEN - first]
            self.children.append(range(first, len(self.nodes)))
            self.parents += [index] * len(self.children[index])
            self.num_unseen += len(found) - len(self.children[index])
        self.below = [node.num_pages for node in self.nodes]
        for index in range(len(self.nodes) - 1, -1, -1):
            parent = self.parents[index]
            if parent is not None:
                self.below[parent] += self.below[index]

    def largest(self, count: int) -> Iterator[int]:
        """Those that are leased or kept, then those with the most pages below them; a parent before its children,
        oldest first among equals."""
        heap = [self._rank(index) for index, parent in enumerate(self.parents) if parent is None]
        heapq.heapify(heap)
        for _ in range(count):
            if not heap:
                return
            *_, index = heapq.heappop(heap)
            yield index
            for child in self.children[index]:
                heapq.heappush(heap, self._rank(child))

    def _rank(self, index: int) -> tuple[bool, int, int]:
        node = self.nodes[index]
        return not (node.locks or node.kept), -self.below[index], index


def _label(node: Node) -> str:
    """The key of its last page, which depends on all pages before it."""
    return node.keys[-KEY_BYTES:][:_LABEL_BYTES].hex()


def _root_label(namespace: Namespace) -> str:
    """The tenant, and a hash of what its client narrowed it by: that is the client's own secret."""
    tenant = tenant_of(namespace)
    if tenant == namespace:
        return tenant
    return f"{tenant} ~{hashlib.blake2b(namespace.encode(), digest_size=_LABEL_BYTES).hexdigest()}"
