"""Shape of the prefix tree: which node holds which pages of which token path. No locks, pools or recency here.

One root per namespace, so no path leads from one to another. A node covers page indexes [start, end) of its path;
its children differ in their first page, and are found by that page's token ids: tokens decide, page keys only hint
where two paths part. So colliding (or wrong) keys cost time, never a wrong page.
"""

from collections.abc import Iterator

from deltaserve.base.errors import StateError
from deltaserve.base.ids import Namespace, PageId
from deltaserve.base.keys import KEY_BYTES
from deltaserve.base.tokens import TOKEN_BYTES


class Node:
    """Pages [start, end) of one token path, of every pool. Identity is what counts: nodes do not compare."""

    __slots__ = ("children", "end", "id", "keys", "locks", "namespace", "pages", "parent", "start", "tokens")

    def __init__(
        self,
        node_id: int,
        namespace: Namespace,
        parent: "Node | None",
        tokens: bytes,
        keys: bytes,
        pages: tuple[tuple[PageId, ...], ...],
    ) -> None:
        self.id = node_id
        self.namespace = namespace
        self.parent = parent
        """None only for a root, which holds no pages."""
        self.tokens = tokens
        """Packed ids of this node's pages only."""
        self.keys = keys
        """Packed page keys of this node's pages only."""
        self.pages = pages
        """Per pool: page ids of page indexes [start, end); equally many in every pool."""
        self.start: int = parent.end if parent is not None else 0
        self.end: int = self.start + len(keys) // KEY_BYTES
        self.children: dict[bytes, Node] = {}
        """Token ids of a child's first page |-> child."""
        self.locks = 0
        """Live leases on this node or below it."""

    @property
    def num_pages(self) -> int:
        return self.end - self.start


class RadixTree:
    """Roots and the moves: descend, add, extend, split, trim, remove."""

    def __init__(self, page_size: int, num_pools: int) -> None:
        self.page_size = page_size
        self.roots: dict[Namespace, Node] = {}
        self._page_bytes = page_size * TOKEN_BYTES
        self._no_pages: tuple[tuple[PageId, ...], ...] = ((),) * num_pools
        self._last_id = 0

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made if absent."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(self._next_id(), namespace, None, b"", b"", self._no_pages)
        return root

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def descend(self, node: Node, tokens: bytes, keys: bytes, limit: int) -> tuple[Node, int]:
        """Follow `tokens` down from the end of `node`, at most to page index `limit`.

        Returns (deepest node reached, page index where the agreement ends); the index may lie inside that node.
        `tokens` and `keys` are those of the whole path; `node` must lie on it.
        """
        size = self._page_bytes
        end = node.end
        while end < limit:
            child = node.children.get(tokens[end * size : (end + 1) * size])
            if child is None:
                break
            node = child
            end += self._agreement(node, tokens, keys, limit)
            if end < node.end:
                break
        return node, end

    def add(self, parent: Node, tokens: bytes, keys: bytes, pages: tuple[tuple[PageId, ...], ...]) -> Node:
        """A new leaf below `parent`, holding exactly these."""
        child = Node(self._next_id(), parent.namespace, parent, tokens, keys, pages)
        if parent.children.setdefault(tokens[: self._page_bytes], child) is not child:
            raise StateError("a child with this first page exists")
        return child

    def extend(self, leaf: Node, tokens: bytes, keys: bytes, pages: tuple[tuple[PageId, ...], ...]) -> None:
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
        upper = Node(
            self._next_id(),
            node.namespace,
            parent,
            node.tokens[: cut * size],
            node.keys[: cut * KEY_BYTES],
            tuple(pages[:cut] for pages in node.pages),
        )
        parent.children[node.tokens[:size]] = upper
        node.parent = upper
        node.start = index
        node.tokens = node.tokens[cut * size :]
        node.keys = node.keys[cut * KEY_BYTES :]
        node.pages = tuple(pages[cut:] for pages in node.pages)
        upper.children[node.tokens[:size]] = node
        return upper

    def trim(self, leaf: Node, index: int) -> None:
        """Drop the pages [index, end) of a leaf; start < index."""
        if leaf.children or not leaf.start < index <= leaf.end:
            raise StateError(f"cannot trim [{leaf.start}, {leaf.end}) to {index}")
        kept = index - leaf.start
        leaf.end = index
        leaf.tokens = leaf.tokens[: kept * self._page_bytes]
        leaf.keys = leaf.keys[: kept * KEY_BYTES]
        leaf.pages = tuple(pages[:kept] for pages in leaf.pages)

    def remove(self, leaf: Node) -> Node:
        """Take a leaf that is no root out of the tree; returns its parent."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise StateError("only a leaf can be removed")
        del parent.children[leaf.tokens[: self._page_bytes]]
        return parent

    def forget_if_empty(self, root: Node) -> None:
        """Drop a root nobody leases and nothing hangs on: namespaces come and go without end."""
        if not root.children and not root.locks:
            del self.roots[root.namespace]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _agreement(self, node: Node, tokens: bytes, keys: bytes, limit: int) -> int:
        """Pages of `node` that agree with `tokens`, looking no further than page index `limit`."""
        size = self._page_bytes
        offset = node.start * size
        if node.end <= limit and tokens.startswith(node.tokens, offset):
            return node.num_pages
        bound = min(node.end, limit) - node.start
        guess = _agreeing_keys(node.keys, keys[node.start * KEY_BYTES :], bound)
        agrees = tokens.startswith(memoryview(node.tokens)[: guess * size], offset)
        if agrees and (guess == bound or not _same_page(node.tokens, tokens, guess, offset, size)):
            return guess
        parts = (page for page in range(bound) if not _same_page(node.tokens, tokens, page, offset, size))
        return next(parts, bound)  # keys collided or belong to other tokens


def _agreeing_keys(ours: bytes, theirs: bytes, bound: int) -> int:
    """Length of the common prefix of two key chains, at most `bound`; chained, so bisection finds it."""
    low, high = 0, bound
    while low < high:
        middle = (low + high) // 2
        at = middle * KEY_BYTES
        if ours[at : at + KEY_BYTES] == theirs[at : at + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low


def _same_page(ours: bytes, theirs: bytes, page: int, offset: int, size: int) -> bool:
    at = page * size
    return ours[at : at + size] == theirs[offset + at : offset + at + size]
