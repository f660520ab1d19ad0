"""The transfer thread of one simulated rank: performs commands in order, polls when there is something to see."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from deltaserve.control.transfer.commands import FencePeer, TransferCommand, TransferReport
from deltaserve.control.transfer.rank_chain import RankLogError
from deltaserve.sim.rank_wire import RankWire
from deltaserve.sim.staged_stamps import StampStaging
from deltaserve.sim.wiring import SimTransport, TaggedEndpoint

POLL_S = 0.002
"""How long a transfer thread may sleep while something is open."""
_LOOK_S = 0.5
"""How often it looks at writes of which nothing is heard."""
_DRAIN_LOOK_S = 0.05
"""Pause between two looks while it has to say that it drains."""


class RankHost(Protocol):
    """The worker that a rank is one of."""

    @property
    def now(self) -> float:
        """The time on the worker's clock."""
        ...

    @property
    def world_now(self) -> float: ...

    def later(self, delay: float, call: Callable[[], None]) -> None:
        """Call after `delay`, unless the first rank has ended."""
        ...

    def later_in_rank(self, rank: int, delay: float, call: Callable[[], None]) -> None:
        """Call after `delay`, unless that rank has ended."""
        ...

    def hear(self, rank: int, reports: list[TransferReport]) -> None:
        """What the rank reports arrives at the loop."""
        ...

    def lose(self, rank: int) -> None:
        """The rank did not get what it was told, or says nothing any more."""
        ...


class RankPace(NamedTuple):
    """How fast a rank is."""

    lag_s: float
    """Delay from the worker's loop, and to it."""
    fence_s: float
    """How long it waits for an endpoint to be gone, and does nothing else."""


class SimRank:
    """One of a worker's ranks."""

    def __init__(
        self,
        host: RankHost,
        rank: int,
        endpoint: TaggedEndpoint,
        transport: SimTransport,
        staged: StampStaging | None,
        pace: RankPace,
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.transport = transport
        self.staged = staged
        self.is_gone = False
        """Whether its process has ended."""
        transport.on_news = self._news
        self._host = host
        self._lag_s, self._fence_s = pace
        self.wire = RankWire(f"rank {rank}") if rank else None
        self._commands: deque[TransferCommand] = deque()
        self._turn_at: float | None = None
        self._fenced_at: float | None = None
        """When the fence that it waits for is over."""
        self.held_until = 0.0
        self.has_waited_for_fence = False
        self._reported_at = 0.0

    def submit(self, command: TransferCommand) -> None:
        if self.wire is None:
            self._commands.append(command)
        else:
            self.wire.tell(command)

    def hold(self, seconds: float) -> None:
        """Do nothing for so long, while the worker's other ranks go on."""
        self.held_until = max(self.held_until, self._host.world_now + seconds)

    def wake(self) -> None:
        """Note that commands were submitted."""
        if self._commands or (self.wire is not None and self.wire.has_come):
            self._turn_after(self._lag_s)

    def _turn_after(self, delay: float) -> None:
        """Take a turn after `delay`, unless one is due sooner."""
        when = max(self._host.world_now + delay, self._fenced_at or 0.0, self.held_until)
        if self._turn_at is None or when < self._turn_at:
            self._turn_at = when
            self._host.later_in_rank(self.rank, when - self._host.world_now, lambda: self._turn(when))

    def _news(self) -> None:
        self._turn_after(POLL_S)

    def _turn(self, when: float) -> None:
        if self._turn_at != when:
            return  # it took one sooner
        self._turn_at = None
        if when < self.held_until:  # since it was to take this one
            self._turn_after(0.0)
            return
        if not self._take():
            return
        reports: list[TransferReport] = []
        while self._commands and not self._waits_for_fence(self._commands[0]):
            reports += self.endpoint.perform(self._commands.popleft(), self._host.now)
        if self._fenced_at is None:
            reports += self.endpoint.poll(self._host.now)
        if self.endpoint.is_moving:
            self._turn_after(POLL_S)
        elif not self.endpoint.is_idle():
            self._turn_after(_DRAIN_LOOK_S if self.endpoint.is_draining else _LOOK_S)
        if self.wire is not None:
            self._answer(self.wire, reports)
        elif reports:
            self._later_at_loop(lambda: self._host.hear(self.rank, reports))

    def _take(self) -> bool:
        """What was told. False: it was not what the first rank said, and this process has ended of it."""
        if self.wire is None:
            return True
        try:
            self._commands += self.wire.take()
        except RankLogError:
            self._host.lose(self.rank)
            return False
        return True

    def _answer(self, wire: RankWire, reports: list[TransferReport]) -> None:
        if reports or wire.has_unanswered:
            frame = wire.answer(reports)
            self._later_at_loop(lambda: self._hear(wire, frame))

    def _hear(self, wire: RankWire, frame: bytes) -> None:
        try:
            reports = wire.heard(frame)
        except RankLogError:
            self._host.lose(self.rank)
            return
        self._host.hear(self.rank, reports)

    def _later_at_loop(self, call: Callable[[], None]) -> None:
        at = self._reported_at = max(self._reported_at, self._host.world_now + self._lag_s)
        self._host.later(at - self._host.world_now, call)

    def _waits_for_fence(self, command: TransferCommand) -> bool:
        """Whether it has to wait before this command is done."""
        if not isinstance(command, FencePeer) or not self._fence_s:
            return False
        if self._fenced_at is None:
            self.has_waited_for_fence = True
            self._fenced_at = self._host.world_now + self._fence_s
            self._turn_after(self._fence_s)
            return True
        self._fenced_at = None
        return False
