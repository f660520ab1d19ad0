"""One engine: a scheduler and a cache, links to its peers, and the parts that requests come in by.

    serving   requests of fronts, from Submit to Finished (serving.py)
    intake    pages that other workers compute for those requests: the reader's side of a transfer (intake.py)
    outflow   prompts computed for other workers: the writer's side of a transfer (outflow.py)
    back      answers that return to prefill: decode writes (back_writer.py), prefill reads (back_reader.py)

A role is which of these parts take requests. All of them share the scheduler's rows, steps and memory.

A change of role is a change of engines: this one drains, ends its endpoints, and `successor` is a new one, with a boot
of its own, over the same pools and tree. What carries the boot is new: links, tickets, rooms. Memory is what stays.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deltaserve.control.cache.lease import Lease
from deltaserve.control.engine.api import Action, DrainRequested, Event, InstanceConfig, TellBlocks
from deltaserve.control.engine.back_reader import BackReader
from deltaserve.control.engine.back_writer import BackWriter
from deltaserve.control.engine.backlog import Backlog
from deltaserve.control.engine.intake import Intake
from deltaserve.control.engine.meter import Meter
from deltaserve.control.engine.outflow import Outflow
from deltaserve.control.engine.parts import (
    Parts,
    build_parts,
    check_parts,
    facts_of,
    pool_metrics,
    take_over_parts,
)
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.serving import Serving
from deltaserve.control.engine.tiering import Tiering
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.link import FrameIn, LinkBroken, PeerDied
from deltaserve.control.peer.page_fit import CHANGEABLE
from deltaserve.control.sched.needs import Needs
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.control.sched.queue import TryOutcome
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.waiting import Claim
from deltaserve.control.transfer.commands import (
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    PagesCopied,
    PeerFenced,
    StagingUsed,
)
from deltaserve.control.transfer.receiver import Receiver
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Boot, PeerName, Role, Room
from deltaserve.core.wire.messages import AskTree, ChangeRole, Flush, Hello

SERVES = frozenset({Role.DECODE, Role.UNIFIED})
"""Roles that serve requests of fronts (and take pages in)."""
WRITES = frozenset({Role.PREFILL})
"""Roles that compute prompts for other workers."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Another engine is to take over."""

    role: Role
    ends_rooms_at: float
    """What still runs then goes elsewhere."""
    has_left: bool = False
    """Everything ended here; the endpoints are being fenced, and nobody is listened to any more."""


class _Owner:
    """Whose the waiting requests are, while one call of `admit` runs: prompts of readers, or rooms of fronts."""

    __slots__ = ("_back", "_intake", "_loads", "_outflow", "_turn", "may_start")

    def __init__(
        self, outflow: Outflow, intake: Intake, back: BackReader, loads: "_Loads | None", turn: EngineTurn
    ) -> None:
        self.may_start = outflow.may_start
        self._back = back
        self._outflow = outflow
        self._intake = intake
        self._loads = loads
        self._turn = turn

    def claim(self, request: Request, cached_len: int) -> Claim:
        claim = self._outflow.claim(request, cached_len, self._turn)
        if claim is Claim.NOTHING:
            return claim
        waits = self._back.awaits(request, cached_len, self._turn.now)
        waits = waits or (self._loads is not None and self._loads.awaits(request, self._turn))
        return Claim.NOTHING if waits else claim

    def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
        if self._loads is not None and self._loads.fetch_awaits(request, self._intake.byte_s_of(request), self._turn):
            return TryOutcome.HELD_BACK
        return self._intake.fetch(request, reserve, self._turn)


@dataclass(frozen=True, slots=True)
class _Loads:
    """Whether a request waits for pages of the file under the tree."""

    parts: Parts
    tiering: Tiering
    tokens_per_s: float
    """At which prompts are computed here; 0: not known."""

    def awaits(self, request: Request, turn: EngineTurn) -> bool:
        """The request is to be computed here."""
        if not self.parts.scheduler.running.shares_prompt(request):
            return False
        limit = request.num_tokens - 1
        match = self.parts.cache.match(request.namespace, request.tokens, request.keys, limit)
        return self.tiering.awaits(request, match, self.tokens_per_s, turn)

    def fetch_awaits(self, request: Request, byte_s: float | None, turn: EngineTurn) -> bool:
        """The request is computed elsewhere; what is loaded of it does not have to be sent, at so many seconds a
        byte."""
        if not self.parts.scheduler.running.uses_tree(request):
            return False
        match = self.parts.cache.match(request.namespace, request.tokens, request.keys)
        return self.tiering.awaits_kv(request, match, byte_s, turn)


class EngineCore:
    """See control/engine/api.py for how it is driven."""

    def __init__(self, config: InstanceConfig, former: "EngineCore | None" = None) -> None:
        """`former`: an engine that may hand over to this one; its memory and tree are this one's from now on."""
        self.config = config
        self.parts: Parts = build_parts(config) if former is None else take_over_parts(former.parts, config)
        options = config.options
        receiver = Receiver(
            Boot(config.boot),
            self.parts.pools,
            options.drain_timeout_s,
            config.evidence,
            () if former is None else former.serving.receiver.quarantined(),
        )
        silence_s = options.peer_lost_s if config.role in SERVES else options.peer_lease_s
        former_links = None if former is None else former.links
        self.links: PeerLinks = PeerLinks(config, facts_of(config), silence_s, receiver, former_links)
        self._meter = Meter(options.heartbeat_s)
        self.outflow = Outflow(config, self.parts, self.links, self._meter)
        back_writer = BackWriter(config, self.parts, self.links, self.outflow)
        self.serving: Serving = Serving(config, self.parts, self.links, receiver, back_writer)
        self.back_reader = BackReader(config, self.parts, self.links, receiver, self.outflow, self._meter)
        self._serves, self._writes = config.role in SERVES, config.role in WRITES
        self._is_draining = False
        """Nothing new is taken: to end, or to take up another role."""
        self._is_to_end = False
        """When nothing is left here; else it drains to take up another role."""
        self._change: _Change | None = None
        self._pending: list[Action] = [*self.links.farewells()]
        """What the calls since the last turn have led to."""

    @property
    def role(self) -> Role:
        return self.config.role

    def misfits(self) -> Mapping[PeerName, str]:
        return self.links.misfits()

    # ------------------------------------------------------------ driving

    def _begin(self, now: float) -> EngineTurn:
        return EngineTurn(now, self._is_draining, [])

    def handle(self, event: Event, now: float) -> None:
        turn = self._begin(now)
        match event:
            case FrameIn():
                if self._change is not None and self._change.has_left:
                    self.links.ignore()
                else:
                    self._on_frame(event, turn)
            case PeerDied():
                self.links.died(event.peer, turn)
                self._drop_peer(event.peer, FailReason.PEER_LOST, turn)
            case LinkBroken():
                self.links.table.broke(event.peer, now)
            case DrainRequested():
                self._is_to_end = self._is_draining = True
                self._tell_status(turn)  # it may end before the next heartbeat
            case StagingUsed():
                self._meter.count_staging(event)
            case PagesCopied():
                if self.parts.tiering is not None:
                    self.parts.tiering.on_copied(event)
            case EndpointOpened() | EndpointAttached() | EndpointFailed():
                self.links.on_endpoint(event, turn)
                self.serving.on_endpoint(event.peer, turn)
            case _:
                if isinstance(event, PeerFenced):
                    self.links.endpoints.on_fenced()
                self._on_report(event, turn)
        self._pending += turn.actions

    def _on_report(self, report: Event, turn: EngineTurn) -> None:
        fenced = self.outflow.on_report(report, turn)
        if fenced is not None:
            self._drop_peer(fenced, FailReason.PEER_FENCED, turn)
            self.serving.receiver.fencing(fenced)
        if self._serves:
            self.serving.on_report(report, turn)
        elif (lost := self.back_reader.on_report(report, turn)) is not None:
            self._lose(lost, turn)

    def _on_frame(self, event: FrameIn, turn: EngineTurn) -> None:
        heard = self.links.receive(event.envelope, turn)
        peer = heard.peer
        if heard.is_gone:
            self._drop_peer(peer.name, FailReason.PEER_FENCED, turn)
        if isinstance(heard.message, Hello):
            self.links.send(peer.name, self.parts.cache.snapshot(), turn)
        if self._writes:
            self.outflow.on_frame(peer, event.envelope, heard.message, turn)
            lost = None if heard.message is None else self.back_reader.on_frame(peer, heard.message, turn)
            if lost is not None:
                self._lose(lost, turn)
        if self._serves:
            self.serving.back.on_frame(peer, event.envelope, heard.message, turn)
            if heard.message is not None:
                self.serving.on_frame(peer, heard.message, turn)
        match heard.message:
            case Flush():
                self.parts.cache.clear()
                if self.parts.tiering is not None:
                    self.parts.tiering.clear()
            case ChangeRole():
                self._on_change(heard.message, turn.now)
            case AskTree():
                shape = self.parts.cache.shape(self._holders(), heard.message.max_nodes)
                self.links.send(peer.name, shape, turn)

    def _holders(self) -> Iterator[tuple[Lease, Room]]:
        """Who leases what."""
        for request in (*self.outflow.requests(), *self.serving.requests()):
            if request.lease is not None:
                yield request.lease, request.room

    def tick(self, now: float) -> None:
        if self._change is not None and self._change.has_left:
            return
        turn = self._begin(now)
        if self._meter.is_due(now):
            for peer in self.links.beat(turn):
                self.links.fence(peer.name, turn)
                self._drop_peer(peer.name, FailReason.PEER_LOST, turn)
            self.serving.hang_up_on_those_that_left(turn)
            self._tell_status(turn)
            self.serving.intake.tickets.repeat_revokes(turn)
        self.outflow.tick(turn)
        if self._serves:
            self.serving.tick(turn)
        else:
            for lost in self.back_reader.tick(turn):
                self._lose(lost, turn)
        self._pending += turn.actions

    def _tell_status(self, turn: EngineTurn) -> None:
        way = self.serving.intake.quickest_way
        status = self._meter.status(self.parts, self._backlog(), self._is_draining, way, self.metrics())
        self.links.tell_fronts(status, turn)

    def _backlog(self) -> Backlog:
        requests, granted = [*self.outflow.waiting(), *self.serving.requests()], self.serving.granted()
        return Backlog.of(requests, granted, self.config.cache.page_size, self.parts.scheduler.running.shares_prompt)

    def _lose(self, peer: PeerName, turn: EngineTurn) -> None:
        """Fence a peer and end what was under way with it."""
        self.links.fence(peer, turn)
        self._drop_peer(peer, FailReason.PEER_FENCED, turn)
        self.serving.receiver.fencing(peer)

    def _drop_peer(self, peer: PeerName, reason: FailReason, turn: EngineTurn) -> None:
        """Drop what depends on a peer whose process, or whose endpoint, has ended."""
        self.outflow.drop_peer(peer, turn)
        self.serving.drop_peer(peer, reason, turn)
        self.back_reader.drop_peer(peer, turn)

    def turn(self, now: float) -> list[Action]:
        turn, self._pending = EngineTurn(now, self._is_draining, self._pending), []
        self.parts.cache.tell_time(now)
        waiting, tiering = self.parts.scheduler.waiting, self.parts.tiering
        loads = None if tiering is None else _Loads(self.parts, tiering, self._meter.prefill_tokens_per_s)
        owner = _Owner(self.outflow, self.serving.intake, self.back_reader, loads, turn)
        for request in waiting.admit(now, owner):
            if not self.outflow.started(request, turn):
                self.serving.started(request, now)
        if self.parts.scheduler.has_displaced:
            self._queue_again(turn)
        self.serving.flush(turn)
        if tiering is not None:
            tiering.store_some(turn)
        self._go_on_changing(turn)
        if self._meter.may_publish(now):
            events = self.parts.cache.drain_events()
            if events.stored or events.evicted:
                self.links.tell_fronts(events, turn)
            if changes := self.parts.cache.drain_blocks():
                turn.actions.append(TellBlocks(changes))
        return turn.actions

    # ------------------------------------------------------------ another role

    def _on_change(self, asked: ChangeRole, now: float) -> None:
        """Asked again it changes nothing; asked for another role, that one is the next."""
        if {asked.role, self.config.role}.difference(CHANGEABLE):
            return
        if self._change is not None:
            self._change = replace(self._change, role=asked.role)
        elif asked.role is not self.config.role:
            self._change = _Change(asked.role, now + asked.grace_ms / 1000)
            self._is_draining = True

    def _go_on_changing(self, turn: EngineTurn) -> None:
        change = self._change
        if change is None or change.has_left:
            return
        if turn.now >= change.ends_rooms_at:
            self.outflow.leave_rooms(turn)
            self.serving.leave_rooms(turn)
            self.back_reader.leave(turn)
        is_idle = self.parts.scheduler.is_idle and not self.num_rooms
        if is_idle and not len(self.outflow.sender) and self.serving.receiver.is_settled:
            self._change = replace(change, has_left=True)
            self.links.leave(turn)

    def may_hand_over(self) -> bool:
        is_over = self._change is not None and self._change.has_left and not self.links.endpoints.is_fencing
        return is_over and not self._is_to_end

    def successor(self, boot: Boot) -> "EngineCore":
        assert self._change is not None and self.may_hand_over()
        configured = self.config.configured_role or self.config.role
        config = replace(self.config, role=self._change.role, boot=boot, configured_role=configured)
        return EngineCore(config, self)

    # ------------------------------------------------------------ steps

    def plan(self, now: float) -> StepPlan | None:
        plan = self.parts.scheduler.steps.plan() if self.parts.scheduler.steps.has_work() else None
        if self.parts.scheduler.has_displaced:
            turn = self._begin(now)
            self._queue_again(turn)
            self._pending += turn.actions
        return plan

    def _queue_again(self, turn: EngineTurn) -> None:
        """Requests whose memory went to somebody else: before the next event, which may ask for what they had."""
        for request in self.parts.scheduler.running.take_retracted():
            if not self.outflow.yielded(request):
                self.serving.resume(request, turn)
        for request in self.parts.scheduler.waiting.holders.take_yielded():
            self.outflow.yielded(request)  # a room of a front is matched again at its grant

    def commit(self, result: StepResult, now: float) -> None:
        turn = self._begin(now)
        progress = self.parts.scheduler.steps.commit(result)
        self._meter.count_step(result, progress)
        for item in progress.others:
            if not self.outflow.advance(item, turn):
                self.serving.advance(item, turn)
        if progress.decoded.requests:
            self.serving.decoded(progress.decoded, turn)
        self._pending += turn.actions

    # ------------------------------------------------------------ views

    @property
    def _num_tickets(self) -> int:
        return len(self.outflow.sender) + len(self.serving.receiver)

    def next_timer(self) -> float | None:
        if self._change is not None and self._change.has_left:
            return None
        return self._meter.next_timer(is_busy=bool(self.num_rooms) or len(self.serving.receiver) > 0)

    @property
    def num_rooms(self) -> int:
        return len(self.outflow) + len(self.serving.rooms)

    def leaves_cores(self) -> bool:
        running = self.parts.scheduler.running
        return running.only_decodes and self.serving.num_with_prefill() > len(running.requests)

    def transfer_active(self) -> bool:
        return self._num_tickets > 0

    def is_drained(self) -> bool:
        return self._is_to_end and not self.num_rooms and not self._num_tickets

    def metrics(self) -> dict[str, float]:
        metrics = pool_metrics(self.parts) | self._meter.metrics()
        metrics |= self.serving.metrics() if self._serves else self.outflow.metrics() | self.back_reader.metrics()
        metrics["deltaserve_tickets_open"] = self._num_tickets
        metrics["deltaserve_quarantine_age_seconds"] = self.serving.receiver.quarantine_age_s
        metrics["deltaserve_stale_frames_total"] = self.links.stale_frames
        return metrics

    def check_integrity(self) -> None:
        self.serving.receiver.check_integrity()
        self.outflow.logprobs.check_integrity()
        check_parts(self.parts, [*self.outflow.requests(), *self.serving.requests()])
