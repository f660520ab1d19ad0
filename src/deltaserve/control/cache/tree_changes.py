"""What entered and left a tree, for the routers' residency view."""

from collections.abc import Sequence
from itertools import islice

from deltaserve.control.cache.block_log import BlockLog
from deltaserve.core.keys import KEY_BYTES, unpack_keys
from deltaserve.core.wire.messages import Events

MAX_PENDING_KEYS = 1 << 16
"""Changes kept for the next drain, 1 MiB. More are dropped; the gap in the numbers calls for a snapshot."""


MAX_FILE_KEYS = 1 << 19
"""Most keys of a file that a snapshot tells of, 8 MiB."""
_TREE, _FILE = 1, 2


class EventLog:
    """Numbered changes since the last drain. The last change of a key wins, so order within one drain is free.

    Changes state where a key *is*, not how it got there: repeating one that a snapshot already shows does no harm.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[bool, bytes]] = []  # (is in the tree now, packed keys), oldest first
        self._num_pending = 0
        self._next = 0

    @property
    def next_event(self) -> int:
        """Number of the first change of the next drain, unless that many pile up that they must be dropped."""
        return self._next

    def stored(self, keys: bytes) -> None:
        self._append(True, keys)

    def evicted(self, keys: bytes) -> bytes:
        """Note that these left the tree. Returns those that are nowhere any more."""
        self._append(False, keys)
        return keys

    def beside_tree(self) -> bytes:
        """Keys that are had although they are not in the tree, for a snapshot."""
        return b""

    def drain(self) -> Events:
        """Changes since the last call."""
        present: dict[bytes, bool] = {}
        for is_present, keys in self._pending:
            present.update(dict.fromkeys(unpack_keys(keys), is_present))
        events = Events(
            first=self._next,
            stored=b"".join(key for key, is_present in present.items() if is_present),
            evicted=b"".join(key for key, is_present in present.items() if not is_present),
        )
        self._next += len(present)
        self._pending.clear()
        self._num_pending = 0
        return events

    def _append(self, is_present: bool, keys: bytes) -> None:
        self._pending.append((is_present, keys))
        self._num_pending += len(keys) // KEY_BYTES
        if self._num_pending > MAX_PENDING_KEYS:
            self._next += self._num_pending
            self._pending.clear()
            self._num_pending = 0


class FiledEventLog(EventLog):
    """That of a worker with a file under its tree: a key is there as long as one of the two holds it.

    Who routes by these keys sends a prompt where it is read or shared, and not where it would be computed.
    """

    def __init__(self, blocks: BlockLog | None = None) -> None:
        """`blocks`: is told of pages that the file was the last to hold."""
        super().__init__()
        self._blocks = blocks
        self._places: dict[bytes, int] = {}

    def stored(self, keys: bytes) -> None:
        self._add(unpack_keys(keys), _TREE)

    def evicted(self, keys: bytes) -> bytes:
        return self._remove(unpack_keys(keys), _TREE)

    def filed(self, key: bytes) -> None:
        """The file holds the page from now on."""
        self._add((key,), _FILE)

    def unfiled(self, key: bytes) -> None:
        """The file holds it no longer."""
        gone = self._remove((key,), _FILE)
        if gone and self._blocks is not None:
            self._blocks.removed(gone)

    def beside_tree(self) -> bytes:
        return b"".join(islice((key for key, places in self._places.items() if places == _FILE), MAX_FILE_KEYS))

    def _add(self, keys: Sequence[bytes], place: int) -> None:
        new = [key for key in keys if key not in self._places]
        for key in keys:
            self._places[key] = self._places.get(key, 0) | place
        if new:
            super().stored(b"".join(new))

    def _remove(self, keys: Sequence[bytes], place: int) -> bytes:
        gone: list[bytes] = []
        for key in keys:
            places = self._places.pop(key, 0) & ~place
            if places:
                self._places[key] = places
            else:
                gone.append(key)
        return super().evicted(b"".join(gone)) if gone else b""
