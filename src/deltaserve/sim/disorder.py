"""Deaths, pauses and broken connections of a run: the faults that strike processes, at chosen events."""

from collections.abc import Callable
from typing import Protocol

from deltaserve.control.engine.api import DrainRequested
from deltaserve.core.ids import PeerName
from deltaserve.sim.chance import Chance
from deltaserve.sim.faults import FaultKind, LinkFaults
from deltaserve.sim.process import SimProcess, SimWorker
from deltaserve.sim.rank_wire import Damage, RankWire
from deltaserve.sim.situations import Situation
from deltaserve.sim.world import World

LATEST_RANK_S = 30.0
"""How long a rank may be behind the others of its worker."""


RANKS_END_S = 0.1
"""How long ranks go on, at most, when their first one has ended. Its next life does not wait for them."""


LATEST_START_S = 3.0
"""After the end of a worker's life: the next one begins by then ..."""
LATEST_RESTART_S = 0.02
"""... and when it ends again and again."""


ANSWER_S = 3.0
"""A rank that answers nothing for so long is given up."""


class Cast(Protocol):
    """Starts and counts the processes of a run."""

    world: World

    def start(self, name: PeerName) -> None:
        """A new life of a process begins."""
        ...

    def bury(self, process: SimProcess) -> None:
        """A process has just ended: keep its books, and tell its clients."""
        ...


class Disorder:
    """Strikes the processes of one run."""

    def __init__(
        self,
        cast: Cast,
        workers: list[PeerName],
        fronts: list[PeerName],
        chance: Chance,
        links: LinkFaults,
        slowness: float,
    ) -> None:
        self._cast = cast
        self._all = [*workers, *fronts]
        self._workers, self._fronts, self._victims = workers, fronts, self._all
        self._chance = chance
        self._links = links
        self._slowness = slowness
        self.group: frozenset[PeerName] = frozenset()
        """Workers that share experts: when one ends all do."""
        self._doomed: dict[PeerName, SimProcess] = {}
        """Workers of that group that have not noticed yet that another one ended."""
        self._is_healed = False
        self._strikes: dict[FaultKind, Callable[[], None]] = {
            FaultKind.RESET: self._reset,
            FaultKind.HALF_OPEN: self._half_open,
            FaultKind.PARTITION: self._partition,
            FaultKind.CLOG: self._clog,
            FaultKind.CRASH: lambda: self._crash(self._any_of(self._workers), is_seen=True),
            FaultKind.CRASH_UNSEEN: lambda: self._crash(self._any_of(self._workers), is_seen=False),
            FaultKind.CRASH_LOOP: self._crash_again_and_again,
            FaultKind.FRONT_CRASH: lambda: self._crash(self._any_of(self._fronts), is_seen=self._chance.hits(0.5)),
            FaultKind.PAUSE: self._pause,
            FaultKind.SLOW_PROCESS: self._slow,
            FaultKind.CLOCK_JUMP: self._jump,
            FaultKind.DRAIN: self._drain,
            FaultKind.RANK_LATE: self._hold_rank,
            FaultKind.RANK_CRASH: self._crash_rank,
            FaultKind.RANK_MISLED: self._mislead_rank,
        }

    def confine(self, sick: PeerName) -> None:
        """Strike this process only, and its connections."""
        self._victims = [sick]
        self._workers, self._fronts = ([name for name in of if name == sick] for of in (self._workers, self._fronts))

    def reseed(self, chance: Chance) -> None:
        """Draw from `chance` from now on."""
        self._chance = chance

    def strike(self, kind: FaultKind) -> None:
        self._cast.world.trace.note(self._cast.world.now, "fault", kind.value)
        self._strikes[kind]()

    def heal(self) -> None:
        """Everybody lives, and at normal speed."""
        self._is_healed = True
        world = self._cast.world
        for worker in list(world.workers.values()):
            wires = [rank.wire for rank in worker.ranks if rank.wire is not None]
            for wire in wires:
                wire.mend()
            if any(wire.struck for wire in wires):
                self._crash_maimed(worker)
        for name in list(self._doomed):
            self._end_doomed(name)
        for name in self._all:
            process = world.process(name)
            if process is None:
                self._cast.start(name)
            else:
                process.pace.slowness = 1.0
                process.go_on()

    # ------------------------------------------------------------ connections

    def _two(self) -> tuple[PeerName, PeerName]:
        one = self._any_of(self._workers) or self._victims[0]
        others = [name for name in self._all if name != one]
        return one, self._chance.choose(others)

    def _reset(self) -> None:
        self._cast.world.reset(*self._two())

    def _half_open(self) -> None:
        one, other = self._two()
        connection = (one, other) if self._chance.hits(0.5) else (other, one)
        self._links.dead_until[connection] = self._while()

    def _partition(self) -> None:
        one, other = self._two()
        self._links.dead_until[one, other] = self._links.dead_until[other, one] = self._while()

    def _clog(self) -> None:
        self._links.clogged_until[self._two()] = self._while()

    def _while(self) -> float:
        return self._cast.world.now + self._chance.log_uniform(0.02, 5.0)

    # ------------------------------------------------------------ processes

    def _victim(self) -> SimProcess | None:
        return self._cast.world.process(self._chance.choose(self._victims))

    def _any_of(self, names: list[PeerName]) -> PeerName | None:
        """One of these processes; None: none that may be struck is of that kind."""
        return None if not names else names[0] if len(names) == 1 else self._chance.choose(names)

    def _crash(self, name: PeerName | None, is_seen: bool, latest_start_s: float = LATEST_START_S) -> None:
        world = self._cast.world
        process = None if name is None else world.process(name)
        if name is None or process is None:
            return
        num_ranks = len(process.ranks) if isinstance(process, SimWorker) else 1
        ranks_end_s = [self._chance.uniform(0.0, RANKS_END_S) for _ in range(1, num_ranks)]
        world.end(name, self._chance.exponential(0.01), ranks_end_s)
        self._cast.bury(process)
        if is_seen:
            world.at(world.now + self._chance.exponential(0.005), lambda: self._tell(name))
        if name in self.group:
            self._doom_others(name)
        self._start_later(name, latest_start_s)

    def _crash_again_and_again(self) -> None:
        name = self._any_of(self._workers)
        if name is not None:
            self._crash_again(name, self._chance.between(2, 3))

    def _crash_again(self, name: PeerName, num_left: int) -> None:
        """Crash a worker whose next life begins at once, and has met some of its peers."""
        if self._is_healed:
            return
        self._crash(name, self._chance.hits(0.5), LATEST_RESTART_S)
        if num_left:
            after_s = LATEST_RESTART_S + self._chance.log_uniform(0.02, 0.5)
            self._cast.world.at(self._cast.world.now + after_s, lambda: self._crash_again(name, num_left - 1))

    def _doom_others(self, dead: PeerName) -> None:
        """End the others: they see the end of a connection a moment later, and end; the supervisor waits for that."""
        world = self._cast.world
        self._doomed.pop(dead, None)
        for name in sorted(self.group - self._doomed.keys()):
            process = world.process(name)
            if process is not None:
                self._doomed[name] = process
                world.seen.note(Situation.GROUP_ENDS)
                world.at(world.now + self._chance.exponential(0.003), lambda name=name: self._end_doomed(name))  # type: ignore[misc]

    def _end_doomed(self, name: PeerName) -> None:
        if self._doomed.get(name) is self._cast.world.process(name) is not None:
            self._crash(name, is_seen=self._chance.hits(0.5))

    def _tell(self, name: PeerName) -> None:
        if self._cast.world.process(name) is None:
            self._cast.world.tell_death(name)

    def _start_later(self, name: PeerName, latest_s: float) -> None:
        world = self._cast.world
        world.at(world.now + self._chance.log_uniform(0.001, latest_s), lambda: self._start(name))

    def _start(self, name: PeerName) -> None:
        world = self._cast.world
        if name in self.group and self._doomed:
            world.at(world.now + 0.01, lambda: self._start(name))
        elif world.process(name) is None:
            self._cast.start(name)

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.stop(self._chance.log_uniform(0.05, 10.0))

    def _worker_of_ranks(self) -> SimWorker | None:
        living = (self._cast.world.workers.get(name) for name in self._workers)
        of_ranks = [worker for worker in living if worker is not None and len(worker.ranks) > 1]
        return self._chance.choose(of_ranks) if of_ranks else None

    def _hold_rank(self) -> None:
        worker = self._worker_of_ranks()
        if worker is not None:
            self._chance.choose(worker.ranks).hold(self._chance.log_uniform(0.02, LATEST_RANK_S))

    def _crash_rank(self) -> None:
        """Crash a rank, not the first one, which is the worker's death as any. That watches the others, and ends
        when one has."""
        world, worker = self._cast.world, self._worker_of_ranks()
        if worker is not None:
            world.end_rank(self._chance.choose(worker.ranks[1:]), self._chance.exponential(0.01))
            world.at(world.now + self._chance.exponential(0.003), lambda: self._crash_maimed(worker))

    def _mislead_rank(self) -> None:
        worker = self._worker_of_ranks()
        wire = None if worker is None else self._chance.choose(worker.ranks[1:]).wire
        if worker is None or wire is None:
            return
        wire.strike(self._chance.choose(list(Damage)))
        self._look_at_wire(worker, wire)

    def _look_at_wire(self, worker: SimWorker, wire: RankWire) -> None:
        """A rank that owes an answer for too long ends its worker."""
        world = self._cast.world
        if wire.struck is not None:
            self._crash_maimed(worker)
        elif wire.may_be_struck:
            world.at(world.now + ANSWER_S, lambda: self._look_at_wire(worker, wire))

    def rank_lost(self, worker: SimWorker, rank: int) -> None:
        """End one rank's process; all others of the worker end, too."""
        world = self._cast.world
        world.end_rank(worker.ranks[rank], self._chance.exponential(0.01))
        world.at(world.now + self._chance.exponential(0.003), lambda: self._crash_maimed(worker))

    def _crash_maimed(self, worker: SimWorker) -> None:
        if self._cast.world.workers.get(worker.name) is worker:
            self._crash(worker.name, is_seen=self._chance.hits(0.5))

    def _slow(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.pace.slowness = self._slowness

    def _jump(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.jump(self._chance.log_uniform(0.1, 10.0))

    def _drain(self) -> None:
        """SIGTERM: it ends when it is drained, or at the end of its grace, and is started again."""
        name = self._any_of(self._workers)
        victim = None if name is None else self._cast.world.workers.get(name)
        if victim is not None:
            victim.handle(DrainRequested())
            self._look_at_draining(victim, self._cast.world.now + 2.0)

    def _look_at_draining(self, worker: SimWorker, grace_ends: float) -> None:
        world = self._cast.world
        if world.workers.get(worker.name) is not worker:
            return
        if worker.instance.is_drained() or world.now >= grace_ends:
            self._crash(worker.name, is_seen=True)
        else:
            world.at(world.now + 0.05, lambda: self._look_at_draining(worker, grace_ends))
