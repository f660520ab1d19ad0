"""One simulated run of production control planes under faults: chaos, then `heal`, then everything must finish.

    report = simulate(seed)

The same seed gives the same run (I21: equal trace digests). A breach of an invariant ends the run: see `Report.breach`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from deltaserve.control.cache.pages import PageEvent, PageState
from deltaserve.control.front.client import Generation, RoleAnswer
from deltaserve.control.front.events import FlushAsked, Member, WorkerUp
from deltaserve.core.errors import FailReason, IntegrityError
from deltaserve.core.ids import Namespace, PeerName, Role, Room
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.transport import Evidence, FenceResult
from deltaserve.sim.chance import Chance
from deltaserve.sim.clients import Asked, Clients
from deltaserve.sim.cluster import (
    VOCAB,
    front_config,
    held_by,
    member_of,
    mix_pages,
    room_of,
    worker_config,
)
from deltaserve.sim.disorder import Disorder
from deltaserve.sim.drawn import drawn
from deltaserve.sim.expert_rounds import SimExpertGroup
from deltaserve.sim.explanations import LOSES_BYTES, TROUBLE
from deltaserve.sim.faults import (
    CLIENT_FAULTS,
    ENDPOINT_FAULTS,
    FRAME_FAULTS,
    PLAN_FAULTS,
    SLOT_FAULTS,
    UNPROVEN_FAULTS,
    WRITE_FAULTS,
    EndpointFaults,
    FaultKind,
    LinkFaults,
    WriteFaults,
)
from deltaserve.sim.knobs import LEAST_DRAIN_S, Knobs, draw_knobs
from deltaserve.sim.loopback import Fabric, Fate, Posted
from deltaserve.sim.membership import Membership
from deltaserve.sim.met import met_by_clients, met_by_front, met_by_group, met_by_worker
from deltaserve.sim.oracle import FIRST_REVISION
from deltaserve.sim.process import Pace, SimFront, SimProcess, SimWorker
from deltaserve.sim.progress import LivenessWatch
from deltaserve.sim.rollout import NEXT_REVISION, Apart, Rollout
from deltaserve.sim.situations import Situation
from deltaserve.sim.trace import Trace
from deltaserve.sim.watch import Watch, page_moves
from deltaserve.sim.work import WorkBound
from deltaserve.sim.world import World

LIVENESS_S = 60.0
"""After `heal` everything must be over within so long (I11)."""
SLOW_LIVENESS_S = 3 * LIVENESS_S
"""Limit on slow networks, where a request that was retracted is carried again, and where pages are staged: ranks look
again after half a second at what no news tells them of, such as room in their own ring, real ones after two
milliseconds."""
_NUM_PROBES = 3
_LEAVES_S = 0.005, 0.5
"""How long a client waits that leaves."""
_LOOK_EVERY = 16
"""Events between two looks at which worker has which room."""
_PATIENCE_S = 6.0
_STRANDED_S = 6.0
"""How long a worker sits on pages it cannot free before it is restarted."""

TicketMove = tuple[Enum, Enum]
PageMove = tuple[PageState, PageEvent]
"""(state, event): a cell of a transition table."""
_ANOTHER_REVISION = "another model"


@dataclass(slots=True)
class Report:
    """What became of one seed."""

    seed: int
    num_events: int = 0
    num_requests: int = 0
    num_answered: int = 0
    digest: str = ""
    error: Exception | None = None
    """What broke; None for a run without a breach."""
    trace: list[str] = field(default_factory=list)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    page_moves: Counter[PageMove] = field(default_factory=Counter)
    ticket_moves: Counter[TicketMove] = field(default_factory=Counter)
    situations: frozenset[Situation] = frozenset()
    turns: Counter[int] = field(default_factory=Counter)
    """Events that a turn of a worker dealt with |-> such turns."""

    @property
    def breach(self) -> str | None:
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"


def simulate(seed: int, knobs: Knobs | None = None, keep_lines: int = 0, full_every: int = 32) -> Report:
    """Run one seed. `full_every` 1: recount everything after every event."""
    knobs = knobs or draw_knobs(seed)
    return Run(seed, knobs, Trace(keep_lines), Watch(full_every, knobs.poisons)).judged()


def _held_at(worker: SimWorker) -> int:
    """Tombstones of a peer that is not there are kept until it is a stranger: it may ask yet."""
    instance = worker.instance
    there = [peer.name for peer in instance.links.table if instance.links.is_ready(peer.name)]
    tombstones = sum(map(instance.outflow.sender.num_tombstones_of, there))
    return held_by(worker) + instance.num_rooms + tombstones + worker.num_waiting


def _random_faults(seed: int, knobs: Knobs) -> tuple[LinkFaults, WriteFaults]:
    counts: Counter[FaultKind] = Counter()
    frames = {kind: rate for kind, rate in knobs.rates.items() if kind in FRAME_FAULTS}
    writes = {kind: rate for kind, rate in knobs.rates.items() if kind in (*WRITE_FAULTS, *UNPROVEN_FAULTS)}
    return (
        LinkFaults(
            frames,
            Chance(seed, "links"),
            counts,
            knobs.link_s,
            bytes_per_s=knobs.link_bytes_per_s,
            life_lag_s=knobs.life_lag_s,
        ),
        WriteFaults(writes, Chance(seed, "writes"), counts, knobs.land_s, knobs.bytes_per_s),
    )


class Run:
    """The processes, clients and faults of one seed."""

    def __init__(
        self, seed: int, knobs: Knobs, trace: Trace, watch: Watch, faults: tuple[LinkFaults, WriteFaults] | None = None
    ) -> None:
        """`faults`: instead of those that the knobs and the seed make."""
        self.seed = seed
        self.knobs = knobs
        self._chance = Chance(seed, "run")
        self._non_finite = knobs.rates.get(FaultKind.NON_FINITE, 0.0)
        self._links, self._writes = faults or _random_faults(seed, knobs)
        self.faults = self._links.counts
        endpoints = {kind: rate for kind, rate in knobs.rates.items() if kind in (*ENDPOINT_FAULTS, *PLAN_FAULTS)}
        self._endpoints = EndpointFaults(endpoints, Chance(seed, "endpoints"), self.faults)
        slots = {kind: rate for kind, rate in knobs.rates.items() if kind in SLOT_FAULTS}
        self._slots = EndpointFaults(slots, Chance(seed, "slots"), self.faults)
        self._watch = watch
        self.world = World(self._links, Fabric(self._posted, watch.landed, knobs.mover), trace)
        self.world.on_touch = watch.touched
        self.world.on_event = self._before_event
        self.clients = Clients.of(seed, knobs, self.faults)
        self._curiosity = Chance(seed, "probes")
        self._operator, self._leaves = Chance(seed, "operator"), Chance(seed, "leaves")
        self._roles = knobs.shape.roles()
        self._work = WorkBound.of(knobs.shape)
        self._front_names = knobs.shape.fronts()
        self._which_front = Chance(seed, "fronts")
        chance, fronts = Chance(seed, "disorder"), self._front_names
        decode = [name for name, role in self._roles.items() if role is Role.DECODE]
        self._group_names = frozenset(decode if knobs.shape.shares_experts else ())
        self._group = SimExpertGroup(len(self._group_names))
        self._disorder = Disorder(self, list(self._roles), fronts, chance, self._links, knobs.slowness)
        self._disorder.group = self._group_names
        may_leave = [name for name in self._roles if name not in self._group_names]
        self._membership = Membership(self, may_leave, Chance(seed, "leaves and joins"))
        new = knobs.shape.next_roles()
        old = [name for name, role in self._roles.items() if name not in new and role is not Role.UNIFIED]
        self._rollout = Rollout(self, self._membership, old, new, Chance(seed, "steps of the rollout"))
        self._load = Chance(seed, "load")
        self._progress: LivenessWatch | None = None
        if knobs.sick is not None:
            self._links.sick = self._writes.sick = knobs.sick
            self._disorder.confine(knobs.sick)
            self._progress = LivenessWatch(knobs.sick, knobs.fence_s)
        self._lives: Counter[PeerName] = Counter()
        self._reader_stops, self._reader_stop_rate = Chance(seed, "stopped readers"), knobs.reader_stops
        self._comebacks = Chance(seed, "misfits")
        self._misfit_rate = knobs.misfits
        self._misfits: set[PeerName] = set()
        """Workers that run with another model."""
        self._apart = Apart(self._rollout, self._roles)
        if new:
            self.world.on_send = self._apart.check
        self._shared_since: dict[Room, float] = {}
        """When each room began to be on two workers."""
        self._unregistered = set(self._roles) - self._rollout.awaited if knobs.late_starts else set()
        self._upcoming = list(reversed(knobs.events))
        self._idle_ranks = knobs.shape.ranks_without_readers() if knobs.idle_rank_lag_s else frozenset[int]()
        self._page_moves: Counter[PageMove] = Counter()
        self._ticket_moves: Counter[TicketMove] = Counter()

    @property
    def _fronts(self) -> list[SimFront]:
        return list(self.world.fronts.values())

    def _any_front(self) -> SimFront:
        return self._which_front.choose(self._fronts)

    def _posted(self, posted: Posted) -> Fate | None:
        """The fabric's policy. A reader may be stopped just then: what it copies afterwards may have been fenced."""
        reader = self.world.process(posted.dst)
        if reader is not None and not reader.is_stopped and self._reader_stops.hits(self._reader_stop_rate):
            self.faults[FaultKind.PAUSE] += 1
            reader.stop(self._reader_stops.log_uniform(0.1, 5.0))
        return self._writes.fate(posted)

    # ------------------------------------------------------------ the two phases

    def judged(self) -> Report:
        """Run, and say what came of it."""
        breach: Exception | None = None
        try:
            self.go()
        except Exception as error:  # whatever a control plane raises is a breach
            breach = error
        report = self.report()
        report.error = breach
        return report

    def go(self) -> None:
        window_s = self.knobs.traffic.window_s
        self._start_all()
        for _ in range(self.knobs.traffic.num_requests):
            self.world.at(0.01 + self._chance.uniform(0.0, window_s), self._ask)
        for _ in range(self.knobs.traffic.num_callers):
            self.world.at(0.01 + self._load.random(), lambda: self._call(None))
        chaos_s = max(window_s, self.knobs.traffic.load_s)
        self.world.run(until=chaos_s + self._chance.exponential(1.0), done=self._is_endless)
        self.world.trace.note(self.world.now, "heal")
        self._heal()
        self._finish()

    def _start_all(self) -> None:
        self._rollout.begin()
        for name in [*self._roles, *self._front_names]:
            if name in self._rollout.awaited:
                continue
            if self.knobs.late_starts and name in self._roles:
                self.world.at(self._chance.uniform(0.0, 1.0), lambda name=name: self._start_first(name))  # type: ignore[misc]
            else:
                self.start(name)

    def _start_first(self, name: PeerName) -> None:
        if not self._lives[name]:
            self.start(name)

    def _call(self, last: Asked | None) -> None:
        """A caller asks again when the last request is over."""
        if self.world.now > self.knobs.traffic.load_s:
            return
        if self._progress is not None:
            self._progress.look(self.clients.asked, self.world.now)
        if last is None or last.is_over:
            self._ask()
            last = self.clients.asked[-1]
        self.world.at(self.world.now + self._load.exponential(0.3), lambda: self._call(last))

    def _ask(self) -> None:
        if self.clients.asked and self._chance.hits(0.1 * self.knobs.traffic.oddity):
            self.faults[FaultKind.BURST] += 1
            for _ in range(4):
                self.clients.ask(self._any_front(), self.world.now)
        self.clients.ask(self._any_front(), self.world.now)
        asked = self.clients.asked[-1]
        if self._leaves.hits(self.knobs.traffic.leaves):
            self.world.at(self.world.now + self._leaves.log_uniform(*_LEAVES_S), lambda: self.clients.leave(asked))

    def _heal(self) -> None:
        """End all faults: nothing more goes wrong from now on. What is on its way keeps its fate."""
        self._links.heal()
        self._writes.heal()
        self._endpoints.heal()
        self._slots.heal()
        self._non_finite = self._misfit_rate = self._reader_stop_rate = 0.0
        self._upcoming.clear()
        self._unregistered.clear()
        self._membership.heal()
        self._rollout.heal()
        self._disorder.heal()
        for worker in self.world.workers.values():
            worker.executor.spoil_next = False
        for name in sorted(self._misfits & self.world.workers.keys()):
            self._start_rightly(name, self._lives[name])
        for name in self._roles:
            for front in self._fronts if name not in self._membership.left else ():
                self._membership.register(front, name)

    def _finish(self) -> None:
        """I11, I17: all ends well, and soon."""
        limit = self.world.now + self._liveness_s()
        until = self.world.now
        while until < limit and not self._is_over():
            until = min(limit, until + _STRANDED_S)
            self.world.run(until=until, done=self._is_over)
            self._restart_stranded()
        self._until(limit, self.clients.all_over, lambda: "requests do not end")
        shape = self.knobs.shape
        patience_s = 2 * max(shape.peer_lease_s, shape.peer_lost_s) + shape.stall_s + 2 * self.knobs.fence_s
        held_until = (rank.held_until for worker in self.world.workers.values() for rank in worker.ranks)
        settled = max(self.world.now, self.world.last_arrival(), *held_until) + patience_s
        limit += settled - self.world.now  # time that this loop itself waited does not count
        self.world.run(until=settled, done=self._is_endless)
        self._restart_stranded()
        self._until(limit, self._is_ready, lambda: f"not ready: {self._not_ready()}")
        self._until(limit, self._is_free, lambda: f"held before a probe: {self._held()}")
        for number in range(_NUM_PROBES):
            if problem := self._ended_probe(self._probe if number == 0 else self._repeat):
                raise IntegrityError(f"I17: a probe failed after heal: {problem}")
        self._read_again()
        self._until_free("held after the last request")
        self._leave_last()
        self.clients.check()
        self._check_fences()
        self._check_verdicts()
        for process in (*self.world.workers.values(), *self._fronts):
            self._watch.check(process)

    def _leave_last(self) -> None:
        """I33: a worker that leaves is known to nobody in the end, where any were to leave."""
        if any(kind is FaultKind.LEAVE for _, kind in self.knobs.events):
            is_forgotten = self._membership.leave_last()
            self._until(self.world.now + self._liveness_s(), is_forgotten, lambda: "a worker that left is known")

    def _ended_probe(self, submit: Callable[[], Asked]) -> str | None:
        """What went wrong with a request that nothing stands in the way of. It has as much time as any other."""
        self._until_free("held before a probe")  # a queue may hold one
        probe = submit()
        self._until(self.world.now + self._liveness_s(), self.clients.all_over, lambda: "a probe does not end")
        return probe.answer.error.message if probe.answer.error is not None else None

    def _until_free(self, otherwise: str) -> None:
        limit = self.world.now + self._liveness_s()
        self._until(limit, self._is_free, lambda: f"{otherwise}: {self._held()}")

    def _read_again(self) -> None:
        """I17: a worker that met KV that is not finite reads it no more; one that cannot know of it meets it once."""
        workers = list(self.world.workers.values())
        spoiled = [prompt for worker in workers for prompt in worker.executor.spoiled]
        if spoiled:
            self.world.seen.note(Situation.SPOILED_ASKED_AGAIN)
            self._ask_again(self._curiosity.choose(spoiled), dict.fromkeys(workers, 1))
        found_out = [(worker, prompt) for worker in workers for prompt in worker.executor.not_finite]
        if found_out:
            knows, prompt = self._curiosity.choose(found_out)
            self._ask_again(prompt, {worker: int(worker is not knows) for worker in workers})

    def _ask_again(self, prompt: tuple[Namespace, bytes], allowed: Mapping[SimWorker, int]) -> None:
        namespace, packed = prompt
        tokens = list(unpack_u32(packed))[: max(1, self.knobs.traffic.largest - 2)]
        before = {worker: len(worker.executor.not_finite) for worker in allowed}
        for _ in range(_NUM_PROBES):
            if problem := self._ended_probe(lambda: self._submit(tokens, 2, namespace)):
                raise IntegrityError(f"I17: what was spoiled once fails after heal: {problem}")
        for worker, most in allowed.items():
            if len(worker.executor.not_finite) > before[worker] + most:
                raise IntegrityError(f"I17: {worker.name} reads KV that is not finite again")

    def _check_fences(self) -> None:
        """I27: no link is ended, with all that is on it, unless a fault has struck it or a worker."""
        shape = self.knobs.shape
        proves = shape.evidence is Evidence.COMPLETION and shape.drain_timeout_s >= LEAST_DRAIN_S
        num_fences = sum(worker.num_fences for worker in self.world.workers.values())
        if (
            proves
            and num_fences
            and (TROUBLE | {FaultKind.ROLE, FaultKind.LEAVE, FaultKind.ROLLOUT}).isdisjoint(+self.faults)
        ):
            raise IntegrityError(f"I27: {num_fences} fences, and nothing had happened")

    def _liveness_s(self) -> float:
        is_slow = self.knobs.bytes_per_s is not None or self.knobs.shape.is_staged
        return SLOW_LIVENESS_S if is_slow else LIVENESS_S

    def _check_verdicts(self) -> None:
        """I29: pages are not judged wrong while their bytes may be on their way behind what announced them."""
        num_refuted = sum(worker.num_refuted for worker in self.world.workers.values())
        if num_refuted and self.knobs.can_fence and LOSES_BYTES.isdisjoint(+self.faults):
            raise IntegrityError(f"I29: pages of {num_refuted} tickets were judged wrong before all had arrived")

    def _is_ready(self) -> bool:
        return all(front.core.ready() is None for front in self._fronts)

    def _not_ready(self) -> str:
        """What fronts lack to serve."""
        return ", ".join(reason for front in self._fronts if (reason := front.core.ready()) is not None)

    def _restart_stranded(self) -> None:
        """What the worker process and its supervisor do about pages that nobody gives back (see quarantine.py)."""
        for name, worker in list(self.world.workers.items()):
            if not self.knobs.can_fence and worker.instance.metrics()["deltaserve_quarantine_age_seconds"] > 0:
                self.world.kill(name)
                self.bury(worker)
                self.start(name)

    def _until(self, limit: float, holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        self.world.run(until=limit, done=lambda: holds() or self._is_endless())
        if self._is_endless():
            work = f"{self.world.num_events} events, {len(self.clients.asked)} requests, {self.world.now:.1f} s"
            raise IntegrityError(f"I14: more work than requests and time explain: {work}; {otherwise()}")
        if not holds():
            raise IntegrityError(f"I11: {otherwise()}")

    def _is_over(self) -> bool:
        return self.clients.all_over() or self._is_endless()

    def _is_endless(self) -> bool:
        return self.world.num_events > self._work.most(len(self.clients.asked), self.world.now)

    def _probe(self) -> Asked:
        """A request that nothing stands in the way of."""
        longest = max(1, min(self.knobs.traffic.largest - 2, 24))
        prompt = [self._chance.below(VOCAB) for _ in range(self._chance.between(1, longest))]
        return self._submit(prompt, 2, Namespace(""))

    def _repeat(self) -> Asked:
        """An earlier prompt, and some of what was answered: what the trees hold of it must serve."""
        known = [asked for asked in self.clients.asked if FaultKind.BAD_INPUT not in asked.flaws]
        if not known:
            return self._probe()
        failed = [asked for asked in known if asked.failed_by is FailReason.NUMERICAL]
        if failed:  # whatever was wrong with what it read must not be read again
            earlier = self._curiosity.choose(failed)
            return self._submit(list(unpack_u32(earlier.generation.prompt)), 1, earlier.generation.namespace)
        earlier = self._curiosity.choose(known)
        tokens = [*unpack_u32(earlier.generation.prompt), *earlier.answer.tokens]
        prompt = tokens[: self._curiosity.between(1, max(1, min(len(tokens), self.knobs.traffic.largest - 2)))]
        return self._submit(prompt, 2, earlier.generation.namespace)

    def _submit(self, prompt: list[int], max_tokens: int, namespace: Namespace) -> Asked:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        wanted = Generation(room_of(0), pack_u32(prompt), namespace, sampling, LIVENESS_S)
        return self.clients.submit(self._any_front(), wanted, self.world.now)

    def _held(self) -> dict[str, int]:
        """What is still held, and how much: pages, leases, rows, tickets, rooms, tombstones (I12)."""
        held: dict[str, int] = {name: _held_at(worker) for name, worker in self.world.workers.items()}
        held |= {front.name: len(front.core.rooms) for front in self._fronts}
        return {name: count for name, count in held.items() if count}

    def _is_free(self) -> bool:
        """Whether nobody holds anything any more."""
        workers = self.world.workers.values()
        return not any(len(front.core.rooms) for front in self._fronts) and not any(map(_held_at, workers))

    # ------------------------------------------------------------ faults at events

    def _before_event(self, number: int) -> None:
        if number % _LOOK_EVERY == 0:
            self._look_at_rooms()
            self._membership.look()
            self._rollout.look()
        while self._upcoming and self._upcoming[-1][0] <= number:
            self._strike(self._upcoming.pop()[1])
        if self._non_finite and self._chance.hits(self._non_finite * 0.05):
            self.faults[FaultKind.NON_FINITE] += 1
            workers = [w for w in self.world.workers.values() if self.knobs.sick in (None, w.name)]
            worker = self._chance.choose(workers or [None])
            if worker is not None:
                worker.executor.spoil_next = True

    def _look_at_rooms(self) -> None:
        """I25: a room lives on one decode worker at a time, on two only until the former one learns of it.

        One that was given up and came back is told as soon as it sends a Hello.
        """
        holders: Counter[Room] = Counter()
        for worker in self.world.workers.values():
            if not worker.is_stopped:
                holders.update(room.room for room in worker.instance.serving.rooms)
        shared = {room for room, number in holders.items() if number > 1}
        self._shared_since = {room: self._shared_since.get(room, self.world.now) for room in shared}
        patience_s = 2 * self.knobs.shape.peer_lost_s + _PATIENCE_S
        for room, since in self._shared_since.items():
            if self.world.now - since > patience_s:
                raise IntegrityError(f"I25: a room is on {holders[room]} workers for {self.world.now - since:.1f} s")

    def _strike(self, kind: FaultKind) -> None:
        if kind in CLIENT_FAULTS:
            self.clients.disturb(kind)
        elif kind is FaultKind.FLUSH:
            front = self._any_front()
            self.faults[kind] += front.is_alive
            front.tell(FlushAsked())
        elif kind is FaultKind.ROLE:
            self._change_role()
        elif kind is FaultKind.LEAVE:
            self.faults[kind] += self._membership.strike()
        else:
            self.faults[kind] += 1
            self._disorder.strike(kind)

    def _change_role(self) -> None:
        """Change the role of some worker; the last of a role keeps it. All by one front: another may not have heard
        yet who changes. Nobody changes while one leaves, of which fronts may be still to hear: it may be the last other
        one of the role."""
        name, grace_s = self._operator.choose(list(self._roles)), self._operator.log_uniform(0.01, 5.0)
        worker, front = self.world.workers.get(name), self._fronts[0]
        is_free = worker is not None and front.is_alive and not self._membership.left
        if worker is None or not is_free or worker.config.role is Role.UNIFIED:
            return
        other = Role.DECODE if worker.instance.config.role is Role.PREFILL else Role.PREFILL
        self.faults[FaultKind.ROLE] += front.change_role(name, other, grace_s) is RoleAnswer.CHANGING

    # ------------------------------------------------------------ processes (disorder.Cast)

    def start(self, name: PeerName) -> None:
        if name in self._membership.gone:
            return
        self._lives[name] += 1
        pace = self._pace()
        if name in self._front_names:
            unknown = self._membership.left | self._rollout.awaited
            members = [self._known(n) for n in self._roles if n not in unknown]
            SimFront(self.world, front_config(self.knobs.shape, members, self._lives[name], name), pace)
            return
        revision = self._revision(name)
        if revision not in self.clients.revisions:
            self.clients.revisions.append(revision)
        config = worker_config(self.knobs.shape, name, self._roles[name], self._lives[name], revision)
        config = replace(config, computes_beside=not self.knobs.plans_late)
        fence = FenceResult.CLOSED if self.knobs.can_fence else FenceResult.IMPOSSIBLE
        url = self.member(name).address.url
        shape = self.knobs.shape
        worker = SimWorker(self.world, config, url, pace, fence, shape.plane(self._roles[name]))
        worker.on_rank_lost = self._disorder.rank_lost
        if name in self._group_names:
            worker.expert_group = self._group
            self._group.admit(worker)
        worker.executor.flavours, worker.executor.first_flavour = self.knobs.flavours, config.boot
        if self.knobs.sick in (None, name):
            for rank in worker.ranks:
                rank.transport.refuses = self._endpoints.refuses
                if rank.slots is not None:
                    rank.slots.fails = self._slots.refuses
        if self.knobs.mixes_pages:
            mix_pages(worker)
        if name in self._unregistered or self._chance.hits(0.5) or self.knobs.moves:
            if name in self._unregistered:
                self.faults[FaultKind.LATE_REGISTRATION] += 1
            self._unregistered.discard(name)
            self.world.at(self.world.now + self._chance.exponential(0.2), lambda: self._register(name))

    def _register(self, name: PeerName) -> None:
        for front in self._fronts:
            if front.is_alive and name in self.world.workers and name not in self._membership.left:
                front.tell(WorkerUp(self.member(name)))

    def member(self, name: PeerName) -> Member:
        """The worker, where it listens in its latest life."""
        place = max(0, self._lives[name] - 1) if self.knobs.moves else 0
        return member_of(name, self._roles[name], place, self.knobs.shape.shares_experts)

    def _known(self, name: PeerName) -> Member:
        """What a front that starts now is told of the worker."""
        member = self.member(name)
        return replace(member, url=None) if name in self._unregistered else member

    def note_step(self) -> None:
        self.faults[FaultKind.ROLLOUT] += 1

    def _revision(self, name: PeerName) -> str:
        """Fingerprint of the model of the life that begins: its own, or another one's."""
        right = NEXT_REVISION if name in self.knobs.shape.next_roles() else FIRST_REVISION
        is_back = self._lives[name] > 1
        self.faults[FaultKind.MOVE] += is_back and self.knobs.moves
        if not (is_back and name not in self._misfits and self._comebacks.hits(self._misfit_rate)):
            self._misfits.discard(name)
            return right
        self.faults[FaultKind.MISFIT] += 1
        self._misfits.add(name)
        self._apart.meet(self._misfits)
        life, when = self._lives[name], self.world.now + self._comebacks.log_uniform(0.05, 3.0)
        self.world.at(when, lambda: self._start_rightly(name, life))
        return _ANOTHER_REVISION

    def _start_rightly(self, name: PeerName, life: int) -> None:
        """Start a misfit with the right model: whoever runs it has seen why it is not used."""
        worker = self.world.workers.get(name)
        if worker is None or self._lives[name] != life:
            return
        self.world.end(name)
        if self._comebacks.hits(0.5):
            self.world.tell_death(name)
        self.bury(worker)
        self.start(name)

    def bury(self, process: SimProcess) -> None:
        if isinstance(process, SimFront):
            self.world.seen |= met_by_front(process)
            self.clients.front_died(process)
        elif isinstance(process, SimWorker):
            self._close_books(process)

    def _pace(self) -> Pace:
        clock_s = self._chance.uniform(0.0, 1e6)
        knobs = self.knobs
        pace = Pace(knobs.step_s, knobs.lag_s, clock_s, rank_lag_s=knobs.rank_lag_s, fence_s=knobs.fence_s)
        pace.staging_pauses, pace.turn_s, pace.plans_late = knobs.staging_pauses, knobs.turn_s, knobs.plans_late
        pace.shares_cores = knobs.shares_cores
        pace.idle_ranks, pace.idle_rank_lag_s = self._idle_ranks, knobs.idle_rank_lag_s
        return pace

    # ------------------------------------------------------------ the report

    def _close_books(self, worker: SimWorker) -> None:
        self.world.seen |= met_by_worker(worker)
        self._page_moves.update(page_moves(worker))
        for engine in (*worker.former, worker.instance):
            self._ticket_moves.update(engine.serving.receiver.moves)
            self._ticket_moves.update(engine.outflow.sender.moves)
        for staged in (rank.endpoint.staged for rank in worker.ranks):
            if staged is not None:
                self._ticket_moves.update(staged.writer.moves)
                self._ticket_moves.update(staged.reader.moves)

    def report(self) -> Report:
        for worker in self.world.workers.values():
            self._close_books(worker)
        for front in self._fronts:
            self.world.seen |= met_by_front(front)
        asked = self.clients.asked
        seen = self.world.seen | self._watch.seen | met_by_clients(asked) | met_by_group(self._group)
        return Report(
            self.seed,
            num_events=self.world.num_events,
            num_requests=len(asked),
            num_answered=sum(a.answer.finish is not None for a in asked),
            digest=self.world.trace.digest,
            trace=self.world.trace.lines,
            faults=self.faults,
            page_moves=self._page_moves,
            ticket_moves=self._ticket_moves,
            situations=frozenset(seen.union(drawn(self.knobs))),
            turns=self.world.turns,
        )
