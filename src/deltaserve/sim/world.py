"""A cluster in one process: production front, instances, endpoints and transport objects, in virtual time.

Everything that happens is an event (time, number, call) in one heap; equal seeds give equal runs. What a link or the
fabric does to a frame or a write is decided by policies handed in, so a fault is data (safety: fault model).
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from deltaserve.base.errors import FailReason, RequestFailed
from deltaserve.base.ids import Boot, PeerName, Role, Room
from deltaserve.instance.api import Action, Dial, Event, FrameIn, HangUp, Instance, InstanceConfig, PeerDied, SendFrame
from deltaserve.instance.decode import DecodeInstance
from deltaserve.instance.prefill import PrefillInstance
from deltaserve.request.client import Generation, OutputDelta
from deltaserve.routing.api import Deliver, Fail, FrontAction, FrontConfig
from deltaserve.routing.front import FrontCore
from deltaserve.sim.oracle import OracleExecutor, StampMemory
from deltaserve.transfer.endpoint import Endpoint, EndpointConfig
from deltaserve.transport.loopback import Fabric, LoopbackTransport
from deltaserve.wire.codec import decode, encode
from deltaserve.wire.messages import Envelope, RegionInfo

POLL_S = 0.002
"""How often a transfer thread looks, while it has something to look for."""

LinkPolicy = Callable[[PeerName, PeerName, Envelope], Sequence[float]]
"""(from, to, frame) |-> delays of the copies that arrive; none: the frame is lost."""


def reliable(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float]:
    """The policy of a healthy link: once, soon."""
    return (0.0005,)


@dataclass(slots=True)
class Answer:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    deltas: int = 0
    ends: int = 0
    finish: str | None = None
    error: RequestFailed | None = None
    last: OutputDelta | None = None


class World:
    """Virtual time, links, and the processes on them."""

    def __init__(self, link: LinkPolicy = reliable, fabric: Fabric | None = None) -> None:
        self.now = 0.0
        self.link = link
        self.fabric = fabric or Fabric()
        self.workers: dict[PeerName, SimWorker] = {}
        self.front: SimFront | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> int:
        """Let events happen until virtual time `until`, or until `done()`. Returns their number."""
        count = 0
        while self._events and self._events[0][0] <= until and not done():
            self.now, _, call = heapq.heappop(self._events)
            self.fabric.advance(self.now)
            call()
            count += 1
        return count

    def send(self, src: PeerName, dst: PeerName, envelope: Envelope) -> None:
        """Through the real codec, with whatever the link does to it."""
        frame = encode(envelope)
        for delay in self.link(src, dst, envelope):
            self.at(self.now + delay, lambda: self._arrive(dst, frame))

    def _arrive(self, dst: PeerName, frame: bytes) -> None:
        event = FrameIn(decode(frame))
        if self.front is not None and dst == self.front.name:
            self.front.handle(event)
        elif dst in self.workers:
            self.workers[dst].handle(event)

    def kill(self, name: PeerName) -> None:
        """The process is gone; whoever watches it tells the others."""
        self.workers.pop(name).is_alive = False
        for worker in list(self.workers.values()):
            worker.handle(PeerDied(name))
        if self.front is not None:
            self.front.handle(PeerDied(name))


class SimWorker:
    """A worker process: an instance, its executor, its transfer thread."""

    def __init__(self, world: World, config: InstanceConfig, step_s: float = 0.001) -> None:
        self.name = config.name
        self.is_alive = True
        self._world = world
        self._step_s = step_s
        self.memory = StampMemory(config.cache, config.num_pages, config.num_aux_slots)
        config = replace(config, regions=region_infos(self.memory))
        self._executor = OracleExecutor(config.cache, self.memory, config.vocab_size)
        transport = LoopbackTransport(config.name, world.fabric, self.memory.memory)
        for _, region in self.memory.regions:
            transport.register(region)
        endpoint_config = EndpointConfig(
            cache=config.cache,
            layouts=self.memory.layouts,
            regions={component: region.id for component, region in self.memory.regions},
            checksums=config.verify_checksums,
        )
        self.endpoint = Endpoint(endpoint_config, transport, self.memory)
        self.instance: Instance = make_instance(config)
        self._is_computing = False
        self._is_polling = False
        self._next_tick: float | None = None
        world.workers[config.name] = self
        world.at(world.now, self._tick)

    def handle(self, event: Event) -> None:
        if self.is_alive:
            self._perform(self.instance.handle(event, self._world.now))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendFrame():
                    self._world.send(self.name, action.peer, action.envelope)
                case Dial() | HangUp():
                    pass  # names are addresses here
                case command:
                    for report in self.endpoint.perform(command):
                        self._later(0.0, lambda report=report: self.handle(report))  # type: ignore[misc]
        self._plan()
        self._poll_if_needed()
        self._schedule_tick()

    def _plan(self) -> None:
        if self._is_computing:
            return
        plan = self.instance.plan(self._world.now)
        if plan is None:
            return
        self._is_computing = True

        def finish() -> None:
            self._is_computing = False
            self._perform(self.instance.commit(self._executor.execute(plan), self._world.now))

        self._later(self._step_s, finish)

    def _poll_if_needed(self) -> None:
        if self._is_polling or (self.endpoint.is_idle() and not self.instance.transfer_active()):
            return
        self._is_polling = True

        def poll() -> None:
            self._is_polling = False
            for report in self.endpoint.poll():
                self.handle(report)
            self._poll_if_needed()

        self._later(POLL_S, poll)

    def _tick(self) -> None:
        self._next_tick = None
        timer = self.instance.next_timer()
        if timer is not None and timer <= self._world.now:
            self._perform(self.instance.tick(self._world.now))
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        timer = self.instance.next_timer()
        if timer is not None and (self._next_tick is None or timer < self._next_tick):
            self._next_tick = timer
            self._later(timer - self._world.now, self._tick)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        def if_alive() -> None:
            if self.is_alive:
                call()

        self._world.at(self._world.now + delay, if_alive)


class SimFront:
    """The front process: the production FrontCore, and the clients' side of it."""

    def __init__(self, world: World, config: FrontConfig) -> None:
        self.name = config.name
        self.core = FrontCore(config)
        self.answers: dict[Room, Answer] = {}
        self._world = world
        world.front = self
        self._perform(self.core.start(world.now))
        self._tick()

    def submit(self, generation: Generation) -> Answer:
        answer = self.answers[generation.room] = Answer()
        try:
            self._perform(self.core.submit(generation, self._world.now))
        except RequestFailed as error:
            answer.error, answer.ends = error, 1
        return answer

    def cancel(self, room: Room, reason: FailReason) -> None:
        """The client has left."""
        self._perform(self.core.cancel(room, reason, self._world.now))

    def handle(self, event: FrameIn | PeerDied) -> None:
        self._perform(self.core.handle(event, self._world.now))

    def _perform(self, actions: Iterable[FrontAction]) -> None:
        for action in actions:
            match action:
                case SendFrame():
                    self._world.send(self.name, action.peer, action.envelope)
                case Deliver():
                    _deliver(self.answers[action.room], action.delta)
                case Fail():
                    answer = self.answers[action.room]
                    answer.error, answer.ends = action.error, answer.ends + 1
                case _:
                    pass

    def _tick(self) -> None:
        if self.core.next_timer() <= self._world.now:
            self._perform(self.core.tick(self._world.now))
        self._world.at(max(self.core.next_timer(), self._world.now + 0.01), self._tick)


def _deliver(answer: Answer, delta: OutputDelta) -> None:
    answer.deltas += 1
    answer.tokens.extend(delta.tokens)
    answer.last = delta
    if delta.finish is not None:
        answer.finish = delta.finish.value
        answer.ends += 1


def make_instance(config: InstanceConfig) -> Instance:
    """The production control plane of a role."""
    return PrefillInstance(config) if config.role is Role.PREFILL else DecodeInstance(config)


def region_infos(memory: StampMemory) -> tuple[RegionInfo, ...]:
    return tuple(
        RegionInfo(id=r.id, base=r.base, num_bytes=r.num_bytes, device=r.device, component=component)
        for component, r in memory.regions
    )


def boot_of(name: str, life: int) -> Boot:
    """A boot id that no other life of any process has."""
    return Boot(int.from_bytes(name.encode(), "little") % 0xFFFF_FFFF_FFC5 * 1000 + life)
