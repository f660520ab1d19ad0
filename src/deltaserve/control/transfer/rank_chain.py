"""The log by which rank 0 tells the other ranks what to do and they answer: numbered entries, hashed in one chain.

Every rank must do the same in the same order, or collectives hang and pages differ without anybody seeing it. So each
entry carries its number and the hash of all entries up to it. The receiver counts and hashes for itself, and tells with
each entry of its own how far it has come; both sides compare. What does not agree ends the worker.

The links that carry it are process/worker/rank_log.py, and in the simulator sim/rank_wire.py.
"""

import struct
from collections import deque
from dataclasses import dataclass

import xxhash

from deltaserve.core.errors import DeltaserveError

_HEADER = struct.Struct("<QQQQ")
"""Number and hash of this entry; number and hash of the other side's last entry that was taken."""


class RankLogError(DeltaserveError):
    """Two ranks do not agree on what was said, or one of them says nothing."""


class RankFailed(DeltaserveError):
    """A rank of this worker is of no use any more, so none is."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a log has come."""

    number: int = 0
    checksum: int = 0

    def then(self, body: bytes) -> "LogPosition":
        number = self.number + 1
        checksum = xxhash.xxh3_64_intdigest(struct.pack("<QQ", number, self.checksum) + body)
        return LogPosition(number, checksum)


class LogEnd:
    """One side of a log: seals entries of its own, opens those of the other side."""

    def __init__(self) -> None:
        self._taken = LogPosition()
        self._sent: deque[LogPosition] = deque([LogPosition()])
        """Positions of what was sent, from the last one on that the other side has told it took."""

    @property
    def num_unanswered(self) -> int:
        """Entries of this side that the other has not told to have taken."""
        return len(self._sent) - 1

    def seal(self, body: bytes) -> bytes:
        """The frame of the next entry."""
        position = self._sent[-1].then(body)
        self._sent.append(position)
        return _HEADER.pack(position.number, position.checksum, self._taken.number, self._taken.checksum) + body

    def open(self, frame: bytes) -> bytes:
        """The body of the other side's next entry. Raises RankLogError when it is not that."""
        if len(frame) < _HEADER.size:
            raise RankLogError(f"an entry of {len(frame)} bytes")
        number, checksum, seen, seen_checksum = _HEADER.unpack_from(frame)
        body = frame[_HEADER.size :]
        expected = self._taken.then(body)
        if number != expected.number:
            raise RankLogError(f"entry {number} came where entry {expected.number} was due")
        if checksum != expected.checksum:
            raise RankLogError(f"entry {number} differs from what was sent")
        self._taken = expected
        self._compare(LogPosition(seen, seen_checksum))
        return body

    def _compare(self, seen: LogPosition) -> None:
        while self._sent[0].number < seen.number and len(self._sent) > 1:
            self._sent.popleft()
        if self._sent[0] != seen:
            raise RankLogError(f"the other side took an entry {seen.number} that differs from the one sent")
