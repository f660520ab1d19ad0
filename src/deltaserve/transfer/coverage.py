"""What of a ticket's coverage has landed. Page indexes are positions in the coverage, [0, num_pages)."""

from enum import Enum

from deltaserve.wire.messages import Done


class Landing(Enum):
    """What a Done did to its ticket's coverage."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """Seen before, byte for byte: no effect."""
    REFUSED = "refused"
    """Outside the coverage, overlapping, or contradicting an earlier one."""


class Coverage:
    """Accepts chunks in any order; complete when they are disjoint, their union is everything and one was last."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.chunks: dict[int, Done] = {}
        self._landed = bytearray(num_pages)
        self._num_landed = 0
        self._last: int | None = None

    @property
    def payload(self) -> bytes | None:
        """Of the last chunk, once it has landed. Worth nothing before the coverage is complete."""
        return None if self._last is None else self.chunks[self._last].payload

    @property
    def is_complete(self) -> bool:
        return self._last is not None and len(self.chunks) == self._last + 1 and self._num_landed == self.num_pages

    def land(self, done: Done) -> Landing:
        known = self.chunks.get(done.chunk)
        if known is not None:
            return Landing.REPEATED if known == done else Landing.REFUSED
        if not self._is_sound(done):
            return Landing.REFUSED
        end = done.first_page + done.num_pages
        self._landed[done.first_page : end] = b"\x01" * done.num_pages
        self._num_landed += done.num_pages
        self.chunks[done.chunk] = done
        if done.is_last:
            self._last = done.chunk
        return Landing.ACCEPTED

    def _is_sound(self, done: Done) -> bool:
        end = done.first_page + done.num_pages
        is_sized = done.num_pages > 0 or (done.num_pages == 0 and done.is_last)  # else their number had no bound
        inside = is_sized and done.first_page >= 0 and end <= self.num_pages and done.chunk >= 0
        if not inside or any(self._landed[done.first_page : end]):
            return False
        if done.is_last:
            return self._last is None and all(chunk < done.chunk for chunk in self.chunks)
        return self._last is None or done.chunk < self._last
