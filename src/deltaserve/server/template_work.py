"""What one rendering of a chat template has done so far, and how large its values are: the counters of the sandbox."""

import time
from collections.abc import Collection, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from deltaserve.base.errors import DeltaserveError

MAX_STEPS = 300_000
"""About a second; a conversation of ten thousand messages needs about a tenth of it."""
MAX_RENDER_S = 5.0
MAX_STRING_CHARS = 32 * 1024 * 1024
"""Of a string that one step makes."""
MAX_WEIGHT = 32 * 1024 * 1024
"""Of a list or a mapping: whoever walks through it is done in about a second, and any request weighs less."""
ITEM_WEIGHT = 8
"""Characters that a walk through one item costs as much as."""
_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class TooMuchWork(DeltaserveError):
    """The template was stopped."""


@dataclass(slots=True)
class Steps:
    """Of one rendering."""

    num_steps: int = 0
    stop_at: float = field(default_factory=lambda: time.monotonic() + MAX_RENDER_S)
    _weights: dict[int, tuple[object, int]] = field(default_factory=dict)
    """id |-> container, and its weight. Templates cannot change one; kept here, no other one gets its id."""

    def step(self) -> None:
        """One turn of a loop, or one call."""
        self.num_steps += 1
        self.look()

    def look(self) -> None:
        """What is no step of its own still takes time."""
        if self.num_steps > MAX_STEPS or time.monotonic() > self.stop_at:
            raise TooMuchWork(f"{self.num_steps} steps")

    def grow(self, num_chars: int) -> None:
        """A string of this length was made."""
        if num_chars > MAX_STRING_CHARS:
            raise TooMuchWork(f"a string of {num_chars} characters")
        # A long string copied at every step is work as well.
        self.num_steps += num_chars >> 10
        self.step()

    def weigh(self, value: object) -> int:
        """Characters that a walk through `value` meets; a part that occurs twice is met twice.

        Raises TooMuchWork for what no operator or filter may be given, SecurityError for a namespace: it can change.
        """
        if isinstance(value, str):
            if len(value) > MAX_STRING_CHARS:
                raise TooMuchWork(f"a string of {len(value)} characters")
            return len(value)
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is no value")
        if isinstance(value, int):
            return ITEM_WEIGHT + (value.bit_length() >> 2)
        if not isinstance(value, _CONTAINERS):
            return ITEM_WEIGHT
        known = self._weights.get(id(value))
        return self._weigh_parts(value) if known is None else known[1]

    def _weigh_parts(self, value: Collection[object]) -> int:
        weight = ITEM_WEIGHT
        for part in _parts(value):
            weight += ITEM_WEIGHT + self.weigh(part)
            if weight > MAX_WEIGHT:
                raise TooMuchWork(f"a value of {weight} characters")
        self._weights[id(value)] = (value, weight)
        self.num_steps += len(value) >> 6
        self.look()
        return weight

    def taken(self, value: object) -> object:
        """A value that a step has made. Iterators become lists: nobody knows how long they are."""
        if isinstance(value, str):
            if len(value) >> 10:
                self.grow(len(value))
            return value
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            value = list(value)
        if isinstance(value, _CONTAINERS):
            self.weigh(value)
        return value


def _parts(value: Collection[object]) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value
