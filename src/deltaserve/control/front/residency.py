"""Which page keys each worker holds, as far as its Events tell, each in its own page size.

A hint: a wrong guess costs bytes, never correctness.

Changes are numbered without gaps within a boot of the worker. When a message does not continue the last one, what is
known stays, but nothing more is learned until a snapshot. How a snapshot is asked for: the front repeats its Hello, and
a worker answers every Hello of a front with its own Hello followed by `Events(snapshot=True)`, whose `first` is the
number that the next change will bear (keys of a snapshot are not changes and are not counted).

What was placed on a worker a moment ago counts as held there, too: its prompt will be, and a burst of one prefix need
not be computed on every worker until the first Events come.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName
from deltaserve.core.keys import KEY_BYTES, common_keys, key_at, num_keys, unpack_keys
from deltaserve.core.wire.messages import Events

_EXPECTED_S = 10.0
"""Seconds until Events must have told of a placed prompt; else it was not computed."""
_EXPECTED_PROMPTS = 1024
"""Most prompts with different first pages that are expected of one worker."""
_EXPECTED_ALIKE = 4
"""Most prompts with equal first pages that are expected of one worker."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A prompt that was placed on a worker: its packed keys."""

    keys: bytes
    until: float


@dataclass(slots=True)
class _View:
    """One worker's keys; `next` is the number its next change must bear, None while a snapshot is awaited."""

    keys: set[bytes] = field(default_factory=set)
    next: int | None = None
    expected: OrderedDict[bytes, tuple[_Expected, ...]] = field(default_factory=OrderedDict)
    """First key |-> prompts placed here of late, the last one first."""


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

    def expect(self, worker: PeerName, keys: bytes, now: float) -> None:
        """A prompt was placed there."""
        first = key_at(keys, 0)
        if not first:
            return
        expected = self._views.setdefault(worker, _View()).expected
        alike = [old for old in expected.get(first, ()) if old.until > now and old.keys != keys]
        expected[first] = (_Expected(keys, now + _EXPECTED_S), *alike)[:_EXPECTED_ALIKE]
        expected.move_to_end(first)
        if len(expected) > _EXPECTED_PROMPTS:
            expected.popitem(last=False)

    def unexpect(self, worker: PeerName, keys: bytes) -> None:
        """A prompt that was placed there was computed by another worker."""
        view, first = self._views.get(worker), key_at(keys, 0)
        if view is not None and first in view.expected:
            view.expected[first] = tuple(old for old in view.expected[first] if old.keys != keys)

    def hit_len(self, worker: PeerName, keys: bytes, page_size: int, now: float) -> int:
        """Tokens of the longest prefix of a packed key chain that is resident, or expected to be.

        Binary search: trees are closed under prefixes. Where a view is not, some prefix length comes out.
        """
        view = self._views.get(worker)
        first = key_at(keys, 0)
        if view is None or not first:
            return 0
        num_pages = 0
        if first in view.keys:
            num_pages = _prefix_len(num_keys(keys), lambda page: key_at(keys, page) in view.keys)
        for placed in view.expected.get(first, ()):
            if placed.until > now:
                num_pages = max(num_pages, common_keys(placed.keys, keys))
        return num_pages * page_size

    def num_resident(self, worker: PeerName) -> int:
        """Keys known of a worker."""
        view = self._views.get(worker)
        return 0 if view is None else len(view.keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a view outgrew its bound."""
        for worker, view in self._views.items():
            if len(view.keys) > self._max_keys:
                raise IntegrityError(f"residency of {worker}: {len(view.keys)} keys, limit {self._max_keys}")
            if len(view.expected) > _EXPECTED_PROMPTS:
                raise IntegrityError(f"residency of {worker}: {len(view.expected)} prompts expected")


def _prefix_len(num_pages: int, holds: Callable[[int], bool]) -> int:
    """How many of the pages 0, 1, ... in a row have `holds`."""
    low, high = 0, num_pages
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _split(packed: bytes) -> list[bytes] | None:
    """Packed keys -> keys; None when the length is not a multiple of a key's."""
    if len(packed) % KEY_BYTES:
        return None
    return unpack_keys(packed)
