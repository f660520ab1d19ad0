"""The data planes of all ranks as one: rank 0's own, and those that its transfer thread commands over a log each.

`ranks.py` says who is told what and when all have answered; here it is carried, as entries of a log (rank_chain.py).
What a rank has to say is asked for by polling, as of a transport; one that owes an answer for too long ends the worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.control.transfer.plane_turns import DataPlane, PlaneTurns, Polling, TransferOrder
from deltaserve.control.transfer.rank_chain import RankFailed, RankLogError
from deltaserve.control.transfer.rank_entries import NEWS, ORDERS, Idleness, RankNews
from deltaserve.control.transfer.ranks import RankGroup


class LogChannel(Protocol):
    """This side of the log between two ranks, over whatever carries it."""

    @property
    def num_unanswered(self) -> int:
        """Entries of this side that the other has not told to have taken."""
        ...

    def send(self, body: bytes) -> None:
        """Raises RankLogError."""
        ...

    def receive(self, wait_s: float | None) -> bytes | None:
        """The body of the next entry; None when nothing came for `wait_s`. Raises RankLogError."""
        ...


@dataclass(slots=True)
class _Other:
    """A rank that is another process."""

    rank: int
    channel: LogChannel
    is_idle: bool = True
    heard_at: float = 0.0
    """When it said something, or was told something while it owed nothing."""

    @property
    def owes_answer(self) -> bool:
        return self.channel.num_unanswered > 0


class RankPlane:
    """Called from rank 0's transfer thread. All but `close` raise RankFailed."""

    def __init__(self, own: DataPlane, channels: Sequence[LogChannel], limit_s: float) -> None:
        """`channels`: to ranks 1 .. n - 1. `limit_s`: how long an entry may stay unanswered."""
        self._own = own
        self._others = [_Other(rank, channel) for rank, channel in enumerate(channels, 1)]
        self.group = RankGroup(1 + len(channels))
        self._limit_s = limit_s

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        first, *others = self.group.fan_out(command)
        for other, part in zip(self._others, others, strict=True):
            if part is not None:
                self._tell(other, part, now)
        return [] if first is None else self._reduce(0, self._own.perform(first, now))

    def expect(self, is_active: bool, now: float) -> None:
        self._own.expect(is_active, now)
        for other in self._others:
            self._tell(other, Polling(is_active), now)

    def poll(self, now: float) -> list[TransferReport]:
        reports = self._reduce(0, self._own.poll(now))
        for other in self._others:
            reports += self._reduce(other.rank, self._hear(other, now))
            if other.owes_answer and now - other.heard_at > self._limit_s:
                raise RankFailed(other.rank, f"has answered nothing for {self._limit_s:.0f} s")
        return reports

    def is_idle(self) -> bool:
        return self._own.is_idle() and all(other.is_idle and not other.owes_answer for other in self._others)

    def close(self) -> None:
        """The other ranks end with this process."""
        self._own.close()

    def _tell(self, other: _Other, order: TransferOrder, now: float) -> None:
        if not other.owes_answer:
            other.heard_at = now
        try:
            other.channel.send(ORDERS.encode([order]))
        except RankLogError as error:
            raise RankFailed(other.rank, str(error)) from None

    def _hear(self, other: _Other, now: float) -> list[TransferReport]:
        try:
            heard = [NEWS.decode(body) for body in take_entries(other.channel, 0.0)]
        except RankLogError as error:
            raise RankFailed(other.rank, str(error)) from None
        if heard:
            other.heard_at = now
        reports: list[TransferReport] = []
        for news in chain.from_iterable(heard):
            if isinstance(news, Idleness):
                other.is_idle = news.is_idle
            else:
                reports.append(news)
        return reports

    def _reduce(self, rank: int, reports: Sequence[TransferReport]) -> list[TransferReport]:
        return [reduced for report in reports for reduced in self.group.reduce(rank, report)]


class RankTurns:
    """The transfer thread of a rank behind the first: it performs what rank 0 asks and tells it what happened. What is
    told also says how far this rank has read."""

    def __init__(self, plane: DataPlane, channel: LogChannel, clock: Callable[[], float]) -> None:
        """`channel`: to rank 0."""
        self._plane = plane
        self._turns = PlaneTurns(plane, clock)
        self._channel = channel
        self._told_idle = True

    @property
    def must_poll(self) -> bool:
        """As that of PlaneTurns."""
        return self._turns.must_poll

    @property
    def wait_s(self) -> float:
        """How long the next turn may be put off while nothing is asked."""
        return self._turns.wait_s

    def turn(self, bodies: Sequence[bytes]) -> None:
        """`bodies`: of the entries that came. Raises RankLogError."""
        orders: list[TransferOrder] = [order for body in bodies for order in ORDERS.decode(body)]
        news: list[RankNews] = [*self._turns.turn(orders)]
        is_idle = self._plane.is_idle()
        if is_idle != self._told_idle:
            self._told_idle = is_idle
            news.append(Idleness(is_idle))
        if news or bodies:
            self._channel.send(NEWS.encode(news))


def take_entries(channel: LogChannel, wait_s: float | None) -> list[bytes]:
    """The bodies of all entries that are there; waits for one. Raises RankLogError."""
    bodies: list[bytes] = []
    while (body := channel.receive(0.0 if bodies else wait_s)) is not None:
        bodies.append(body)
    return bodies
