"""Which links are ignored because they sent too much that cannot be read."""

from collections import OrderedDict, deque
from collections.abc import Callable

from deltaserve.process.links.limits import LinkLimits

LinkKey = bytes | str
"""A listener's connection (ZeroMQ identity) or the name of a dialled peer."""


class Strikes:
    """Malformed frames per link. After `limits.strikes` within the window the link is ignored for a window."""

    def __init__(self, limits: LinkLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._times: OrderedDict[LinkKey, deque[float]] = OrderedDict()
        """The latest strikes, oldest first; a full deque within the window means ignored."""

    def add(self, key: LinkKey) -> bool:
        """Note a malformed frame. True when the link is ignored from now on."""
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = deque(maxlen=self._limits.strikes)
            if len(self._times) > self._limits.max_names:
                self._times.popitem(last=False)
        times.append(self._clock())
        self._times.move_to_end(key)
        return len(times) == self._limits.strikes and times[-1] - times[0] <= self._limits.strike_window_s

    def is_ignored(self, key: LinkKey) -> bool:
        times = self._times.get(key)
        if times is None or len(times) < self._limits.strikes:
            return False
        if times[-1] - times[0] > self._limits.strike_window_s:
            return False
        if self._clock() - times[-1] <= self._limits.strike_window_s:
            return True
        del self._times[key]
        return False

    def forget(self, key: LinkKey) -> None:
        self._times.pop(key, None)
