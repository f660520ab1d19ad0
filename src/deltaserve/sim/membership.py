"""Workers that leave and join again while fronts run: what an operator, or a list of workers that changes, does.

A leave is told to every front, to each at a moment of its own. When all have forgotten the worker its process ends, or
goes on unused; later it joins again, in the same life or in a new one, maybe at another address. No request may fail by
any of it (I33).
"""

from collections.abc import Callable, Collection
from typing import Protocol

from deltaserve.control.front.events import Member, WorkerLeaves, WorkerUp
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName, Role, Room
from deltaserve.sim.chance import Chance
from deltaserve.sim.disorder import Cast
from deltaserve.sim.process import SimFront
from deltaserve.sim.situations import Situation

TOLD_S = 0.05
"""How long a front takes to be told, on average."""
GRACE_S = 0.01, 3.0
_LOOK_S = 0.1
_JOINS_S = 0.05, 3.0
"""When a worker joins again, after it was forgotten."""
_ENDS = 0.7
"""Share of the workers that left whose process ends."""
_MOVES_OFF_S = 2.0
"""How long rooms may be left on a worker whose grace is over, while there are others."""

_Leave = tuple[PeerName, int, PeerName, float]
"""(front, its boot, worker, end of its grace)"""


class Company(Cast, Protocol):
    """Says where a worker listens, too."""

    def member(self, name: PeerName) -> Member:
        """The worker, where it listens in its latest life."""
        ...

    def note_step(self) -> None:
        """A step of a rollout was taken."""
        ...


class Membership:
    """Which workers the fronts of one run are told of."""

    def __init__(self, cast: Company, names: Collection[PeerName], chance: Chance) -> None:
        """`names`: the workers that may leave."""
        self._cast = cast
        self._names = list(names)
        self._chance = chance
        self.left: set[PeerName] = set()
        """Workers that fronts are told to forget: one that starts now does not know them."""
        self._for_good: set[PeerName] = set()
        """Those of them that never join again."""
        self.gone: set[PeerName] = set()
        """Those of these whose process has ended: nobody starts it again."""
        self._is_healed = False
        """Who left before all was healed joins no more: all are there again, and the last one leaves for good."""
        self._rooms: dict[_Leave, frozenset[Room]] = {}
        """What was on a worker that leaves when a front was looked at last."""
        self._overdue_since: dict[_Leave, float] = {}

    @property
    def _fronts(self) -> list[SimFront]:
        return [front for front in self._cast.world.fronts.values() if front.is_alive]

    # ------------------------------------------------------------ leaving and joining

    def strike(self) -> bool:
        """Have one leave that every front can do without, those apart that leave already, of which it may not have
        heard yet; whether one does."""
        name = self._chance.choose(self._names) if self._names else None
        if name is None or name in self.left:
            return False
        if not all(_can_do_without(front, name, self.left) for front in self._fronts):
            return False
        self._leave(name, self._chance.log_uniform(*GRACE_S))
        self._look_at_forgotten(name)
        return True

    def leave_for_good(self, name: PeerName, grace_s: float) -> bool:
        """Have one leave that every front can do without, those apart that leave already; whether it does."""
        fronts = self._fronts
        if name in self.left or not fronts or not all(_can_do_without(front, name, self.left) for front in fronts):
            return False
        self._for_good.add(name)
        self._leave(name, grace_s)
        self._look_at_forgotten(name)
        return True

    def _leave(self, name: PeerName, grace_s: float) -> None:
        world = self._cast.world
        self.left.add(name)
        for front in self._fronts:
            told = world.now + self._chance.exponential(TOLD_S)
            world.at(told, lambda front=front: self._tell(front, WorkerLeaves(name, grace_s)))  # type: ignore[misc]

    def _tell(self, front: SimFront, leaves: WorkerLeaves) -> None:
        if front.is_alive and leaves.name in self.left:
            worker = front.core.workers.get(leaves.name)
            has_rooms = worker is not None and worker.own_rooms > 0
            self._cast.world.seen.note(Situation.LEAVES_WITH_ROOMS, has_rooms)
            front.tell(leaves)

    def _look_at_forgotten(self, name: PeerName) -> None:
        world = self._cast.world
        if name not in self.left or (self._is_healed and name not in self._for_good):
            return
        if any(front.core.workers.get(name) is not None for front in self._fronts):
            world.at(world.now + _LOOK_S, lambda: self._look_at_forgotten(name))
            return
        world.seen.note(Situation.LEFT)
        process = world.process(name)
        if process is not None and (name in self._for_good or self._chance.hits(_ENDS)):
            world.end(name)
            self._cast.bury(process)
        if name in self._for_good:
            self.gone.add(name)
            return
        world.at(world.now + self._chance.log_uniform(*_JOINS_S), lambda: self._join(name))

    def _join(self, name: PeerName) -> None:
        if self._is_healed:
            return
        self.left.discard(name)
        world = self._cast.world
        if world.process(name) is None:
            self._cast.start(name)
        world.seen.note(Situation.JOINED)
        for front in self._fronts:
            told = world.now + self._chance.exponential(TOLD_S)
            world.at(told, lambda front=front: self.tell_of_join(front, name))  # type: ignore[misc]

    def tell_of_join(self, front: SimFront, name: PeerName) -> None:
        """Tell a front, if it lives, where a worker is, unless that leaves again."""
        if front.is_alive and name not in self.left:
            self.register(front, name)

    def register(self, front: SimFront, name: PeerName) -> None:
        """Tell a front where a worker is. I33: it does not leave there any more."""
        front.tell(WorkerUp(self._cast.member(name)))
        worker = front.core.workers.get(name)
        if worker is not None and worker.leaves_at is not None:
            raise IntegrityError(f"I33: {name} has joined again, and {front.name} has it leave all the same")

    def heal(self) -> None:
        """Everybody is there again, but those who left for good."""
        self._is_healed = True
        self.left &= self._for_good

    # ------------------------------------------------------------ what must hold

    def look(self) -> None:
        """I33: nothing new comes to a worker that leaves, and what is there goes elsewhere when its grace is over."""
        rooms: dict[_Leave, frozenset[Room]] = {}
        overdue: dict[_Leave, float] = {}
        for front in self._fronts:
            if front.is_stopped:
                continue
            for worker in front.core.workers.leaving():
                assert worker.leaves_at is not None
                leave = front.name, front.core.workers.table.boot, worker.name, worker.leaves_at
                rooms[leave] = frozenset(live.room for live in front.core.rooms.on(worker.name))
                new = rooms[leave] - self._rooms.get(leave, rooms[leave])
                if new:
                    raise IntegrityError(f"I33: {len(new)} rooms came to {worker.name}, which leaves")
                pools = [pool for pool in front.core.workers.pools() if pool.has_pair]
                may_go = any(
                    live.sample.may_use(pool.revision) for live in front.core.rooms.on(worker.name) for pool in pools
                )
                if may_go and front.now > worker.leaves_at:
                    overdue[leave] = self._overdue_since.get(leave, self._cast.world.now)
        self._rooms, self._overdue_since = rooms, overdue
        for (_, _, name, _), since in overdue.items():
            if self._cast.world.now - since > _MOVES_OFF_S:
                raise IntegrityError(f"I33: rooms stay on {name}, whose grace is over, though there are others")

    def leave_last(self) -> Callable[[], bool]:
        """Have one leave when nothing happens any more; says whether nobody knows it any more."""
        name = self._chance.choose([name for name in self._names if name not in self.left])
        self._leave(name, 0.0)
        return lambda: self._is_forgotten(name)

    def _is_forgotten(self, name: PeerName) -> bool:
        is_known = any(front.core.workers.get(name) is not None or name in front.dialled for front in self._fronts)
        workers = self._cast.world.workers.values()
        return not is_known and not any(name in worker.instance.links.dialled for worker in workers)


def _can_do_without(front: SimFront, name: PeerName, left: Collection[PeerName]) -> bool:
    """Whether others of the worker's role and revision take rooms, and keep it; or a pair of another revision does.
    `left`: workers that do not count."""
    worker = front.core.workers.get(name)
    if worker is None or worker.asked is not None:
        return False
    if worker.role is Role.UNIFIED:
        return True
    for pool in front.core.workers.pools():
        others = [w.role for w in pool.workers if w is not worker and w.name not in left]
        if worker.role in others and pool.revision == worker.revision:
            return True
        if pool.revision != worker.revision and {Role.PREFILL, Role.DECODE} <= set(others):
            return True
    return False
