"""What entered and left a tree, told whole: for whoever outside keeps a picture of it and knows no page keys.

The residency view of our own fronts needs keys alone (tree_changes.py). A router of others finds a prompt's pages by
its own hashes of token ids, so it is told the ids, and behind which page they stand.
"""

from dataclasses import dataclass

from deltaserve.core.ids import Namespace
from deltaserve.core.keys import num_keys


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Pages that entered, one behind the other."""

    namespace: Namespace
    parent: bytes
    """Key of the page before the first; empty at the start of a path."""
    keys: bytes
    """Packed keys."""
    tokens: bytes
    """Packed ids of all the pages."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Pages that left, in any order."""

    keys: bytes
    """Packed keys."""


@dataclass(frozen=True, slots=True)
class BlocksForgotten:
    """Nothing holds that was told before; what there is follows."""


BlockChange = BlocksStored | BlocksRemoved | BlocksForgotten


class BlockLog:
    """Changes since they were last taken, in order, up to a number of pages."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._changes: list[BlockChange] = []
        self._num_pages = 0
        self._has_lost = False

    def stored(self, stored: BlocksStored) -> None:
        self._append(stored, num_keys(stored.keys))

    def removed(self, keys: bytes) -> None:
        self._append(BlocksRemoved(keys), num_keys(keys))

    def take(self) -> tuple[BlockChange, ...] | None:
        """Changes since the last call; None: there were too many, and the tree itself has to be told."""
        taken = None if self._has_lost else tuple(self._changes)
        self._changes.clear()
        self._num_pages, self._has_lost = 0, False
        return taken

    def _append(self, change: BlockChange, num_pages: int) -> None:
        if self._has_lost:
            return
        self._changes.append(change)
        self._num_pages += num_pages
        if self._num_pages > self._max_pages:
            self._changes.clear()
            self._has_lost = True
