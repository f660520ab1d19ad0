"""The prefix cache's accounts, recomputed from the tree and the live leases."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.eviction import EvictionOrder
from deltaserve.control.cache.pages import PageState
from deltaserve.control.cache.radix import Node, RadixTree
from deltaserve.control.cache.tails import TailPool
from deltaserve.core.errors import IntegrityError
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.lifetime import Lifetime
from deltaserve.core.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TreeAccounts:
    """What a prefix cache claims about its pages."""

    tree: RadixTree
    order: EvictionOrder
    pools: tuple[PagePool, ...]
    tails: tuple[TailPool, ...]
    """The pools among `pools` that are not FULL."""
    leased: Sequence[tuple[Node, tuple[int, ...]]]
    """Each live lease: its node, and per pool the first page index it holds."""
    num_evictable: int
    """FULL pages that may be evicted; `num_protected` are those that may not."""
    num_protected: int


def check_accounts(accounts: TreeAccounts) -> None:
    """Raise IntegrityError on the first claim that does not hold."""
    tree = accounts.tree
    matchable = list(tree.nodes())
    severed = [node for top in tree.severed for node in tree.below(top)]
    nodes = matchable + severed
    by_pool = {tail.index: tail.lifetime for tail in accounts.tails}
    lifetimes = [by_pool.get(index, Lifetime.FULL) for index in range(len(accounts.pools))]
    for node in nodes:
        _check_node(node, tree.page_size, lifetimes)
    for namespace, root in tree.roots.items():
        _claim(root.parent is None and root.end == 0 and root.namespace == namespace, "a root is not one")
        _claim(bool(root.children or root.locks), "an empty root is kept")
    _claim(not any(node.severed for node in matchable), "a match can reach a severed node")
    _claim(all(node.severed and node.locks for node in severed), "a severed node without a lease is kept")
    _check_locks(nodes, [node for node, _ in accounts.leased])
    _check_order(nodes, accounts.order)
    _check_counts(nodes, accounts)
    for tail in accounts.tails:
        _check_tail_locks(tail, accounts.leased)
        _check_tail_counts(tail, nodes)
    for index, pool in enumerate(accounts.pools):
        _check_pages(nodes, index, pool)


def _claim(holds: bool, breach: str) -> None:
    if not holds:
        raise IntegrityError(breach)


def _check_node(node: Node, page_size: int, lifetimes: Sequence[Lifetime]) -> None:
    page_bytes = page_size * TOKEN_BYTES
    num_pages = node.num_pages
    _claim(len(node.tokens) == num_pages * page_bytes, "a node's tokens do not fill its pages")
    _claim(len(node.keys) == num_pages * KEY_BYTES, "a node's keys do not match its pages")
    _claim(len(node.pages) == len(lifetimes), "a node lacks a pool")
    for pages, lifetime in zip(node.pages, lifetimes, strict=True):
        least = num_pages if lifetime is Lifetime.FULL else 0
        most = min(num_pages, 1) if lifetime is Lifetime.STATE else num_pages
        if not least <= len(pages) <= most:
            raise IntegrityError(f"a node of {num_pages} pages holds {len(pages)} {lifetime}")
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
        if node.locks != locks[node]:
            raise IntegrityError(f"locks of node {node.id}: {locks[node]} leases, {node.locks} kept")


def _check_order(nodes: Sequence[Node], order: EvictionOrder) -> None:
    order.check_integrity()
    place = {node: index for index, node in enumerate(order)}
    unlocked = {node for node in nodes if node.parent is not None and not node.locks}
    _claim(place.keys() == unlocked, "the eviction order does not hold exactly the unlocked nodes")
    for node in unlocked:
        parent = node.parent
        _claim(parent not in place or place[parent] > place[node], "a node would be evicted before one below it")
    for node in nodes:
        is_above = node.parent is None or node.parent.reused or node.parent.parent is None
        _claim(is_above or not node.reused, "a node is said to be used again, and the one above it is not")


def _check_counts(nodes: Sequence[Node], accounts: TreeAccounts) -> None:
    evictable = sum(node.num_pages for node in nodes if not node.locks)
    protected = sum(node.num_pages for node in nodes if node.locks)
    _claim(evictable == accounts.num_evictable, f"evictable: {evictable} found, {accounts.num_evictable} kept")
    _claim(protected == accounts.num_protected, f"protected: {protected} found, {accounts.num_protected} kept")


def _check_tail_locks(tail: TailPool, leased: Sequence[tuple[Node, tuple[int, ...]]]) -> None:
    locks: dict[Node, Counter[int]] = {}
    for leaf, firsts in leased:
        first = firsts[tail.index]
        step: Node | None = leaf
        while step is not None and step.end > first:
            locks.setdefault(step, Counter())[first] += 1
            _claim(step.held_from(tail.index) <= max(first, step.start), f"a leased page of pool {tail.index} is gone")
            step = step.parent
    _claim(locks == tail.locks, f"locks of pool {tail.index} are not those of the leases")


def _check_tail_counts(tail: TailPool, nodes: Sequence[Node]) -> None:
    evictable: dict[Node, int] = {}
    for node in nodes:
        first_locked = max(node.start, min(tail.locks.get(node, {node.end: 1})))
        if count := max(0, first_locked - node.held_from(tail.index)):
            evictable[node] = count
    held = sum(len(node.pages[tail.index]) for node in nodes)
    _claim(evictable == dict(tail.order), f"the eviction order of pool {tail.index} is not what no lease needs")
    _claim(sum(evictable.values()) == tail.num_evictable, f"evictable pages of pool {tail.index} are miscounted")
    _claim(held == tail.num_held, f"pages of pool {tail.index}: {held} found, {tail.num_held} kept")


def _check_pages(nodes: Sequence[Node], index: int, pool: PagePool) -> None:
    pool.check_integrity()
    pages = list(chain.from_iterable(node.pages[index] for node in nodes))
    _claim(len(set(pages)) == len(pages), f"a page of pool {index} is in two places of the tree")
    _claim(pool.are_all(pages, PageState.CACHED), f"a tree page of pool {index} is not CACHED")
    _claim(pool.count(PageState.CACHED) == len(pages), f"a CACHED page of pool {index} is not in the tree")
