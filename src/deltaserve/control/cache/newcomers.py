"""Pages that entered the tree and have not been copied to the file under it, in the order in which they came."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from deltaserve.control.cache.tier import Tier
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PageId
from deltaserve.core.keys import unpack_keys


class Newcomers:
    """Pages in the tree, of each pool by key; one that leaves it is forgotten. So whoever is here may be copied.

    A page that leaves the tree becomes the most recently used one of the file: while it was in the tree nobody asked
    the file for it.
    """

    def __init__(self, tiers: Sequence[Tier], on_poison: Callable[[], None]) -> None:
        """`on_poison` is called when pages of the tree turn out to be worthless."""
        self._tiers = tiers
        self.poisoned = on_poison
        self._pages: tuple[dict[bytes, PageId], ...] = tuple({} for _ in tiers)

    def count(self, pool: int) -> int:
        return len(self._pages[pool])

    def stored(self, pool: int, keys: bytes, pages: Sequence[PageId]) -> None:
        self._pages[pool].update(zip(unpack_keys(keys), pages, strict=True))

    def gone(self, pool: int, keys: bytes) -> None:
        """These pages of one pool left the tree."""
        pages, tier = self._pages[pool], self._tiers[pool]
        for key in reversed(unpack_keys(keys)):
            pages.pop(key, None)
            if key in tier:
                tier.touch(key)

    def leave_out(self, keys: bytes) -> None:
        """These pages are not copied, of no pool."""
        for key in unpack_keys(keys):
            for pages in self._pages:
                pages.pop(key, None)

    def path_gone(self, keys: bytes) -> None:
        """The path lost these page indexes, in every pool."""
        for pool in range(len(self._pages)):
            self.gone(pool, keys)

    def check_integrity(self, pool: int, tree: Mapping[bytes, PageId]) -> None:
        """`tree`: what a match can reach of a pool. Raises IntegrityError."""
        if not self._pages[pool].items() <= tree.items():
            raise IntegrityError(f"a page of pool {pool} is to be copied which is not in the tree")

    def take(self, pool: int, most: int) -> dict[bytes, PageId]:
        """Up to `most` pages, the oldest first; the caller's from now on. Each was in the tree when last heard of."""
        pages = self._pages[pool]
        taken = dict(islice(pages.items(), most))
        for key in taken:
            del pages[key]
        return taken
