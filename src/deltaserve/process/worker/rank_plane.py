"""The data planes of all ranks as one: rank 0's own, and those that its transfer thread commands over the log.

`control/transfer/ranks.py` says who is told what and when all have answered; here it is only carried. What a rank
has to say is asked for by polling, as of a transport; one that owes an answer for too long ends the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.control.transfer.ranks import RankGroup
from deltaserve.process.worker.rank_group import RankLost, heard_from
from deltaserve.process.worker.rank_log import NEWS, ORDERS, Idleness, RankChannel
from deltaserve.process.worker.transfer_thread import DataPlane, Polling, TransferOrder


@dataclass(slots=True)
class _Other:
    """A rank that is another process."""

    rank: int
    channel: RankChannel
    is_idle: bool = True
    heard_at: float = 0.0
    """When it said something, or was told something while it owed nothing."""

    @property
    def owes_answer(self) -> bool:
        return self.channel.num_unanswered > 0


class RankPlane:
    """Called from rank 0's transfer thread."""

    def __init__(self, own: DataPlane, channels: Sequence[RankChannel], limit_s: float) -> None:
        """`channels`: to ranks 1 .. n - 1. `limit_s`: how long an entry may stay unanswered."""
        self._own = own
        self._others = [_Other(rank, channel) for rank, channel in enumerate(channels, 1)]
        self._group = RankGroup(1 + len(channels))
        self._limit_s = limit_s

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        first, *others = self._group.fan_out(command)
        for other, part in zip(self._others, others, strict=True):
            if part is not None:
                self._tell(other, part, now)
        return [] if first is None else self._reduce(0, self._own.perform(first, now))

    def expect(self, is_active: bool, now: float) -> None:
        self._own.expect(is_active, now)
        for other in self._others:
            self._tell(other, Polling(is_active), now)

    def poll(self, now: float) -> list[TransferReport]:
        """Reports of all ranks since the last call. Raises RankLost."""
        reports = self._reduce(0, self._own.poll(now))
        for other in self._others:
            with heard_from(other.rank):
                reports += self._hear(other, now)
            if other.owes_answer and now - other.heard_at > self._limit_s:
                raise RankLost(other.rank, f"has answered nothing for {self._limit_s:.0f} s")
        return reports

    def is_idle(self) -> bool:
        return self._own.is_idle() and all(other.is_idle and not other.owes_answer for other in self._others)

    def close(self) -> None:
        """The other ranks end with this process."""
        self._own.close()

    def _tell(self, other: _Other, order: TransferOrder, now: float) -> None:
        if not other.owes_answer:
            other.heard_at = now
        with heard_from(other.rank):
            other.channel.send(ORDERS.encode([order]))

    def _hear(self, other: _Other, now: float) -> list[TransferReport]:
        reports: list[TransferReport] = []
        while (body := other.channel.receive(0.0)) is not None:
            other.heard_at = now
            for news in NEWS.decode(body):
                if isinstance(news, Idleness):
                    other.is_idle = news.is_idle
                else:
                    reports += self._group.reduce(other.rank, news)
        return reports

    def _reduce(self, rank: int, reports: Sequence[TransferReport]) -> list[TransferReport]:
        return [reduced for report in reports for reduced in self._group.reduce(rank, report)]
