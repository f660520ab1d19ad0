"""The prefix cache's books, recomputed from the tree and the live leases."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.base.errors import IntegrityError
from deltaserve.base.keys import KEY_BYTES
from deltaserve.base.tokens import TOKEN_BYTES
from deltaserve.cache.allocator import PagePool
from deltaserve.cache.eviction import LruOrder
from deltaserve.cache.pages import PageState
from deltaserve.cache.radix import Node, RadixTree


@dataclass(frozen=True, slots=True)
class Books:
    """What a prefix cache claims."""

    tree: RadixTree
    lru: LruOrder
    pools: tuple[PagePool, ...]
    leased: Sequence[Node]
    """Node of each live lease, repeated as often as it is leased."""
    num_evictable: int
    num_protected: int


def check_books(books: Books) -> None:
    """Raise IntegrityError on the first claim that does not hold."""
    nodes = list(books.tree.nodes())
    for node in nodes:
        _check_node(node, books.tree.page_size, len(books.pools))
    for namespace, root in books.tree.roots.items():
        _claim(root.parent is None and root.end == 0 and root.namespace == namespace, "a root is not one")
        _claim(bool(root.children or root.locks), "an empty root is kept")
    _check_locks(nodes, books.leased)
    _check_order(nodes, books.lru)
    _check_counts(nodes, books)
    for index, pool in enumerate(books.pools):
        _check_pages(nodes, index, pool)


def _claim(holds: bool, breach: str) -> None:
    if not holds:
        raise IntegrityError(breach)


def _check_node(node: Node, page_size: int, num_pools: int) -> None:
    page_bytes = page_size * TOKEN_BYTES
    num_pages = node.num_pages
    _claim(len(node.tokens) == num_pages * page_bytes, "a node's tokens do not fill its pages")
    _claim(len(node.keys) == num_pages * KEY_BYTES, "a node's keys do not match its pages")
    _claim([len(pages) for pages in node.pages] == [num_pages] * num_pools, "pools of a node differ in length")
    for first_page, child in node.children.items():
        _claim(child.parent is node and child.start == node.end, "a child does not continue its parent")
        _claim(child.tokens[:page_bytes] == first_page and child.num_pages > 0, "a child is filed under other tokens")
        _claim(child.namespace == node.namespace, "a child is of another namespace")


def _check_locks(nodes: Sequence[Node], leased: Sequence[Node]) -> None:
    locks: Counter[Node] = Counter()
    for leaf in leased:
        node: Node | None = leaf
        while node is not None:
            locks[node] += 1
            node = node.parent
    _claim(locks.keys() <= set(nodes), "a leased node has left the tree")
    for node in nodes:
        _claim(node.locks == locks[node], f"locks of node {node.id}: {locks[node]} leases, {node.locks} kept")


def _check_order(nodes: Sequence[Node], lru: LruOrder) -> None:
    place = {node: index for index, node in enumerate(lru)}
    unlocked = {node for node in nodes if node.parent is not None and not node.locks}
    _claim(place.keys() == unlocked, "the eviction order does not hold exactly the unlocked nodes")
    for node in unlocked:
        parent = node.parent
        _claim(parent not in place or place[parent] > place[node], "a node would be evicted before one below it")


def _check_counts(nodes: Sequence[Node], books: Books) -> None:
    evictable = sum(node.num_pages for node in nodes if not node.locks)
    protected = sum(node.num_pages for node in nodes if node.locks)
    _claim(evictable == books.num_evictable, f"evictable pages: {evictable} found, {books.num_evictable} kept")
    _claim(protected == books.num_protected, f"protected pages: {protected} found, {books.num_protected} kept")


def _check_pages(nodes: Sequence[Node], index: int, pool: PagePool) -> None:
    pool.check_integrity()
    pages = [page for node in nodes for page in node.pages[index]]
    _claim(len(set(pages)) == len(pages), f"a page of pool {index} is in two places of the tree")
    _claim(all(pool.state(page) is PageState.CACHED for page in pages), f"a tree page of pool {index} is not CACHED")
    _claim(pool.count(PageState.CACHED) == len(pages), f"a CACHED page of pool {index} is not in the tree")
