"""The data plane of a rank with a file under its tree: what the file takes and gives is copied between polls.

A copy is cut: after `slice_bytes` the transport is polled again, so that transfers of pages do not wait for a long
load. Loads go before stores, and several slices of them to a turn of the thread, since a request waits for them. No
copy depends on another one: what is written or read is nobody else's before the report.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltaserve.control.transfer.commands import (
    LoadPages,
    PagesCopied,
    SlotCopy,
    StorePages,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.core.errors import DeltaserveError

_MORE_SLICES = 7
"""So many more of a load in one turn: what is asked meanwhile waits for them, and between turns the thread sleeps."""


class TierError(DeltaserveError):
    """A slot could not be written or read, or does not hold what it should."""


class TierStore(Protocol):
    """A rank's part of the file: its share of each page."""

    def write(self, copy: SlotCopy) -> int:
        """Copy a page to its slot, with what a reader needs to know it again; returns the bytes. Raises TierError."""
        ...

    def read(self, copy: SlotCopy) -> int:
        """Copy a slot to its page; returns the bytes. Raises TierError unless the slot holds all of the page `key`."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Copy:
    command: StorePages | LoadPages
    num_done: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None

    @property
    def is_over(self) -> bool:
        return self.problem is not None or self.num_done == len(self.command.copies)


class TierPlane:
    """See DataPlane of control/transfer/plane_turns.py. `plane`: what does all the rest."""

    def __init__(
        self, plane: DataPlane, store: TierStore, clock: Callable[[], float], slice_bytes: int = 4 << 20
    ) -> None:
        self._plane = plane
        self._store = store
        self._clock = clock
        self._slice_bytes = slice_bytes
        self._loads: deque[_Copy] = deque()
        self._stores: deque[_Copy] = deque()

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        match command:
            case StorePages():
                self._stores.append(_Copy(command))
            case LoadPages():
                self._loads.append(_Copy(command))
            case _:
                return self._plane.perform(command, now)
        return []

    def poll(self, now: float) -> list[TransferReport]:
        reports = [*self._plane.poll(now), *self._copy_some()]
        for _ in range(_MORE_SLICES):
            if not self._loads:
                break
            reports += [*self._plane.poll(now), *self._copy_some()]
        return reports

    def is_idle(self) -> bool:
        return not self._loads and not self._stores and self._plane.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        self._plane.expect(is_active, now)

    def close(self) -> None:
        self._plane.close()
        self._store.close()

    def _copy_some(self) -> list[TransferReport]:
        reports: list[TransferReport] = []
        left = self._slice_bytes
        while left > 0 and (queue := self._loads or self._stores):
            copy = queue[0]
            left -= self._copy_page(copy)
            if copy.is_over:
                queue.popleft()
                reports.append(
                    PagesCopied(copy.command.number, copy.num_done, copy.num_bytes, copy.seconds, copy.problem)
                )
        return reports

    def _copy_page(self, copy: _Copy) -> int:
        """One page; returns the bytes that were moved, more than none."""
        command, since = copy.command, self._clock()
        move = self._store.read if isinstance(command, LoadPages) else self._store.write
        try:
            num_bytes = move(command.copies[copy.num_done])
        except TierError as error:
            copy.problem = str(error)
            return 1
        copy.num_done += 1
        copy.num_bytes += num_bytes
        copy.seconds += self._clock() - since
        return max(1, num_bytes)
