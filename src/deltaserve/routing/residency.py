"""Which page keys each worker holds, as far as its Events tell. A hint: a wrong guess costs bytes, never correctness.

Changes are numbered without gaps within a boot of the worker. When a message does not continue the last one, what is
known stays, but nothing more is learned until a snapshot. How a snapshot is asked for: the front repeats its Hello, and
a worker answers every Hello of a front with its own Hello followed by `Events(snapshot=True)`, whose `first` is the
number that the next change will bear (keys of a snapshot are not changes and are not counted).
"""

from dataclasses import dataclass, field

from deltaserve.base.errors import IntegrityError
from deltaserve.base.ids import PeerName
from deltaserve.base.keys import KEY_BYTES, key_at, num_keys
from deltaserve.wire.messages import Events


@dataclass(slots=True)
class _View:
    """One worker's keys; `next` is the number its next change must bear, None while a snapshot is awaited."""

    keys: set[bytes] = field(default_factory=set)
    next: int | None = None


class Residency:
    """worker |-> resident page keys, at most `max_keys` of each.

    A full view takes no further keys until some are evicted: what it holds stays closed under prefixes that way.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._views: dict[PeerName, _View] = {}

    def forget(self, worker: PeerName) -> None:
        """The worker was lost or restarted: its next message must be a snapshot."""
        self._views.pop(worker, None)

    def apply(self, worker: PeerName, events: Events) -> bool:
        """Learn what is there now and what is not. False: a snapshot is needed, nothing was learned."""
        stored, evicted = _split(events.stored), _split(events.evicted)
        if stored is None or evicted is None:
            return False
        view = self._views.setdefault(worker, _View())
        if events.snapshot:
            view.keys.clear()
        elif view.next != events.first:
            view.next = None
            return False
        view.next = events.first if events.snapshot else events.first + len(stored) + len(evicted)
        view.keys.difference_update(evicted)
        room = self._max_keys - len(view.keys)
        view.keys.update(stored[:room])
        return True

    def hit_len(self, worker: PeerName, keys: bytes, page_size: int) -> int:
        """Tokens of the longest resident prefix of a packed key chain.

        Binary search: trees are closed under prefixes. Where a view is not, some prefix length comes out.
        """
        view = self._views.get(worker)
        if view is None:
            return 0
        low, high = 0, num_keys(keys)
        while low < high:
            middle = (low + high) // 2
            if key_at(keys, middle) in view.keys:
                low = middle + 1
            else:
                high = middle
        return low * page_size

    def num_resident(self, worker: PeerName) -> int:
        """Keys known of a worker."""
        view = self._views.get(worker)
        return 0 if view is None else len(view.keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a view outgrew its bound."""
        for worker, view in self._views.items():
            if len(view.keys) > self._max_keys:
                raise IntegrityError(f"residency of {worker}: {len(view.keys)} keys, limit {self._max_keys}")


def _split(packed: bytes) -> list[bytes] | None:
    """Packed keys -> keys; None when the length is not a multiple of a key's."""
    if len(packed) % KEY_BYTES:
        return None
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
