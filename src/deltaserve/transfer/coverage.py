"""What has landed of the pages a ticket covers: per pool a range of the prompt's pages."""

from collections.abc import Sequence
from enum import Enum

from deltaserve.wire.messages import Done, Piece


class Landing(Enum):
    """What a Done did to its ticket's coverage."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """Seen before, byte for byte: no effect."""
    REFUSED = "refused"
    """Outside the coverage, overlapping, or contradicting an earlier one."""


class Coverage:
    """Accepts chunks in any order; complete when they are disjoint, their union is everything and one was last."""

    def __init__(self, missing: Sequence[range]) -> None:
        """`missing`: per pool, the prompt's pages that must land."""
        self.missing = tuple(missing)
        self.chunks: dict[int, Done] = {}
        self._landed = [bytearray(len(pages)) for pages in missing]
        self._num_left = sum(len(pages) for pages in missing)
        self._last: int | None = None

    @property
    def payload(self) -> bytes | None:
        """Of the last chunk, once it has landed. Worth nothing before the coverage is complete."""
        return None if self._last is None else self.chunks[self._last].payload

    @property
    def is_complete(self) -> bool:
        return self._last is not None and len(self.chunks) == self._last + 1 and self._num_left == 0

    def land(self, done: Done) -> Landing:
        known = self.chunks.get(done.chunk)
        if known is not None:
            return Landing.REPEATED if known == done else Landing.REFUSED
        if not self._is_sound(done):
            return Landing.REFUSED
        for piece in done.pieces:
            start = self.missing[piece.pool].start
            self._landed[piece.pool][piece.first - start : piece.end - start] = b"\x01" * (piece.end - piece.first)
            self._num_left -= piece.end - piece.first
        self.chunks[done.chunk] = done
        if done.is_last:
            self._last = done.chunk
        return Landing.ACCEPTED

    def _is_sound(self, done: Done) -> bool:
        pools = [piece.pool for piece in done.pieces]
        is_sized = bool(pools) or done.is_last  # else the number of chunks had no bound
        if not is_sized or done.chunk < 0 or pools != sorted(set(pools)) or not all(map(self._is_open, done.pieces)):
            return False
        if done.is_last:
            return self._last is None and all(chunk < done.chunk for chunk in self.chunks)
        return self._last is None or done.chunk < self._last

    def _is_open(self, piece: Piece) -> bool:
        """Whether a piece is some of what is missing, and nothing else."""
        if not 0 <= piece.pool < len(self.missing):
            return False
        missing = self.missing[piece.pool]
        if not missing.start <= piece.first < piece.end <= missing.stop:
            return False
        return not any(self._landed[piece.pool][piece.first - missing.start : piece.end - missing.start])
