"""What entered and left a tree, for the routers' residency view."""

from deltaserve.core.keys import KEY_BYTES, unpack_keys
from deltaserve.core.wire.messages import Events

MAX_PENDING_KEYS = 1 << 16
"""Changes kept for the next drain, 1 MiB. More are dropped; the gap in the numbers calls for a snapshot."""


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

    def evicted(self, keys: bytes) -> None:
        self._append(False, keys)

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
