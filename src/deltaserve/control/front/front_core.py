"""FrontCore: the front's whole control plane. Samples go in, deltas come out; workers do the rest.

submit -> [Submit to decode] -> Tokens* -> Finished            exactly one end per room: a delta with `finish`, or Fail
                    \\-> Finished(retryable), a gap, a new connection, a worker's death -> Submit again

Every Submit carries what was delivered and a number, and only answers to the last one count: whichever worker goes on,
it goes on behind what the client has.
"""

from collections import Counter

from deltaserve.control.front.balance import POLICIES
from deltaserve.control.front.client import EngineStats, Generation, Limits, RoleAnswer, UnknownWorker, WorkerTree
from deltaserve.control.front.events import (
    FlushAsked,
    FrontAction,
    FrontConfig,
    FrontEvent,
    TreesTold,
    WorkerLeaves,
    WorkerUp,
)
from deltaserve.control.front.half_placing import HalfPlacer
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.lifecycle import Lifecycle
from deltaserve.control.front.placing import Placer
from deltaserve.control.front.retry import Cause
from deltaserve.control.front.streams import KeyedSample, LiveRoom, Rooms
from deltaserve.control.front.tree_looks import TreeLooks
from deltaserve.control.front.workers import Workers
from deltaserve.control.peer.link import FrameIn, LinkBroken, PeerDied
from deltaserve.core.errors import ConfigError, DeadlineTooShort, FailReason, IntegrityError, RequestFailed
from deltaserve.core.ids import PeerName, Role, Room
from deltaserve.core.keys import PromptKeys, seed_key
from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import (
    ChangeRole,
    Envelope,
    Events,
    Finished,
    Heartbeat,
    Hello,
    Message,
    PromptLogprobs,
    Status,
    Tokens,
    TreeShape,
)


class FrontCore:
    """One front. Every method that takes `now` returns the actions to perform, in order."""

    def __init__(self, config: FrontConfig) -> None:
        """Raises ConfigError for an unknown load balance method or two workers of one name."""
        if config.load_balance_method not in POLICIES:
            raise ConfigError(f"load_balance_method: {config.load_balance_method!r}, allowed: {', '.join(POLICIES)}")
        if len({member.name for member in config.workers}) < len(config.workers):
            raise ConfigError("two workers have the same name")
        self._config = config
        self._out: list[FrontAction] = []
        self.workers = Workers(config, self._out.append)
        self.placer = (Placer if config.half is None else HalfPlacer)(config, self.workers)
        self.rooms = Rooms()
        self.counts: Counter[str] = Counter()
        """submitted, finished, resumed, without_prefill, retried_<cause>, failed_<reason>, refused_<reason>: since the
        start."""
        self._lifecycle = Lifecycle(config, self.workers, self.placer, self.rooms, self.counts, self._out.append)
        self._looks = TreeLooks(self.workers)
        self._is_draining = False
        is_watching = config.half is Role.PREFILL
        self._awaited = "no decode worker has had its pages" if is_watching else "no complete answer"

    # ------------------------------------------------------------ driving

    def start(self, now: float) -> list[FrontAction]:
        """Dial every worker. Call once, first."""
        self.workers.start(now)
        return self._flush()

    def handle(self, event: FrontEvent, now: float) -> list[FrontAction]:
        """A frame, or the news that a worker's process ended or listens, or that it is to leave."""
        match event:
            case WorkerUp(member):
                self.workers.register(member, now)
            case WorkerLeaves(name, grace_s):
                worker = self.workers.get(name)
                if worker is not None:
                    self.workers.leave(worker, grace_s, now)
                    self._lifecycle.see_off(now)
            case FlushAsked():
                self.workers.flush()
            case PeerDied(peer):
                worker = self.workers.get(peer)
                if worker is not None:
                    self.workers.died(worker, now)
                    self._lifecycle.ended(worker, now)
            case LinkBroken(peer):
                self.workers.table.broke(peer, now)
            case FrameIn(envelope):
                self._on_frame(envelope, now)
        return self._flush()

    def tick(self, now: float) -> list[FrontAction]:
        """Do what is due: heartbeats, losses of workers, deadlines, repeats."""
        for worker in self.workers.beat(now):
            # A process that ends closes its connection; one that is stopped or cut off is silent.
            cause = Cause.SILENT if worker.peer.broken_since is None else Cause.DECODE
            self.workers.lose(worker, now)
            self._lifecycle.unreachable(worker, cause, now)
        for live in self.rooms.overdue(now):
            text = f"{self._awaited} after {live.deadline - live.submitted_at:g} s"
            self._lifecycle.give_up(live, FailReason.DEADLINE, text, now)
        for live in self.rooms:
            if live.placement is not None and live.may_be_lost(now, self._config.repeat_s):
                live.num_repeats += 1
                self._lifecycle.resume(live, now)
        self._lifecycle.place_waiting(now)
        self._lifecycle.end_unmet(now)
        self._lifecycle.see_off(now)
        return self._flush()

    def next_timer(self) -> float:
        """When tick() is wanted at the latest."""
        deadline = self.rooms.next_deadline()
        beat = self.workers.next_timer()
        return beat if deadline is None else min(beat, deadline)

    def _flush(self) -> list[FrontAction]:
        actions, self._out[:] = list(self._out), []
        return actions

    # ------------------------------------------------------------ the client's side

    def submit(self, generation: Generation, now: float) -> list[FrontAction]:
        """Take a sample. Raises RequestFailed: DRAINING, ROOM_IN_USE, OVERLOADED, NO_PEER, TOO_LONG."""
        try:
            live = self._admit(generation, now)
        except RequestFailed as error:
            self.counts[f"refused_{error.reason.value}"] += 1
            raise
        self.rooms.add(live)
        self.counts["submitted"] += 1
        if live.placement is None:
            self.rooms.unplaced[live.room] = live
        else:
            self._lifecycle.submit(live, now)
        return self._flush()

    def cancel(self, room: Room, reason: FailReason, now: float) -> list[FrontAction]:
        """End a room on every side. A room that is over is left alone."""
        live = self.rooms.get(room)
        if live is not None:
            self._lifecycle.give_up(live, reason, f"ended by the front: {reason.name.lower()}", now)
        return self._flush()

    def finish(self, room: Room, output_len: int) -> list[FrontAction]:
        """A stop string was found: decode keeps `output_len` tokens and ends the room. No further tokens are delivered.

        A room that is over is left alone. Raises ValueError when more is to be kept than was delivered.
        """
        live = self.rooms.get(room)
        if live is None:
            return []
        if not 0 <= output_len <= live.num_tokens:
            raise ValueError(f"keep {output_len} of {live.num_tokens} tokens")
        self._lifecycle.finish(live, output_len)
        return self._flush()

    def change_role(self, name: PeerName, role: Role, grace_s: float) -> tuple[RoleAnswer, list[FrontAction]]:
        """A worker is to take up another role. Raises UnknownWorker, RoleRefused."""
        answer = self.workers.change_role(self.known(name), ChangeRole(role=role, grace_ms=int(1000 * grace_s)))
        return answer, self._flush()

    def known(self, name: PeerName) -> Worker:
        """The worker of that name. Raises UnknownWorker."""
        worker = self.workers.get(name)
        if worker is None:
            raise UnknownWorker(f"no worker {name[:80]!r} here, but: {', '.join(w.name for w in self.workers)}")
        return worker

    def ask_trees(self, now: float) -> list[FrontAction]:
        """Somebody looks at what the trees hold. TreesTold follows when all have answered, at once where none is
        asked."""
        self._looks.ask(now)
        if not self._looks.is_owed:
            self._out.append(TreesTold())
        return self._flush()

    def trees(self, now: float) -> tuple[WorkerTree, ...]:
        """What those workers told last that are there."""
        return self._looks.trees(now)

    def drain(self) -> None:
        """Take no more samples; those on their way end as they would."""
        self._is_draining = True

    def is_drained(self) -> bool:
        return self._is_draining and not len(self.rooms)

    def _admit(self, generation: Generation, now: float) -> LiveRoom:
        config, prompt_len = self._config, token_len(generation.prompt)
        if self._is_draining:
            raise RequestFailed(FailReason.DRAINING, "the server is shutting down")
        if self.rooms.get(generation.room) is not None:
            raise RequestFailed(FailReason.ROOM_IN_USE, "a request with this room is active")
        if len(self.rooms) >= config.max_rooms:
            raise RequestFailed(FailReason.OVERLOADED, f"{config.max_rooms} requests are active")
        if self.rooms.num_waiting_tokens + prompt_len > config.max_waiting_tokens:
            raise RequestFailed(FailReason.OVERLOADED, f"{config.max_waiting_tokens} prompt tokens are waiting")
        refusal = self.workers.refusal(now)
        if refusal is not None:
            raise RequestFailed(FailReason.NO_PEER, refusal)

        def seed(fingerprint: str, page_size: int) -> bytes:
            return seed_key(config.cluster_secret, fingerprint, page_size, generation.namespace)

        sample = KeyedSample(generation, PromptKeys(seed, generation.prompt))
        deadline = now + generation.deadline_s
        if not self._is_met(generation, now):
            return LiveRoom(sample, deadline, now, None, unplaced_since=now)
        shortage = self.workers.shortage()
        if shortage is not None:
            if config.half is not None:  # whoever chose the pair is told at once, and may choose another
                raise RequestFailed(FailReason.NO_PEER, shortage)
            self.placer.check_held(sample, now)
            return LiveRoom(sample, deadline, now, None, unplaced_since=now)
        choice = self.placer.choose(sample, now)
        wait_s = choice.estimate.sure_wait_s
        if wait_s > generation.deadline_s:
            raise DeadlineTooShort(generation.deadline_s, wait_s)
        placement = self.placer.place(sample, choice, now)
        return LiveRoom(sample, deadline, now, placement)

    def _is_met(self, generation: Generation, now: float) -> bool:
        """Whether the prefill worker that the sample names, if it names one, takes rooms. Raises RequestFailed."""
        if generation.prefill is None:
            return True
        try:
            self.workers.meet(generation.prefill, now)
        except ValueError as error:
            raise RequestFailed(FailReason.NO_PEER, str(error)) from error
        worker = self.workers.get(PeerName(generation.prefill.name))
        return worker is not None and worker.takes_rooms

    # ------------------------------------------------------------ the workers' side

    def _on_frame(self, envelope: Envelope, now: float) -> None:
        heard = self.workers.receive(envelope, now)
        if heard is None:
            return
        if heard.is_gone:
            self._lifecycle.ended(heard.worker, now)
        if heard.is_back:
            self._lifecycle.back(heard.worker, now)
        if heard.message is not None:
            self._on_message(heard.worker, heard.message, now)
        if isinstance(envelope.body, Hello) and heard.worker.is_ready:
            self._lifecycle.cancel_strays(heard.worker, now)
        if isinstance(envelope.body, Hello | Status):
            self._lifecycle.place_waiting(now)

    def _on_message(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Status():
                self.workers.on_status(worker, message, now)
            case Events():
                if not self.placer.residency.apply(worker.name, message):
                    self.workers.ask_snapshot(worker, now)
            case Tokens():
                for run in message.runs:
                    self._lifecycle.on_tokens(worker, run, now)
                if message.next is not None:
                    self._lifecycle.on_next_tokens(worker, message.next, now)
            case PromptLogprobs():
                self._lifecycle.on_prompt_logprobs(worker, message, now)
            case Finished():
                self._lifecycle.on_finished(worker, message, now)
            case TreeShape():
                if self._looks.tell(worker, message, now):
                    self._out.append(TreesTold())
            case _:
                self.counts["unexpected_messages"] += not isinstance(message, Heartbeat)

    # ------------------------------------------------------------ questions

    def ready(self) -> str | None:
        """None when a request admitted now would be served, else the reason, in words."""
        return "the server is shutting down" if self._is_draining else self.workers.shortage()

    def doubt(self, now: float) -> str | None:
        """Why a request admitted now may well fail although it would be tried; None where nothing is known."""
        return self.placer.left_alone(now)

    def refusal(self, now: float) -> str | None:
        """None when a request is taken now, to be served or to wait for a worker that comes back; else the reason."""
        return "the server is shutting down" if self._is_draining else self.workers.refusal(now)

    def limits(self, now: float) -> Limits | None:
        """What the workers that take rooms, now or soon, can hold; None while there is no pair."""
        return None if self.workers.refusal(now) else self.placer.limits(now)

    def stats(self) -> EngineStats:
        """Figures about workers, rooms and counts."""
        return EngineStats(
            rooms=len(self.rooms),
            rooms_without_worker=len(self.rooms.unplaced),
            waiting_tokens=self.rooms.num_waiting_tokens,
            draining=self._is_draining,
            stale_frames=self.workers.num_stale_frames,
            counts=dict(self.counts),
            workers=tuple(map(self.placer.stats_of, self.workers)),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when two counts disagree."""
        self.rooms.check_integrity()
        self.placer.check_integrity(self.rooms)
        if self._out:
            raise IntegrityError(f"{len(self._out)} actions were never performed")
