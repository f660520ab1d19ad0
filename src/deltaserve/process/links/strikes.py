"""Which links are ignored because they sent too much that cannot be read."""

from collections import OrderedDict, deque
from collections.abc import Callable

_STRIKES = 3
"""Malformed frames within the window after which a link is ignored for a window."""
_WINDOW_S = 60.0

LinkKey = bytes | str
"""A listener's connection (ZeroMQ identity) or the name of a dialled peer."""


class Strikes:
    """Malformed frames of each link; of at most `max_names` links."""

    def __init__(self, max_names: int, clock: Callable[[], float]) -> None:
        self._max_names = max_names
        self._clock = clock
        self._times: OrderedDict[LinkKey, deque[float]] = OrderedDict()
        """The latest strikes, oldest first; a full deque within the window means ignored."""

    def add(self, key: LinkKey) -> bool:
        """Note a malformed frame. True when the link is ignored from now on."""
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = deque(maxlen=_STRIKES)
            if len(self._times) > self._max_names:
                self._times.popitem(last=False)
        times.append(self._clock())
        self._times.move_to_end(key)
        return len(times) == _STRIKES and times[-1] - times[0] <= _WINDOW_S

    def is_ignored(self, key: LinkKey) -> bool:
        times = self._times.get(key)
        if times is None or len(times) < _STRIKES:
            return False
        if times[-1] - times[0] > _WINDOW_S:
            return False
        if self._clock() - times[-1] <= _WINDOW_S:
            return True
        del self._times[key]
        return False

    def forget(self, key: LinkKey) -> None:
        self._times.pop(key, None)
