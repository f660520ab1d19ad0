"""The processes of a simulated cluster: a worker (control plane, executor, transfer thread) and the front."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from deltaserve.control.engine.api import InstanceConfig, TellBlocks
from deltaserve.control.engine.core import EngineCore
from deltaserve.control.engine.driver import ComputeStep, Driver, Heard, Rest, RoleTaken, WorkerAction
from deltaserve.control.engine.step_pace import EagerPace, SharedPace, StepPace
from deltaserve.control.front.client import Generation, OutputDelta, RoleAnswer, RoleRefused, UnknownWorker
from deltaserve.control.front.events import (
    Deliver,
    Fail,
    FlushAsked,
    FrontAction,
    FrontConfig,
    TreesTold,
    WorkerLeaves,
    WorkerUp,
)
from deltaserve.control.front.front_core import FrontCore
from deltaserve.control.peer.link import Dial, FrameIn, HangUp, LinkEvent, SendFrame
from deltaserve.control.peer.table import PeerTable
from deltaserve.control.sched.plan import StepPlan
from deltaserve.control.sched.rounds import MemberRounds
from deltaserve.control.transfer.commands import FencePeer, PagesVerified, TransferReport
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.landings import WRONG_CONTENTS
from deltaserve.control.transfer.staging import Staging, StagingConfig
from deltaserve.core.errors import FailReason, IntegrityError, RequestFailed
from deltaserve.core.ids import Boot, Namespace, PeerName, Role, Room, RowId
from deltaserve.core.layout.shard import Shard
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Cancel, Envelope, Finished, Hello, Offer, Submit
from deltaserve.sim.attempts import Attempts
from deltaserve.sim.expert_rounds import SimExpertGroup
from deltaserve.sim.loopback import Fabric
from deltaserve.sim.one_revision import OneRevision
from deltaserve.sim.oracle import OracleExecutor
from deltaserve.sim.rank_memory import region_infos, stamp_memory
from deltaserve.sim.sim_rank import RankPace, SimRank, SimRankParts, join_ranks
from deltaserve.sim.situations import Sightings, Situation
from deltaserve.sim.staged_stamps import StampStaging
from deltaserve.sim.stamp_slots import StampSlots
from deltaserve.sim.trace import Trace
from deltaserve.sim.wiring import SimTransport, TaggedEndpoint

WINDOW_PAGES = 4
"""Posted at once, unless more or less is wanted."""


class Surroundings(Protocol):
    """The world, as a process sees it."""

    now: float
    fabric: Fabric
    trace: Trace
    seen: Sightings
    turns: Counter[int]
    """Events that a turn of a worker dealt with |-> such turns."""

    def at(self, when: float, call: Callable[[], None]) -> None: ...

    def send(self, src: PeerName, dst: PeerName, envelope: Envelope) -> None: ...

    def admit(self, process: "SimProcess") -> None:
        """Note that a process is there from now on, under its name."""
        ...

    def process(self, name: PeerName) -> "SimProcess | None":
        """The live process of that name."""
        ...

    def touched(self, process: "SimProcess") -> None: ...


@dataclass(slots=True)
class Pace:
    """How fast a process is, and what its clock shows."""

    step_s: float = 0.001
    lag_s: float = 0.0
    """Delay between loop and transfer thread, each way."""
    clock_s: float = 0.0
    """What its clock shows beyond the world's, in seconds."""
    slowness: float = 1.0
    rank_lag_s: float = 0.0
    """Further delay per rank behind the first, between loop and transfer thread, each way."""
    fence_s: float = 0.0
    """How long its transfer thread waits for an endpoint to be gone, and does nothing else."""
    staging_pauses: int = 0
    """Slices of a gather or scatter before its first byte is moved."""
    idle_ranks: frozenset[int] = frozenset()
    """Ranks of a prefill worker that send nothing."""
    idle_rank_lag_s: float = 0.0
    """Further delay of those ranks, each way."""
    turn_s: float = 0.0
    """How long a worker collects what arrives before it deals with it."""
    plans_late: bool = False
    """Whether the step behind one that computes is planned shortly before its end; else at once."""
    shares_cores: bool = False
    """Whether steps that only decode are put off while prefill is to have the cores. Only with `plans_late`."""


@dataclass(frozen=True, slots=True)
class PlaneSizes:
    """Sizes and limits of the data plane of a rank."""

    stall_s: float = 5.0
    """A write may take so long."""
    window_bytes: int | None = None
    """Posted at once; None: WINDOW_PAGES pages."""
    staging: StagingConfig | None = None


@dataclass(slots=True)
class Answer:
    """What a client got for one sample."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    deltas: int = 0
    ends: int = 0
    finish: str | None = None
    error: RequestFailed | None = None
    last: OutputDelta | None = None
    ended_at: float = 0.0
    prompt_logprobs_at_start: int = 0
    """How many of them were there when the first token came."""


class SimProcess(ABC):
    """Something that lives, may be stopped for a while, and dies."""

    def __init__(self, world: Surroundings, name: PeerName, pace: Pace) -> None:
        self.name = name
        self.pace = pace
        self.is_alive = True
        self.is_stopped = False
        self.resumed_at = 0.0
        """When it last went on after it had been stopped, or its clock had jumped."""
        self._backlog: list[Callable[[], None]] = []
        self.dialled: dict[PeerName, str] = {}
        """Where it looks for a peer; a peer it does not dial is answered over the peer's own connection."""
        self.world = world
        self._next_tick: float | None = None
        world.admit(self)

    @property
    def now(self) -> float:
        """The time on the clock of this process."""
        return self.world.now + self.pace.clock_s

    def later(self, delay: float, call: Callable[[], None]) -> None:
        """Call after `delay` of the world's time: later while the process is stopped, never once it has ended."""
        self.world.at(self.world.now + delay, lambda: self._turn_to(call))

    def receive(self, event: LinkEvent) -> None:
        """Take an event that arrives from a link."""
        self._turn_to(lambda: self.handle(event))

    def _turn_to(self, call: Callable[[], None]) -> None:
        """Now, or when the process goes on; never once it has ended."""
        if self.is_stopped:
            self._backlog.append(call)
        elif self.is_alive:
            call()

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.is_stopped = True
        self.world.at(self.world.now + seconds, self.go_on)

    def go_on(self) -> None:
        """SIGCONT: everything that was to happen meanwhile happens now, in order."""
        self.is_stopped, self.resumed_at = False, self.world.now
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self._turn_to(call)

    def jump(self, seconds: float) -> None:
        """Its clock goes on by so many at once, as after a suspended machine: a timer that is due by that fires now."""
        self.pace.clock_s += seconds
        self.resumed_at = self.world.now
        when = self._next_tick
        if when is not None and when <= self.now:
            self.later(0.0, lambda: self._tick_of(when))

    def _connect(self, action: Dial | HangUp) -> None:
        if isinstance(action, Dial):
            self.dialled[PeerName(action.address.name)] = action.address.url
        else:
            self.dialled.pop(action.peer, None)

    @abstractmethod
    def handle(self, event: LinkEvent) -> None:
        """Deal with it, at once."""

    def _tick_at(self, when: float) -> None:
        """Make sure that `_tick` is called then, on the process's clock."""
        if self._next_tick is None or when < self._next_tick:
            self._next_tick = when
            self.later(max(0.0, when - self.now), lambda: self._tick_of(when))

    def _tick_of(self, when: float) -> None:
        if self._next_tick == when:  # else there was one sooner, which has seen to the next
            self._next_tick = None
            self._tick()

    @abstractmethod
    def _tick(self) -> None:
        """The process's own timer is due."""


class CheckedDriver(Driver[EngineCore]):
    """Looks at what each frame leads to."""

    def _hear(self, one: Heard, now: float) -> None:
        config, links = self.engine.config, self.engine.links
        num_stale, heard = links.stale_frames, _heard_of(one, links.table)
        super()._hear(one, now)
        _check_addressee(one, config.boot, links.stale_frames - num_stale)
        _check_sender(heard, links.table, now - config.options.peer_suspect_s)


class SimWorker(SimProcess):
    """A worker process: the driver of its engines, its executor, its transfer threads."""

    def __init__(
        self,
        world: Surroundings,
        config: InstanceConfig,
        url: str,
        pace: Pace | None = None,
        fence_result: FenceResult = FenceResult.CLOSED,
        plane: PlaneSizes = PlaneSizes(),
    ) -> None:
        super().__init__(world, config.name, pace or Pace())
        self.memory = stamp_memory(config.cache, config.num_pages, config.tp_size, config.name)
        self.config = config
        self.url = url
        self.executor = OracleExecutor(config.cache, self.memory, config.vocab_size, config.fingerprint)
        self.join([self._rank_parts(shard, fence_result, plane) for shard in _shards(config.tp_size)])
        self.driver = CheckedDriver(
            EngineCore(config), Boot(config.boot), self._step_pace(), lambda boot: Boot(boot + 1)
        )
        self.former: list[EngineCore] = []
        """Engines of this process before it changed its role."""
        self._heard: list[Heard] = []
        """What the next turn deals with."""
        self._turned_at = 0.0
        self._is_going_on = False
        self._attempts = Attempts()
        self._submitted: deque[tuple[StepPlan, dict[RowId, Namespace]]] = deque()
        """Plans whose steps are not over, and whose rows they open."""
        self.rounds = MemberRounds()
        self.expert_group: SimExpertGroup | None = None
        self.on_rank_lost: Callable[[SimWorker, int], None] = _unforeseen
        """Called when a rank is of no use any more, so none is."""
        self.num_refuted = 0
        """Tickets whose pages it judged wrong."""
        self.num_fences = 0
        """Endpoints that it has ended with tickets on them."""
        self.later(0.0, self._take_turn)

    def join(self, parts: Sequence[SimRankParts]) -> None:
        """These are its ranks."""
        self._first, others = join_ranks(self, parts, self.world.seen)
        self.ranks: list[SimRank] = [self._first, *others]

    @property
    def instance(self) -> EngineCore:
        """The engine that is driven now."""
        return self.driver.engine

    def _step_pace(self) -> StepPace:
        if not self.pace.plans_late:
            return EagerPace()
        return SharedPace(self.config.options.sched.step_target_s) if self.pace.shares_cores else StepPace()

    def _rank_parts(self, shard: Shard, fence_result: FenceResult, plane: PlaneSizes) -> SimRankParts:
        config, memory = self.config, self.memory.ranks[shard.rank]
        staged = None
        if plane.staging is not None:
            staging_region = memory.add_staging(plane.staging.num_bytes)
            staged = StampStaging(memory, staging_region, self.pace.staging_pauses)
        transport = SimTransport(config.name, self.world.fabric, memory.memory, fence_result, config.evidence)
        for _, region in memory.regions:
            transport.register(region)
        endpoint_config = EndpointConfig(
            cache=config.cache,
            regions=region_infos(memory),
            shard=shard,
            checksums=config.options.verify_checksums,
            window_bytes=plane.window_bytes or WINDOW_PAGES * self.memory.page_bytes,
            stall_s=plane.stall_s,
        )
        staging = Staging(plane.staging, staged) if plane.staging is not None and staged is not None else None
        endpoint = TaggedEndpoint(endpoint_config, transport, memory, staging)
        lag_s = shard.rank * self.pace.rank_lag_s if shard.rank else self.pace.lag_s
        if config.role is Role.PREFILL and shard.rank in self.pace.idle_ranks:
            lag_s += self.pace.idle_rank_lag_s
        slots = StampSlots(memory, f"{config.fingerprint} {shard}") if config.tier_slots else None
        return SimRankParts(endpoint, transport, staged, RankPace(lag_s, self.pace.fence_s), slots)

    @property
    def num_waiting(self) -> int:
        """Ranks with transfers in their staging memory, and what some rank has to answer for. Where nothing can be
        fenced, what is left of either stays."""
        if self._first.transport.fence_result is not FenceResult.CLOSED:
            return 0
        staged = [rank.endpoint.staged for rank in self.ranks]
        return self._first.num_pending + sum(one is not None and not one.is_quiet for one in staged)

    def handle(self, event: Heard) -> None:
        self._hear([event])

    def hear(self, reports: Sequence[TransferReport]) -> None:
        for report in reports:
            self.world.trace.note(self.world.now, self.name, "hears", type(report).__name__)
            self.num_refuted += isinstance(report, PagesVerified) and self._is_refuted(report)
        self._hear(reports)

    def _hear(self, events: Sequence[Heard]) -> None:
        """One turn deals with all that arrives within `turn_s`, as in a worker that was busy."""
        if not self.is_alive:
            return
        is_first = not self._heard
        self._heard += events
        if not self.pace.turn_s:
            self._take_turn()
        elif is_first:
            self.later(self.pace.turn_s, self._take_due_turn)

    def _take_due_turn(self) -> None:
        if self._heard:
            self._take_turn()

    def stop(self, seconds: float) -> None:
        super().stop(seconds)
        for rank in self.ranks:
            rank.transport.stopped_until = self.world.now + seconds

    def go_on(self) -> None:
        """One turn deals with all that has come meanwhile."""
        for rank in self.ranks:
            rank.transport.go_on(self.world.now)
        self._is_going_on = True
        super().go_on()
        self._is_going_on = False
        self._take_turn()
        if self.expert_group is not None:
            self.expert_group.look()

    def _take_turn(self) -> None:
        if self._is_going_on or not self.is_alive:
            return
        heard, self._heard = self._heard, []
        self._note_turn(len(heard))
        engine, self._turned_at = self.instance, self.now
        actions = self.driver.turn(heard, self.now)
        if self.instance is not engine:
            self.former.append(engine)
        for action in actions:
            self._perform(action)
        self.world.seen.note(Situation.STEP_PUT_OFF, self.driver.leaves_cores)
        self.world.seen.note(Situation.STALLED, self.instance.parts.scheduler.waiting.queue.is_stalled)
        self._tick_when_due()
        self.world.touched(self)

    def _note_turn(self, num_events: int) -> None:
        self.world.turns[num_events] += 1
        self.world.seen.note(Situation.SEVERAL_EVENTS, num_events > 1)

    def _perform(self, action: WorkerAction) -> None:
        match action:
            case SendFrame():
                if isinstance(action.envelope.body, Offer):
                    self._attempts.offered(action.envelope.body, action.peer)
                self.world.send(self.name, action.peer, action.envelope)
            case Dial() | HangUp():
                self._connect(action)
            case ComputeStep(plan):
                self._submit(plan)
            case Rest():
                self.rounds.rest()
                if self.expert_group is not None:
                    self.expert_group.look()
            case RoleTaken():
                self._attempts = Attempts()
                self.world.trace.note(self.world.now, self.name, "becomes", action.role.value)
                self.world.seen.note(Situation.ROLE_CHANGED)
            case TellBlocks():
                pass  # nobody outside listens
            case order:
                if isinstance(order, FencePeer):
                    self.num_fences += bool(self.instance.serving.receiver.of_peer(order.peer))
                self._first.submit(order)

    # ------------------------------------------------------------ step thread

    def _submit(self, plan: StepPlan) -> None:
        opened = {o.row for o in plan.opens}
        running = self.instance.parts.scheduler.running
        namespaces = {r.row: r.namespace for r in running if r.row in opened and r.row is not None}
        self.world.seen.note(Situation.STEP_AHEAD, bool(self._submitted))
        self.world.seen.note(Situation.STEP_BEHIND_PROMPTS, any(before.num_extended for before, _ in self._submitted))
        ended = {request.row for request in self.instance.parts.scheduler.steps.ending}
        if any(item.row in ended for item in plan.items):
            raise IntegrityError(f"I37: step {plan.step} of {self.name} computes for a request that has ended")
        self._submitted.append((plan, namespaces))
        if len(self._submitted) == 1:
            self._launch()

    def _launch(self) -> None:
        """The device takes up the step that was planned first."""
        plan, namespaces = self._submitted[0]
        self.executor.namespaces |= namespaces
        self.executor.launch(plan)
        # As control/sched/executor.py says: not before the pages that it wrote may be read.
        if self.expert_group is None:
            self.later(self.step_s, lambda: self._finish_step(plan))
        else:
            self.rounds.submit(plan)
            self.expert_group.look()

    @property
    def step_s(self) -> float:
        """What a step takes here."""
        return self.pace.step_s * self.pace.slowness

    def wake(self, delay: float, call: Callable[[], None]) -> None:
        """Call after so long, whatever becomes of this process."""
        self.world.at(self.world.now + delay, call)

    def finish(self, plan: StepPlan) -> None:
        """The round of a step is over."""
        self._turn_to(lambda: self._finish_step(plan))

    def _finish_step(self, plan: StepPlan) -> None:
        if any(rank.is_gone for rank in self.ranks):
            return  # a step is over when every rank has answered it
        self.world.trace.note(self.world.now, self.name, "step", plan.step, len(plan.items))
        result = self.executor.execute(plan)
        if self.config.options.sched.step_target_s is not None:
            result = replace(result, seconds=plan.num_tokens / 1000)
        elif self.pace.plans_late or self.config.options.sched.num_ahead:
            result = replace(result, seconds=self.step_s)
        self._submitted.popleft()
        if self._submitted:
            self._launch()
        self.handle(result)

    # ------------------------------------------------------------ transfer threads

    def later_in_rank(self, rank: int, delay: float, call: Callable[[], None]) -> None:
        self.world.at(self.world.now + delay, lambda: self._turn_to_rank(rank, call))

    def _turn_to_rank(self, rank: int, call: Callable[[], None]) -> None:
        """Ranks behind the first may outlive it for a moment."""
        if self.is_stopped:
            self._backlog.append(lambda: self._turn_to_rank(rank, call))
        elif not self.ranks[rank].is_gone:
            if not self.is_alive:
                self.world.seen.note(Situation.RANK_OUTLIVES_WORKER)
                self.world.seen.note(Situation.RANK_MEETS_NEXT_LIFE, self.world.process(self.name) is not None)
            call()

    @property
    def world_now(self) -> float:
        return self.world.now

    def _is_refuted(self, report: PagesVerified) -> bool:
        """Pages of a ticket that was revoked meanwhile may be another's by now."""
        ticket = self.instance.serving.receiver.get(report.ticket)
        return ticket is not None and not ticket.is_revoked and WRONG_CONTENTS in (report.problem or "")

    def lose(self, rank: int) -> None:
        if self.is_alive:
            self.on_rank_lost(self, rank)

    # ------------------------------------------------------------ time

    def _tick(self) -> None:
        due = self.driver.next_turn_at(self._turned_at)
        if due is not None and due <= self.now:
            self._take_turn()
        else:
            self._tick_when_due()

    def _tick_when_due(self) -> None:
        due = self.driver.next_turn_at(self._turned_at)
        if due is not None:
            self._tick_at(due)


def _unforeseen(worker: SimWorker, rank: int) -> None:
    """Refuse a disagreement in a world in which nothing that ranks are told is damaged."""
    raise IntegrityError(f"I13: {worker.name} and its rank {rank} do not agree on what was said")


def _shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


class SimFront(SimProcess):
    """The front process: the production FrontCore, and the clients' side of it."""

    def __init__(self, world: Surroundings, config: FrontConfig, pace: Pace | None = None) -> None:
        super().__init__(world, config.name, pace or Pace())
        self.core = FrontCore(config)
        self._one_revision = OneRevision(self.core, config.cluster_secret)
        self._boot, self._suspect_s = config.boot, config.peer_suspect_s
        self.answers: dict[Room, Answer] = {}
        self._given: dict[Room, tuple[PeerName, int | None]] = {}
        """Room |-> the worker, and its boot, that was given it last and has not said that it ended there."""
        self._perform(self.core.start(self.now))

    def submit(self, generation: Generation, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        try:
            actions = self.core.submit(generation, self.now)
        except RequestFailed as error:
            answer.error, answer.ends = error, answer.ends + 1
            return answer
        self.answers[generation.room] = answer
        self._perform(actions)
        return answer

    def cancel(self, room: Room, reason: FailReason) -> None:
        """Cancel a room whose client has left."""
        self._perform(self.core.cancel(room, reason, self.now))

    def finish(self, room: Room, output_len: int) -> None:
        """A stop string was found."""
        self._perform(self.core.finish(room, output_len))

    def tell(self, event: WorkerUp | WorkerLeaves | FlushAsked) -> None:
        """What an operator wants, or a list of workers says."""
        self._perform(self.core.handle(event, self.now))

    def change_role(self, name: PeerName, role: Role, grace_s: float) -> RoleAnswer | None:
        """An operator wants it. None: refused, or the worker has left."""
        try:
            answer, actions = self.core.change_role(name, role, grace_s)
        except (RoleRefused, UnknownWorker):
            return None
        self._perform(actions)
        return answer

    def handle(self, event: LinkEvent) -> None:
        if not self.is_alive:
            return
        if isinstance(event, FrameIn) and isinstance(event.envelope.body, Finished):
            room = Room(event.envelope.body.room)
            if self._given.get(room, ("", None))[0] == event.envelope.src:
                del self._given[room]
        workers = self.core.workers
        num_stale, heard = workers.num_stale_frames, _heard_of(event, workers.table)
        actions = self.core.handle(event, self.now)
        _check_addressee(event, self._boot, workers.num_stale_frames - num_stale)
        _check_sender(heard, workers.table, self.now - self._suspect_s)
        if isinstance(event, FrameIn):
            for action in actions:
                if isinstance(action, Deliver) and (action.delta.tokens or action.delta.prompt_logprobs):
                    self._one_revision.delivered(action.room, PeerName(event.envelope.src), event.envelope.body)
        self._perform(actions)

    def _give(self, room: Room, to: PeerName) -> None:
        """I25: a room is on one decode worker at a time, as far as the front can know."""
        former, boot = self._given.get(room, (to, None))
        worker = self.core.workers.get(former)
        if former != to and worker is not None and worker.is_ready and worker.peer.boot == boot:
            raise IntegrityError(f"I25: a room goes to {to} while {former} has it")
        target = self.core.workers.get(to)
        self._given[room] = to, None if target is None else target.peer.boot

    def _send(self, action: SendFrame) -> None:
        self._one_revision.check(action.peer, action.envelope.body)
        match action.envelope.body:
            case Submit(room=room):
                self._give(Room(room), action.peer)
            case Cancel(room=room):
                self._given.pop(Room(room), None)
            case _:
                pass
        self.world.send(self.name, action.peer, action.envelope)

    def _perform(self, actions: Iterable[FrontAction]) -> None:
        for action in actions:
            match action:
                case SendFrame():
                    self._send(action)
                case Dial() | HangUp():
                    self._connect(action)
                case Deliver():
                    _deliver(self.answers[action.room], action.delta, self.world.now)
                case Fail():
                    answer = self.answers[action.room]
                    answer.error, answer.ends, answer.ended_at = action.error, answer.ends + 1, self.world.now
                    self.world.trace.note(self.world.now, "client", action.error.reason.value)
                case TreesTold():
                    pass  # no operator looks
        for room in self.core.rooms.unplaced:  # whoever had it was lost, though it may come back
            self._given.pop(room, None)
        self._tick_at(self.core.next_timer())
        self.world.touched(self)

    def _tick(self) -> None:
        if self.core.next_timer() <= self.now:
            self._perform(self.core.tick(self.now))
        self._tick_at(max(self.core.next_timer(), self.now + 0.01))


def _check_addressee(event: Heard, boot: int, num_dropped: int) -> None:
    """I18: what was meant for another life of this process, or for nobody, changes nothing; a Hello may."""
    if num_dropped or not isinstance(event, FrameIn) or event.envelope.dst_boot == boot:
        return
    if not isinstance(event.envelope.body, Hello):
        raise IntegrityError(f"I18: a {type(event.envelope.body).__name__} for another life was taken")


class _Heard(NamedTuple):
    """What was known of the sender of a frame before it came."""

    peer: PeerName
    boot: Boot | None
    at: float


def _heard_of(event: Heard, table: PeerTable) -> _Heard | None:
    """What the sender of a frame had told; None: it is no frame, or the first that its sender says."""
    name = PeerName(event.envelope.src) if isinstance(event, FrameIn) else None
    if name is None or name not in table:
        return None
    peer = table.get(name)
    return _Heard(name, peer.boot, peer.last_heard)


def _check_sender(heard: _Heard | None, table: PeerTable, since: float) -> None:
    """I18: what comes late from an earlier life of its sender is not believed, once a later one was heard lately."""
    if heard is None or heard.boot is None or heard.at < since:
        return
    boot = table.get(heard.peer).boot
    if boot is not None and boot < heard.boot:
        raise IntegrityError(f"I18: boot {boot} of {heard.peer} is believed behind boot {heard.boot}")


def _deliver(answer: Answer, delta: OutputDelta, now: float) -> None:
    answer.deltas += 1
    if delta.tokens and not answer.tokens:
        answer.prompt_logprobs_at_start = len(answer.prompt_logprobs) + len(delta.prompt_logprobs)
    answer.tokens.extend(delta.tokens)
    answer.logprobs.extend(delta.logprobs)
    answer.prompt_logprobs.extend(delta.prompt_logprobs)
    answer.last = delta
    if delta.finish is not None:
        answer.finish, answer.ended_at = delta.finish.value, now
        answer.ends += 1
