"""Deaths, pauses and broken connections of a run: the faults that strike processes, at chosen events."""

from collections.abc import Callable
from typing import Protocol

from deltaserve.base.ids import PeerName
from deltaserve.sim.chance import Chance
from deltaserve.sim.faults import FaultKind, LinkFaults
from deltaserve.sim.process import SimProcess, SimWorker
from deltaserve.sim.world import World


class Cast(Protocol):
    """Whoever starts and counts the processes of a run."""

    world: World

    def start(self, name: PeerName) -> None:
        """A new life of a process begins."""
        ...

    def bury(self, process: SimProcess) -> None:
        """A process has just ended: keep its books, and tell its clients."""
        ...


class Disorder:
    """Strikes the processes of one run."""

    def __init__(self, cast: Cast, names: list[PeerName], front: PeerName, chance: Chance, links: LinkFaults) -> None:
        self._cast = cast
        self._names = names
        self._front = front
        self._chance = chance
        self._links = links
        self._strikes: dict[FaultKind, Callable[[], None]] = {
            FaultKind.RESET: self._reset,
            FaultKind.HALF_OPEN: self._half_open,
            FaultKind.PARTITION: self._partition,
            FaultKind.CLOG: self._clog,
            FaultKind.CRASH: lambda: self._crash(self._chance.choose(self._names), is_seen=True),
            FaultKind.CRASH_UNSEEN: lambda: self._crash(self._chance.choose(self._names), is_seen=False),
            FaultKind.FRONT_CRASH: lambda: self._crash(self._front, is_seen=self._chance.hits(0.5)),
            FaultKind.PAUSE: self._pause,
            FaultKind.SLOW_PROCESS: self._slow,
            FaultKind.CLOCK_JUMP: self._jump,
            FaultKind.DRAIN: self._drain,
        }

    def reseed(self, chance: Chance) -> None:
        """Draw from `chance` from now on."""
        self._chance = chance

    def strike(self, kind: FaultKind) -> None:
        self._cast.world.trace.note(self._cast.world.now, "fault", kind.value)
        self._strikes[kind]()

    def heal(self) -> None:
        """Everybody lives, and at normal speed."""
        world = self._cast.world
        for name in (*self._names, self._front):
            process = world.process(name)
            if process is None:
                self._cast.start(name)
            else:
                process.pace.slowness = 1.0
                process.go_on()

    # ------------------------------------------------------------ connections

    def _two(self) -> tuple[PeerName, PeerName]:
        one = self._chance.choose(self._names)
        others = [name for name in (*self._names, self._front) if name != one]
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
        return self._cast.world.process(self._chance.choose([*self._names, self._front]))

    def _crash(self, name: PeerName, is_seen: bool) -> None:
        world, process = self._cast.world, self._cast.world.process(name)
        if process is None:
            return
        world.end(name, still_lands_s=self._chance.exponential(0.01))
        self._cast.bury(process)
        if is_seen:
            world.at(world.now + self._chance.exponential(0.005), lambda: self._tell(name))
        self._start_later(name)

    def _tell(self, name: PeerName) -> None:
        if self._cast.world.process(name) is None:
            self._cast.world.tell_death(name)

    def _start_later(self, name: PeerName) -> None:
        world = self._cast.world
        world.at(world.now + self._chance.log_uniform(0.001, 3.0), lambda: self._start(name))

    def _start(self, name: PeerName) -> None:
        if self._cast.world.process(name) is None:
            self._cast.start(name)

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.stop(self._chance.log_uniform(0.05, 10.0))

    def _slow(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.pace.slowness = 10.0

    def _jump(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.pace.clock_s += self._chance.log_uniform(0.1, 10.0)
            victim.resumed_at = self._cast.world.now

    def _drain(self) -> None:
        """SIGTERM: it ends when it is drained, or at the end of its grace, and is started again."""
        victim = self._cast.world.workers.get(self._chance.choose(self._names))
        if victim is not None:
            victim.drain()
            self._look_at_draining(victim, self._cast.world.now + 2.0)

    def _look_at_draining(self, worker: SimWorker, grace_ends: float) -> None:
        world = self._cast.world
        if world.workers.get(worker.name) is not worker:
            return
        if worker.instance.is_drained() or world.now >= grace_ends:
            self._crash(worker.name, is_seen=True)
        else:
            world.at(world.now + 0.05, lambda: self._look_at_draining(worker, grace_ends))
