"""Whether pages are had sooner from a file than in another way: by computing them again, or from another worker."""

_TRIP_S = 0.002
"""What a load takes besides its bytes: the way to the thread that copies, and back."""
_NEW = 0.3
"""Weight of the last load in the rate."""
_HOPE = 1.1
"""The rate rises by so much with each load that was not worth it: a disk that was slow once is tried again."""


class LoadPrice:
    """What a byte takes, as measured. What was not measured yet counts as quick: one load measures it."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None

    def learn(self, num_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        if num_bytes and seconds > 0:
            rate = num_bytes / seconds
            known = rate if self._bytes_per_s is None else self._bytes_per_s
            self._bytes_per_s = known + _NEW * (rate - known)

    def is_worth(self, num_bytes: int, otherwise_s: float) -> bool:
        """Whether to load so many bytes. `otherwise_s`: what having them in the other way takes; inf: not known."""
        taken_s = self.seconds(num_bytes)
        if taken_s is None or taken_s < otherwise_s:
            return True
        if self._bytes_per_s is not None:
            self._bytes_per_s *= _HOPE
        return False

    def seconds(self, num_bytes: int) -> float | None:
        """What a load of so many bytes takes. None: not measured yet. Asking changes nothing."""
        return None if self._bytes_per_s is None else _TRIP_S + num_bytes / self._bytes_per_s
