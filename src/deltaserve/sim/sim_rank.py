"""The transfer threads of a simulated worker: production turns, taken when there is something to see.

The first rank's commands those of the others over logs of production entries (rank_wire.py). Where a thread polls every
few milliseconds, here it takes a turn when a poll would find something, if it polls at all then.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from deltaserve.control.transfer.commands import FencePeer, GateDrained, TicketId, TransferCommand, TransferReport
from deltaserve.control.transfer.plane_turns import SLEEP_S, DataPlane, PlaneTurns, TransferOrder
from deltaserve.control.transfer.rank_chain import RankFailed, RankLogError
from deltaserve.control.transfer.rank_plane import RankPlane, RankTurns, take_entries
from deltaserve.control.transfer.tier_plane import TierPlane
from deltaserve.core.wire.messages import Drain
from deltaserve.sim.rank_wire import RankWire
from deltaserve.sim.situations import Sightings, Situation
from deltaserve.sim.staged_stamps import StampStaging
from deltaserve.sim.stamp_slots import StampSlots
from deltaserve.sim.wiring import SimTransport, TaggedEndpoint

POLL_S = 0.002
"""How long a transfer thread may sleep while something is open."""
_LOOK_S = 0.5
"""How often it looks at writes of which nothing is heard."""
_DRAIN_LOOK_S = 0.05
"""Pause between two looks while it has to say that it drains."""
_SLICE_BYTES = 128
"""Copied to or from the file under a tree between two polls: a page or a few."""
_ANSWER_S = 600.0
"""A rank may leave an entry unanswered for so long. Those that are struck end sooner: see disorder.py."""


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

    def hear(self, reports: Sequence[TransferReport]) -> None:
        """What the first rank's thread reports arrives at the loop."""
        ...

    def lose(self, rank: int) -> None:
        """The rank did not get what it was told, or says nothing any more."""
        ...


class RankPace(NamedTuple):
    """How fast a rank is."""

    lag_s: float
    """Delay from whoever commands it, and to it: the worker's loop, or the first rank."""
    fence_s: float
    """How long it waits for an endpoint to be gone, and does nothing else."""


class SimRankParts(NamedTuple):
    """What a rank moves bytes with."""

    endpoint: TaggedEndpoint
    transport: SimTransport
    staged: StampStaging | None
    pace: RankPace
    slots: StampSlots | None = None
    """The file under the tree; None: there is none."""


class OwnPlane:
    """The plane of one rank: its endpoint, and what waits behind a fence that takes a while."""

    def __init__(self, endpoint: TaggedEndpoint, host: RankHost, fence_s: float) -> None:
        self._endpoint = endpoint
        self._host = host
        self.fence_s = fence_s
        self._behind: deque[TransferCommand] = deque()
        """The fence that it waits for, and what came behind it."""
        self.fenced_at: float | None = None
        """When the fence that it waits for is over."""
        self.has_waited = False

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        self._behind.append(command)
        return self._go_on(now)

    def poll(self, now: float) -> list[TransferReport]:
        reports = self._go_on(now)
        return reports if self._behind else reports + self._endpoint.poll(now)

    def is_idle(self) -> bool:
        return not self._behind and self._endpoint.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        """It is told of everything that there is to poll."""

    def close(self) -> None:
        """It ends with its process."""

    def _go_on(self, now: float) -> list[TransferReport]:
        reports: list[TransferReport] = []
        while self._behind and not self._waits(self._behind[0]):
            reports += self._endpoint.perform(self._behind.popleft(), now)
        return reports

    def _waits(self, command: TransferCommand) -> bool:
        if not isinstance(command, FencePeer) or not self.fence_s:
            return False
        if self.fenced_at is None:
            self.has_waited = True
            self.fenced_at = self._host.world_now + self.fence_s
        if self._host.world_now < self.fenced_at:
            return True
        self.fenced_at = None
        return False


class WatchedRanks(RankPlane):
    """Notes what the ranks said that their one report hides."""

    def __init__(self, own: DataPlane, wires: Sequence[RankWire], seen: Sightings) -> None:
        super().__init__(own, [wire.first for wire in wires], _ANSWER_S)
        self._seen = seen
        self._dirty: set[TicketId] = set()
        """Tickets of which a rank's last word was that it is dirty."""

    def _reduce(self, rank: int, reports: Sequence[TransferReport]) -> list[TransferReport]:
        of_all = super()._reduce(rank, reports)
        told = {report.ticket for report in of_all if isinstance(report, GateDrained)}
        for report in reports:
            if isinstance(report, GateDrained) and report.outcome is Drain.DIRTY:
                self._dirty.add(report.ticket)
            elif isinstance(report, GateDrained) and report.ticket in told:
                self._seen.note(Situation.CLEAN_LAST_WORD, report.ticket in self._dirty)
        return of_all


class SimRank(ABC):
    """One of a worker's ranks: when its transfer thread takes a turn."""

    def __init__(self, host: RankHost, rank: int, parts: SimRankParts) -> None:
        self.rank = rank
        self.endpoint, self.transport, self.staged, self._pace, self.slots = parts
        self.plane = OwnPlane(parts.endpoint, host, parts.pace.fence_s)
        self.tiered: DataPlane = self.plane
        """With the file under the tree, if there is one."""
        if parts.slots is not None:
            self.tiered = TierPlane(self.plane, parts.slots, lambda: host.now, _SLICE_BYTES)
        self.is_gone = False
        """Whether its process has ended."""
        self.transport.on_news = self.news
        self._host = host
        self._turn_at: float | None = None
        self.held_until = 0.0
        self._said_at = 0.0

    @property
    @abstractmethod
    def wire(self) -> RankWire | None:
        """To the first rank; None: it is that one."""

    @property
    @abstractmethod
    def must_poll(self) -> bool:
        """Whether it polls although nothing is asked."""

    @abstractmethod
    def turn(self) -> None:
        """Do what was asked, and poll."""

    def hold(self, seconds: float) -> None:
        """Do nothing for so long, while the worker's other ranks go on."""
        self.held_until = max(self.held_until, self._host.world_now + seconds)

    def news(self) -> None:
        """A poll would find something: it is found soon by whoever polls, else by the next turn, or late."""
        self._turn_after(POLL_S if self.must_poll else SLEEP_S)

    def asked(self) -> None:
        """Note that something was asked."""
        self._turn_after(self._pace.lag_s)

    def _turn_after(self, delay: float) -> None:
        """Take a turn after `delay`, unless one is due sooner."""
        when = max(self._host.world_now + delay, self.plane.fenced_at or 0.0, self.held_until)
        if self._turn_at is None or when < self._turn_at:
            self._turn_at = when
            self._host.later_in_rank(self.rank, when - self._host.world_now, lambda: self._turn_of(when))

    def _turn_of(self, when: float) -> None:
        if self._turn_at != when:
            return  # it took one sooner
        self._turn_at = None
        if when < self.held_until:  # since it was to take this one
            self._turn_after(0.0)
            return
        self.turn()
        if self.plane.fenced_at is not None:
            self._turn_after(0.0)
        elif self.endpoint.is_moving or (self.endpoint.is_idle() and not self.tiered.is_idle()):
            self._turn_after(POLL_S)
        elif not self.endpoint.is_idle():
            self._turn_after(_DRAIN_LOOK_S if self.endpoint.is_draining else _LOOK_S)

    def _arrival(self) -> float:
        """How long what it says now is on its way: it comes behind what it said before."""
        self._said_at = max(self._said_at, self._host.world_now + self._pace.lag_s)
        return self._said_at - self._host.world_now


class RankZero(SimRank):
    """The rank whose thread the worker's loop commands."""

    def __init__(self, host: RankHost, parts: SimRankParts, wires: Sequence[RankWire], seen: Sightings) -> None:
        super().__init__(host, 0, parts)
        self._orders: deque[TransferOrder] = deque()
        self._ranks = WatchedRanks(self.tiered, wires, seen) if wires else None
        self._turns = PlaneTurns(self._ranks or self.tiered, lambda: host.now)

    @property
    def wire(self) -> None:
        return None

    @property
    def must_poll(self) -> bool:
        return self._turns.must_poll

    @property
    def num_pending(self) -> int:
        """What some rank has to answer for."""
        return self._ranks.group.num_pending if self._ranks is not None else 0

    def submit(self, order: TransferOrder) -> None:
        self._orders.append(order)
        self.asked()

    def turn(self) -> None:
        orders: list[TransferOrder] = []
        while self._orders and not (orders and self.plane.fence_s and isinstance(orders[-1], FencePeer)):
            orders.append(self._orders.popleft())
        try:
            reports = self._turns.turn(orders)
        except RankFailed as error:
            self._host.lose(error.rank)
            return
        if reports:
            self._host.later(self._arrival(), lambda: self._host.hear(reports))
        if self._orders:
            self._turn_after(0.0)


class OtherRank(SimRank):
    """A rank that the first one commands."""

    def __init__(self, host: RankHost, rank: int, parts: SimRankParts) -> None:
        super().__init__(host, rank, parts)
        self.first: RankZero | None = None
        self._wire = RankWire(f"rank {rank}", self.asked, self._answer)
        self._turns = RankTurns(self.tiered, self._wire.other, lambda: host.now)

    @property
    def wire(self) -> RankWire:
        return self._wire

    @property
    def must_poll(self) -> bool:
        return self._turns.must_poll

    def turn(self) -> None:
        try:
            self._turns.turn(take_entries(self._wire.other, 0.0))
        except RankLogError:
            self._host.lose(self.rank)

    def _answer(self, arrive: Callable[[], None]) -> None:
        def heard() -> None:
            arrive()
            if self.first is not None:
                self.first.news()

        self._host.later_in_rank(0, self._arrival(), heard)


def join_ranks(host: RankHost, parts: Sequence[SimRankParts], seen: Sightings) -> tuple[RankZero, list[OtherRank]]:
    """The ranks of one worker."""
    others = [OtherRank(host, rank, of_rank) for rank, of_rank in enumerate(parts[1:], 1)]
    first = RankZero(host, parts[0], [other.wire for other in others], seen)
    for other in others:
        other.first = first
    return first, others
