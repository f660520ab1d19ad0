"""The log between the first rank of a simulated worker and another one: production entries, and their damage.

I13: at equal number, both sides have folded the same entries: recounted here, beside what the log says of itself.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import get_args

from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.control.transfer.rank_chain import LogEnd
from deltaserve.control.transfer.rank_entries import UnionCodec
from deltaserve.core.errors import IntegrityError

_COMMANDS: UnionCodec[TransferCommand] = UnionCodec(get_args(TransferCommand))
_REPORTS: UnionCodec[TransferReport] = UnionCodec(get_args(TransferReport))


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

    def __init__(self, name: str) -> None:
        self._name = name
        self._first, self._other = LogEnd(), LogEnd()
        self._told: deque[int] = deque()
        """Numbers of entries that were told and not taken yet."""
        self._telling, self._taking = _Fold(), _Fold()
        self._frames: deque[bytes] = deque()
        self._last_body = b""
        self._damage: Damage | None = None
        self._kept_back: bytes | None = None
        self.struck: Damage | None = None
        """How an entry was damaged; None: it was not."""
        self.has_unanswered = False
        """Whether the other rank has taken what it did not answer."""

    @property
    def has_come(self) -> bool:
        return bool(self._frames)

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

    # ------------------------------------------------------------ commands

    def tell(self, command: TransferCommand) -> None:
        """Send a command from the first rank."""
        body = _COMMANDS.encode([command])
        self._told.append(self._telling.take(body))
        frame = self._first.seal(body)
        damage, self._damage = self._damage, None
        self.struck = damage or self.struck
        if damage is Damage.OF_ANOTHER_ORDER:
            frame = frame[: -len(body)] + (self._last_body or body[:-1])
        self._last_body = body
        if damage is Damage.SWAPPED:
            self._kept_back = frame
        elif damage is not Damage.LOST:
            self._frames.append(frame)
            if self._kept_back is not None:
                self._frames.append(self._kept_back)
                self._kept_back = None

    def take(self) -> list[TransferCommand]:
        """Commands that have come, taken by the other rank. Raises RankLogError."""
        commands: list[TransferCommand] = []
        while self._frames:
            body = self._other.open(self._frames.popleft())
            done = self._taking.take(body)
            if self._told.popleft() != done:
                raise IntegrityError(f"I13: {self._name} took another entry {self._taking.number} than it was told")
            commands += _COMMANDS.decode(body)
            self.has_unanswered = True
        return commands

    # ------------------------------------------------------------ reports

    def answer(self, reports: Sequence[TransferReport]) -> bytes:
        """Answer from the other rank: its reports as a frame."""
        self.has_unanswered = False
        return self._other.seal(_REPORTS.encode(reports))

    def heard(self, frame: bytes) -> list[TransferReport]:
        """Reports in a frame, taken by the first rank. Raises RankLogError."""
        return _REPORTS.decode(self._first.open(frame))
