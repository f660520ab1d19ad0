"""Shape of the prefix tree: which node holds which pages of which token path. No locks, pools or recency here.

One root per namespace, so no path leads from one to another. A node covers page indexes [start, end) of its path;
its children differ in their first page, and are found by that page's token ids: tokens decide, page keys only hint
where two paths part. So colliding (or wrong) keys cost time, never a wrong page.

In each pool a node holds the pages of its *last* len(pages) page indexes: all of them in a FULL pool, any suffix of
them in a WINDOW pool, and in a STATE pool at most one slot, the state at the node's end.
"""

from collections.abc import Iterator

from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace, PageId
from deltaserve.core.keys import KEY_BYTES, common_keys
from deltaserve.core.tokens import TOKEN_BYTES

Pages = tuple[tuple[PageId, ...], ...]
"""Page ids of each pool."""
Packed = bytes | bytearray | memoryview
"""Packed token ids or page keys of a whole path. Read in place: a long prompt is not copied to be looked up."""


class Node:
    """Pages [start, end) of one token path. Identity is what counts: nodes do not compare."""

    __slots__ = (
        "children",
        "end",
        "id",
        "kept",
        "keys",
        "locks",
        "namespace",
        "pages",
        "parent",
        "reused",
        "severed",
        "shared",
        "start",
        "tokens",
    )

    def __init__(
        self, node_id: int, namespace: Namespace, parent: "Node | None", tokens: bytes, keys: bytes, pages: Pages
    ) -> None:
        self.id = node_id
        self.namespace = namespace
        self.parent = parent
        """Parent node; None only for a root, which holds no pages."""
        self.tokens = tokens
        """Packed ids of this node's pages only."""
        self.keys = keys
        """Packed page keys of this node's pages only."""
        self.pages = pages
        """Per pool: page ids of the last page indexes of [start, end)."""
        self.start: int = parent.end if parent is not None else 0
        self.end: int = self.start + len(keys) // KEY_BYTES
        self.children: dict[bytes, Node] = {}
        """Token ids of a child's first page |-> child."""
        self.locks = 0
        """Live leases on this node or below it."""
        self.reused = False
        """A second request has leased this node: see control/cache/eviction.py. Then its ancestors are, too."""
        self.shared = False
        """Paths part at its end or below it, or did, or two requests computed it at a time. Then its ancestors are,
        too."""
        self.kept = False
        """A client asked to keep it for a while: see control/cache/retention_hints.py. Then its ancestors are, too."""
        self.severed: bool = parent.severed if parent is not None else False
        """Cut off from its namespace's root: no path leads here, and its pages go with the last lease."""

    @property
    def num_pages(self) -> int:
        """How many page indexes the node covers."""
        return self.end - self.start

    def held_from(self, pool: int) -> int:
        """First page index whose page this node holds in `pool`; `end` when it holds none."""
        return self.end - len(self.pages[pool])

    def keys_of(self, first: int, end: int) -> bytes:
        """Packed keys of page indexes [first, end), which are of this node."""
        return self.keys[(first - self.start) * KEY_BYTES : (end - self.start) * KEY_BYTES]

    def set_pages(self, pool: int, pages: tuple[PageId, ...]) -> None:
        self.pages = (*self.pages[:pool], pages, *self.pages[pool + 1 :])


class RadixTree:
    """Roots and the moves: descend, add, extend, split, trim, sever, remove."""

    def __init__(self, page_size: int, num_pools: int) -> None:
        self.page_size = page_size
        self.roots: dict[Namespace, Node] = {}
        self.severed: dict[Node, None] = {}
        """Topmost nodes of severed subtrees."""
        self._page_bytes = page_size * TOKEN_BYTES
        self._no_pages: Pages = ((),) * num_pools
        self._last_id = 0

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made if absent."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(self._next_id(), namespace, None, b"", b"", self._no_pages)
        return root

    def nodes(self) -> Iterator[Node]:
        """Every node a match can reach, parents before children."""
        for root in self.roots.values():
            yield from self.below(root)

    def below(self, top: Node) -> Iterator[Node]:
        """`top` and every node below it, parents before children."""
        stack = [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def descend(self, node: Node, tokens: Packed, keys: Packed, limit: int) -> tuple[Node, int]:
        """Follow `tokens` down from the end of `node`, at most to page index `limit`.

        Returns (deepest node reached, page index where the agreement ends); the index may lie inside that node.
        `tokens` and `keys` are those of the whole path; `node` must lie on it.
        """
        size = self._page_bytes
        end = node.end
        while end < limit:
            child = node.children.get(bytes(tokens[end * size : (end + 1) * size]))
            if child is None:
                break
            node = child
            end += self._agreement(node, tokens, keys, limit)
            if end < node.end:
                break
        return node, end

    def add(self, parent: Node, tokens: bytes, keys: bytes, pages: Pages) -> Node:
        """A new leaf below `parent`, holding exactly these."""
        child = Node(self._next_id(), parent.namespace, parent, tokens, keys, pages)
        if parent.children.setdefault(tokens[: self._page_bytes], child) is not child:
            raise StateError("a child with this first page exists")
        return child

    def extend(self, leaf: Node, tokens: bytes, keys: bytes, pages: Pages) -> None:
        """Append pages to a leaf: a path that grows by turns or chunks stays one node, so a match stays short."""
        if leaf.children or leaf.parent is None:
            raise StateError("only a leaf can be extended")
        leaf.tokens += tokens
        leaf.keys += keys
        leaf.pages = tuple(old + new for old, new in zip(leaf.pages, pages, strict=True))
        leaf.end += len(keys) // KEY_BYTES

    def split(self, node: Node, index: int) -> Node:
        """Cut `node` at page index `index`; returns the new upper part.

        The lower part stays the same object: whoever holds `node` still holds its whole path.
        """
        parent = node.parent
        if parent is None or not node.start < index < node.end:
            raise StateError(f"cannot split [{node.start}, {node.end}) at {index}")
        cut = index - node.start
        size = self._page_bytes
        kept = node.end - index
        upper = Node(
            self._next_id(),
            node.namespace,
            parent,
            node.tokens[: cut * size],
            node.keys[: cut * KEY_BYTES],
            tuple(pages[:-kept] for pages in node.pages),
        )
        if node in self.severed:
            del self.severed[node]
            self.severed[upper] = None
        else:
            parent.children[node.tokens[:size]] = upper
        upper.severed, upper.reused, upper.shared = node.severed, node.reused, node.shared
        node.parent = upper
        node.start = index
        node.tokens = node.tokens[cut * size :]
        node.keys = node.keys[cut * KEY_BYTES :]
        node.pages = tuple(pages[-kept:] for pages in node.pages)
        upper.children[node.tokens[:size]] = node
        return upper

    def trim(self, leaf: Node, index: int) -> None:
        """Drop the page indexes [index, end) of a leaf, and what it holds there; start < index."""
        if leaf.children or not leaf.start < index <= leaf.end:
            raise StateError(f"cannot trim [{leaf.start}, {leaf.end}) to {index}")
        kept, cut = index - leaf.start, leaf.end - index
        if not cut:
            return
        leaf.end = index
        leaf.tokens = leaf.tokens[: kept * self._page_bytes]
        leaf.keys = leaf.keys[: kept * KEY_BYTES]
        leaf.pages = tuple(pages[:-cut] for pages in leaf.pages)

    def sever(self, top: Node) -> None:
        """Take `top` and all below it off the paths of its namespace. Parent links stay: leases lead up by them."""
        parent = top.parent
        if parent is None or top.severed:
            raise StateError("a root, or what is severed already, cannot be severed")
        del parent.children[top.tokens[: self._page_bytes]]
        self.severed[top] = None
        for node in self.below(top):
            node.severed = True

    def remove(self, leaf: Node) -> Node:
        """Take a leaf that is no root out of the tree; returns its parent."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise StateError("only a leaf can be removed")
        if leaf in self.severed:
            del self.severed[leaf]
        else:
            del parent.children[leaf.tokens[: self._page_bytes]]
        return parent

    def forget_if_empty(self, root: Node) -> None:
        """Drop a root nobody leases and nothing hangs on: namespaces come and go without end."""
        if not root.children and not root.locks:
            del self.roots[root.namespace]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _agreement(self, node: Node, tokens: Packed, keys: Packed, limit: int) -> int:
        """Pages of `node` that agree with `tokens`, looking no further than page index `limit`."""
        size = self._page_bytes
        ours, offset = node.tokens, node.start * size
        if node.end <= limit and _stands_at(tokens, offset, ours):
            return node.num_pages
        bound = min(node.end, limit) - node.start
        guess = common_keys(node.keys, memoryview(keys)[node.start * KEY_BYTES : (node.start + bound) * KEY_BYTES])
        agrees = _stands_at(tokens, offset, memoryview(ours)[: guess * size])
        if agrees and (guess == bound or not _same_page(ours, tokens, guess, offset, size)):
            return guess
        parts = (page for page in range(bound) if not _same_page(ours, tokens, page, offset, size))
        return next(parts, bound)  # keys collided or belong to other tokens


def _stands_at(tokens: Packed, offset: int, ours: bytes | memoryview) -> bool:
    """Whether `tokens` has `ours` at `offset`. Runs as one memcmp, whichever of the types they are."""
    if isinstance(tokens, memoryview):
        return bytes(ours).startswith(tokens[offset : offset + len(ours)])
    return tokens.startswith(ours, offset)


def _same_page(ours: bytes, theirs: Packed, page: int, offset: int, size: int) -> bool:
    at = page * size
    return ours[at : at + size] == theirs[offset + at : offset + at + size]
