"""Pages that entered the tree and have not been copied to the file under it, in the order in which they came."""

from collections.abc import Callable, Sequence
from itertools import islice

from deltaserve.control.cache.tier import Tier
from deltaserve.core.ids import PageId
from deltaserve.core.keys import unpack_keys


class Newcomers:
    """Pages in the tree, by key; one that leaves it is forgotten. So whoever is here may be copied.

    A page that leaves the tree becomes the most recently used one of the file: while it was in the tree nobody asked
    the file for it.
    """

    def __init__(self, tier: Tier, on_poison: Callable[[], None]) -> None:
        """`on_poison` is called when pages of the tree turn out to be worthless."""
        self._tier = tier
        self.poisoned = on_poison
        self._pages: dict[bytes, PageId] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def stored(self, keys: bytes, pages: Sequence[PageId]) -> None:
        self._pages.update(zip(unpack_keys(keys), pages, strict=True))

    def gone(self, keys: bytes) -> None:
        for key in reversed(unpack_keys(keys)):
            self._pages.pop(key, None)
            if key in self._tier:
                self._tier.touch(key)

    def take(self, most: int) -> dict[bytes, PageId]:
        """Up to `most` pages, the oldest first; the caller's from now on. Each was in the tree when last heard of."""
        taken = dict(islice(self._pages.items(), most))
        for key in taken:
            del self._pages[key]
        return taken
