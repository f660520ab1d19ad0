"""The log between the first rank of a simulated worker and another one: production entries, and their damage.

I13: at equal number, both sides have folded the same entries: recounted here, beside what the log says of itself.
"""

import zlib
from collections import deque
from collections.abc import Callable
from enum import Enum

from deltaserve.control.transfer.rank_chain import LogEnd
from deltaserve.core.errors import IntegrityError


class Damage(Enum):
    """How an entry may be damaged."""

    LOST = "lost"
    SWAPPED = "swapped"
    """The entry comes after the next one."""
    OF_ANOTHER_ORDER = "of_another_order"
    """The entry says what an earlier one did."""


class _Fold:
    """What was said, or done, entry by entry."""

    def __init__(self) -> None:
        self.number = self.checksum = 0

    def take(self, body: bytes) -> int:
        self.number += 1
        self.checksum = zlib.crc32(body, self.checksum)
        return self.checksum


class RankWire:
    """Frames come in order, unless they are struck."""

    def __init__(self, name: str, on_told: Callable[[], None], on_answer: Callable[[Callable[[], None]], None]) -> None:
        """`on_told`: called when the first rank has said something. `on_answer`: when the other one has; it is given
        what makes that arrive."""
        self._name = name
        self.first, self.other = FirstEnd(self), OtherEnd(self, on_answer)
        self._on_told = on_told
        self._told: deque[int] = deque()
        """Checksums of entries that were told and not taken yet."""
        self._telling, self._taking = _Fold(), _Fold()
        self.frames: deque[bytes] = deque()
        """Frames on their way to the other rank."""
        self.answers: deque[bytes] = deque()
        """Frames that have come to the first rank."""
        self._last_body = b""
        self._damage: Damage | None = None
        self._kept_back: bytes | None = None
        self.struck: Damage | None = None
        """How an entry was damaged; None: it was not."""

    @property
    def may_be_struck(self) -> bool:
        """Whether the next entry will be."""
        return self._damage is not None

    def strike(self, damage: Damage) -> None:
        """Damage the next entry."""
        self._damage = damage

    def mend(self) -> None:
        """No further entry is struck."""
        self._damage = None

    def tell(self, frame: bytes, body: bytes) -> None:
        """Carry an entry of the first rank."""
        self._told.append(self._telling.take(body))
        damage, self._damage = self._damage, None
        self.struck = damage or self.struck
        if damage is Damage.OF_ANOTHER_ORDER:
            frame = frame[: -len(body)] + (self._last_body or body[:-1])
        self._last_body = body
        if damage is Damage.SWAPPED:
            self._kept_back = frame
        elif damage is not Damage.LOST:
            self.frames.append(frame)
            if self._kept_back is not None:
                self.frames.append(self._kept_back)
                self._kept_back = None
        if self.frames:
            self._on_told()

    def taken(self, body: bytes) -> None:
        """Note that the other rank has taken an entry."""
        done = self._taking.take(body)
        if self._told.popleft() != done:
            raise IntegrityError(f"I13: {self._name} took another entry {self._taking.number} than it was told")


class FirstEnd:
    """The side of the first rank."""

    def __init__(self, wire: RankWire) -> None:
        self._wire = wire
        self._log = LogEnd()

    @property
    def num_unanswered(self) -> int:
        return self._log.num_unanswered

    def send(self, body: bytes) -> None:
        self._wire.tell(self._log.seal(body), body)

    def receive(self, wait_s: float | None) -> bytes | None:
        """What is there: nothing is waited for. Raises RankLogError."""
        return self._log.open(self._wire.answers.popleft()) if self._wire.answers else None


class OtherEnd:
    """The side of the other rank."""

    def __init__(self, wire: RankWire, on_answer: Callable[[Callable[[], None]], None]) -> None:
        self._wire = wire
        self._log = LogEnd()
        self._on_answer = on_answer

    @property
    def num_unanswered(self) -> int:
        return self._log.num_unanswered

    def send(self, body: bytes) -> None:
        frame = self._log.seal(body)
        self._on_answer(lambda: self._wire.answers.append(frame))

    def receive(self, wait_s: float | None) -> bytes | None:
        """What is there: nothing is waited for. Raises RankLogError."""
        if not self._wire.frames:
            return None
        body = self._log.open(self._wire.frames.popleft())
        self._wire.taken(body)
        return body
