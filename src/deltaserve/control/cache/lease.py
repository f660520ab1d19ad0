"""What a prefix cache hands out: a match, a lease, and what became of an insert."""

from dataclasses import dataclass, field
from itertools import chain

from deltaserve.control.cache.radix import Node, RadixTree
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace, PageId


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefixes of some tokens. Holds nothing: lease it before the tree changes, or match again."""

    namespace: Namespace
    num_tokens: int
    """Usable prefix: every pool has all that continuing there needs. Multiple of the page size; 0 is ordinary."""
    num_pages: int
    """FULL pages of the usable prefix."""
    reach: int
    """Tokens up to which FULL pages are there; >= num_tokens, and equal where every pool is FULL."""
    version: int
    """Version of the tree when the prefix was found."""
    node: Node | None = field(repr=False)
    """Deepest node reached, which `reach` may end inside of; None when nothing matched."""
    tree: RadixTree = field(repr=False)


class Lease:
    """A locked prefix: FULL pages from the root to `num_tokens`, of other pools a tail. Ended exactly once."""

    __slots__ = ("_firsts", "_live", "_node", "_page_size", "num_pages", "num_tokens")

    def __init__(self, node: Node, page_size: int, firsts: tuple[int, ...]) -> None:
        self._node = node
        self._page_size = page_size
        self._firsts = firsts  # per pool: first page index held
        self._live = True
        self.num_pages = node.end
        self.num_tokens = node.end * page_size

    @property
    def live(self) -> bool:
        """False after `release`, `insert` or `lengthen` took it."""
        return self._live

    @property
    def namespace(self) -> Namespace:
        return self._node.namespace

    def first_page(self, pool: int) -> int:
        """First page index held in a pool: 0 in a FULL pool, `num_pages` where nothing is held."""
        return self._firsts[pool]

    def pages(self, pool: int) -> tuple[PageId, ...]:
        """Pages of page indexes [first_page, num_pages) in one pool. Raises StateError when no longer live."""
        first = self._firsts[pool]
        if not first:
            return tuple(chain.from_iterable([node.pages[pool] for node in self._nodes()]))
        nodes = [node for node in self._nodes() if node.end > first]
        pages = tuple(chain.from_iterable(node.pages[pool] for node in nodes))
        return pages[len(pages) - (self.num_pages - first) :]

    def path(self, last: Node | None = None) -> tuple[tuple[int, int, int], ...]:
        """(node id, start, end) in tokens, root to leaf, gapless. Equal node ids of two leases mean equal pages.

        `last`: one of its nodes, up to which it is wanted. Stays true while `PrefixCache.version` does. Raises
        StateError when no longer live.
        """
        size = self._page_size
        return tuple((node.id, node.start * size, node.end * size) for node in self._nodes(last))

    def last_common(self) -> Node | None:
        """The deepest of its nodes that another lease has, too; None: none of them. Raises StateError when no longer
        live."""
        if not self._live:
            raise StateError("use of a lease that has ended")
        node = self._node
        while node.locks < 2 and node.parent is not None:  # those above a node have at least as many
            node = node.parent
        return node if node.parent is not None else None

    def _nodes(self, last: Node | None = None) -> list[Node]:
        """Nodes that hold pages, root to leaf, or to `last`."""
        if not self._live:
            raise StateError("use of a lease that has ended")
        nodes = []
        node = self._node if last is None else last
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` made of the pages handed over."""

    lease: Lease
    """Lease over the whole path, the handed-over part included. Its pages are the ones to use from now on."""
    num_adopted_pages: int
    """Page indexes from the old lease's end on whose FULL pages were in the tree already: ours were freed."""
