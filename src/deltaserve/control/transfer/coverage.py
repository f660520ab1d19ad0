"""What has landed of the pages a ticket covers: per pool a range of the prompt's pages.

Every writing rank announces them to every reading rank that it sends heads to.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

from deltaserve.core.layout.copy_plan import RankPair
from deltaserve.core.wire.messages import Done, Piece


class Landing(Enum):
    """What a Done did to its ticket's coverage."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """Seen before, byte for byte: no effect."""
    REFUSED = "refused"
    """Outside the coverage, overlapping, or contradicting an earlier one."""


ALONE = RankPair(0, 0)
"""The one pair of ranks where both workers have one rank."""


class Coverage:
    """Complete when the coverage of every pair of ranks is. Which these are is the plan's to say, not the writer's."""

    def __init__(self, missing: Sequence[range], pairs: Sequence[RankPair] = (ALONE,)) -> None:
        """`missing`: per pool, the prompt's pages that must land."""
        self.missing = tuple(missing)
        self._of_pair = {pair: PairCoverage(self.missing) for pair in pairs}
        self._num_incomplete = len(self._of_pair)
        self.payload: bytes | None = None
        """Payload of the last chunk, once it has landed. Worth nothing before the coverage is complete."""

    @property
    def is_complete(self) -> bool:
        return self._num_incomplete == 0

    @property
    def num_landed(self) -> int:
        """How many announcements were accepted."""
        return sum(len(of_pair.chunks) for of_pair in self._of_pair.values())

    def dones(self) -> Iterator[tuple[RankPair, Done]]:
        """The accepted announcements, each with its pair of ranks."""
        for pair, of_pair in self._of_pair.items():
            for done in of_pair.chunks.values():
                yield pair, done

    def land(self, done: Done, pair: RankPair = ALONE) -> Landing:
        of_pair = self._of_pair.get(pair)
        if of_pair is None or (done.is_last and self.payload not in (None, done.payload)):
            return Landing.REFUSED
        landing = of_pair.land(done)
        if landing is Landing.ACCEPTED:
            self._num_incomplete -= of_pair.is_complete
            self.payload = done.payload if done.is_last else self.payload
        return landing


class PairCoverage:
    """Accepts chunks in any order; complete when they are disjoint, their union is everything and one was last."""

    def __init__(self, missing: Sequence[range]) -> None:
        self.missing = tuple(missing)
        self.chunks: dict[int, Done] = {}
        self._landed = [bytearray(len(pages)) for pages in missing]
        self._num_left = sum(len(pages) for pages in missing)
        self._last: int | None = None

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
