"""Slots of one pool in the file under the tree: which page each holds, and which may be written over.

    free -> writing -> stored -> free
                         \\-> held       forgotten while somebody reads it; free when the last reader is through

A page is found by its key alone: keys are chained hashes seeded by the namespace (core/keys.py), so a flat index is
enough, and tenants never meet in it. Here are numbers only: who copies what is told by control/engine/tiering.py.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from deltaserve.control.cache.tree_changes import FiledEventLog
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.keys import KEY_BYTES, key_at, num_keys


class Tier:
    """Slots [0, num_slots) and the keys of what they hold.

    A slot that is read is pinned, and is written over by nobody before its last pin is gone.
    """

    def __init__(self, num_slots: int, log: FiledEventLog | None = None) -> None:
        """`log`: is told which pages can be found."""
        self.num_slots = num_slots
        self._log = log
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # key |-> slot, the least recently used first
        self._writing: dict[int, bytes] = {}
        self._pins: Counter[int] = Counter()
        self._held: set[int] = set()
        self._num_used = 0
        """Slots from this one on were never used."""
        self._free: list[int] = []
        """Used ones that are free."""
        self.num_evicted = 0
        """Pages that made room for others."""

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    # ------------------------------------------------------------ reading

    def num_from(self, keys: bytes | bytearray, first: int) -> int:
        """How many pages of a packed chain are here from page index `first` on, up to the first that is not."""
        end = num_keys(keys)
        missing = (index for index in range(first, end) if key_at(keys, index) not in self._stored)
        return next(missing, max(first, end)) - first

    def last_missing(self, keys: bytes | bytearray, indexes: range) -> int | None:
        """The last of these page indexes of a packed chain whose page is not here."""
        return next((index for index in reversed(indexes) if key_at(keys, index) not in self._stored), None)

    def use(self, keys: bytes | bytearray, indexes: range) -> tuple[int, ...]:
        """Slots of these pages of a packed chain, which are here. They become the most recently used ones, the first of
        them last: a later page is of no use without it. Raises KeyError."""
        slots = tuple(self._stored[key_at(keys, index)] for index in indexes)
        self._touch(keys, indexes)
        return slots

    def refresh(self, keys: bytes | bytearray, end: int) -> None:
        """Make what is here of a packed chain before page index `end` the most recently used, as `use` does."""
        self._touch(keys, range(end))

    def _touch(self, keys: bytes | bytearray, indexes: range) -> None:
        for index in reversed(indexes):
            if (key := key_at(keys, index)) in self._stored:
                self._stored.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """Make a stored page the most recently used one."""
        self._stored.move_to_end(key)

    def pin(self, slots: Iterable[int]) -> None:
        """Note that these slots, which hold pages, are read from now on."""
        self._pins.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one `pin`: what was forgotten meanwhile becomes free with its last pin. Raises StateError."""
        for slot in slots:
            if not self._pins[slot]:
                raise StateError(f"slot {slot} is not pinned")
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._held:
                    self._held.remove(slot)
                    self._free.append(slot)

    # ------------------------------------------------------------ writing

    def begin(self, key: bytes) -> int | None:
        """A slot to write this page to, a free one or that of the page used least recently; None: all are in use.

        Nothing finds the page before `stored`.
        """
        slot = self._free.pop() if self._free else self._unused()
        if slot is not None:
            self._writing[slot] = key
        return slot

    def _unused(self) -> int | None:
        if self._num_used == self.num_slots:
            return self._evict()
        self._num_used += 1
        return self._num_used - 1

    def _evict(self) -> int | None:
        oldest = next((key for key, slot in self._stored.items() if slot not in self._pins), None)
        if oldest is None:
            return None
        self.num_evicted += 1
        return self._pop(oldest)

    def _pop(self, key: bytes) -> int:
        """The slot of a page that is not to be found any more."""
        if self._log is not None:
            self._log.unfiled(key)
        return self._stored.pop(key)

    def stored(self, slot: int) -> None:
        """The page is in its slot whole. Raises StateError unless it was being written."""
        key = self._end(slot)
        if key and key not in self._stored:
            self._stored[key] = slot
            if self._log is not None:
                self._log.filed(key)
        else:
            self._free.append(slot)

    def failed(self, slot: int) -> None:
        """The slot was not written, or in part. Raises StateError unless it was being written."""
        self._end(slot)
        self._free.append(slot)

    def _end(self, slot: int) -> bytes:
        key = self._writing.pop(slot, None)
        if key is None:
            raise StateError(f"slot {slot} is not being written")
        return key

    # ------------------------------------------------------------ forgetting

    def forget(self, keys: Collection[bytes]) -> None:
        """These pages are not to be found any more."""
        for key in keys:
            if key in self._stored:
                slot = self._pop(key)
                (self._held.add if slot in self._pins else self._free.append)(slot)

    def clear(self) -> None:
        """Forget all pages, those included that are being written."""
        self.forget(list(self._stored))
        self._writing = dict.fromkeys(self._writing, b"")

    def check_integrity(self) -> None:
        """Recount the slots. Raises IntegrityError."""
        slots = [*self._stored.values(), *self._writing, *self._held, *self._free]
        if sorted(slots) != list(range(self._num_used)) or self._num_used > self.num_slots:
            raise IntegrityError("a slot is in two states, or in none")
        if any(count < 1 for count in self._pins.values()):
            raise IntegrityError("a count of pins below 1 is kept")
        if not self._pins.keys() <= {*self._stored.values(), *self._held}:
            raise IntegrityError("a slot is read that holds nothing")
        if any(len(key) != KEY_BYTES for key in self._stored):
            raise IntegrityError("a page is stored under what is no key")

    def is_pinned(self, slot: int) -> bool:
        """Whether the slot is read."""
        return slot in self._pins

    @property
    def num_pinned(self) -> int:
        """Slots that are read."""
        return len(self._pins)

    @property
    def num_writing(self) -> int:
        """Slots that are being written."""
        return len(self._writing)
