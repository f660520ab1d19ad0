"""FrontCore: the front's whole control plane. Samples go in, deltas come out; workers do the rest.

submit -> [Submit to decode] -> Tokens* -> Finished            exactly one end per room: a delta with `finish`, or Fail
                    \\-> Finished(retryable), a gap, a new connection, a worker's death -> Submit again

Every Submit carries what was delivered and a number, and only answers to the last one count: whichever worker goes on,
it goes on behind what the client has.
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from deltaserve.control.front.balance import POLICIES, Choice
from deltaserve.control.front.client import EngineStats, Generation, Limits, OutputDelta, RoleAnswer, UnknownWorker
from deltaserve.control.front.events import Deliver, Fail, FlushAsked, FrontAction, FrontConfig, FrontEvent, WorkerUp
from deltaserve.control.front.placing import Placer
from deltaserve.control.front.retry import Cause, Remedy, blame, cause_of, told, waits_for_workers
from deltaserve.control.front.streams import Echoes, KeyedSample, LiveRoom, RoomEvent, Rooms, RoomState, Strays, unseen
from deltaserve.control.front.workers import Worker, Workers
from deltaserve.control.peer.link import FrameIn, LinkBroken, PeerDied
from deltaserve.core.errors import ConfigError, DeadlineTooShort, FailReason, IntegrityError, RequestFailed
from deltaserve.core.ids import PeerName, Role, Room
from deltaserve.core.keys import PromptKeys, seed_key
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32, token_len, unpack_u32
from deltaserve.core.wire.messages import (
    Cancel,
    ChangeRole,
    Envelope,
    Events,
    Finish,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    PromptLogprobs,
    Status,
    Submit,
    TokenRun,
    Tokens,
    Usage,
)

_REST_S = 1.0
"""Pause before a room goes to a worker that others do not reach, or that was leaving: the front may learn of it
later."""
_AT_ONCE = frozenset({Cause.DECODE, Cause.SILENT, Cause.GAP})
"""Causes that say nothing of the workers that are left."""


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
        self.placer = Placer(config, self.workers)
        self.rooms = Rooms()
        self._echoes = Echoes(config.echo_s)
        self._strays = Strays()
        self._is_draining = False
        self.counts: Counter[str] = Counter()
        """submitted, finished, resumed, retried_<cause>, failed_<reason>, refused_<reason>: since the start."""

    # ------------------------------------------------------------ driving

    def start(self, now: float) -> list[FrontAction]:
        """Dial every worker. Call once, first."""
        self.workers.start(now)
        return self._flush()

    def handle(self, event: FrontEvent, now: float) -> list[FrontAction]:
        """A frame, or the news that a worker's process ended or listens."""
        match event:
            case WorkerUp(member):
                self.workers.register(member, now)
            case FlushAsked():
                self.workers.flush()
            case PeerDied(peer):
                worker = self.workers.get(peer)
                if worker is not None:
                    self.workers.died(worker, now)
                    self._strays.take(worker.name)
                    self._on_gone(worker, Cause.DECODE, now)
            case LinkBroken(peer):
                self.workers.broke(peer, now)
            case FrameIn(envelope):
                self._on_frame(envelope, now)
        return self._flush()

    def tick(self, now: float) -> list[FrontAction]:
        """Do what is due: heartbeats, losses of workers, deadlines, repeats."""
        for worker in self.workers.beat(now):
            # A process that ends closes its connection; one that is stopped or cut off is silent.
            cause = Cause.SILENT if worker.peer.broken_since is None else Cause.DECODE
            self.workers.lose(worker, now)
            for live in self.rooms.on(worker.name):
                self._strays.left(worker.name, live.room)
            self._on_gone(worker, cause, now)
        for live in self.rooms.overdue(now):
            self._cancel_at_decode(live, FailReason.DEADLINE, now)
            self._end(live, FailReason.DEADLINE, f"no complete answer after {live.deadline - live.submitted_at:g} s")
        for live in self.rooms:
            if live.placement is not None and live.may_be_lost(now, self._config.repeat_s):
                live.num_repeats += 1
                self._resume(live, now)
        self._place_waiting(now)
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
            self._submit_to_decode(live, now)
        return self._flush()

    def cancel(self, room: Room, reason: FailReason, now: float) -> list[FrontAction]:
        """End a room on every side. A room that is over is left alone."""
        live = self.rooms.get(room)
        if live is not None:
            self._cancel_at_decode(live, reason, now)
            self._end(live, reason, f"ended by the front: {reason.name.lower()}")
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
        if live.state is not RoomState.FINISHING:
            self.rooms.move(live, RoomEvent.FINISH)
            self._to_decode(live, Finish(room=room, output_len=output_len))
            live.num_repeats = 0
            if live.placement is None:  # no worker has anything left to tell
                self._complete(live, FinishReason.STOP, live.own_usage())
        return self._flush()

    def change_role(self, name: PeerName, role: Role, grace_s: float) -> tuple[RoleAnswer, list[FrontAction]]:
        """A worker is to take up another role. Raises UnknownWorker, RoleRefused."""
        worker = self.workers.get(name)
        if worker is None:
            raise UnknownWorker(f"no worker {name[:80]!r} here, but: {', '.join(w.name for w in self.workers)}")
        answer = self.workers.change_role(worker, ChangeRole(role=role, grace_ms=int(1000 * grace_s)))
        return answer, self._flush()

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

        def seed(page_size: int) -> bytes:
            return seed_key(config.cluster_secret, config.fingerprint, page_size, generation.namespace)

        sample = KeyedSample(generation, PromptKeys(seed, generation.prompt))
        deadline = now + generation.deadline_s
        if self.workers.shortage() is not None:
            self.placer.check_held(sample, now)
            return LiveRoom(sample, deadline, now, None, unplaced_since=now)
        choice = self.placer.choose(sample, now)
        wait_s = choice.estimate.sure_wait_s
        if wait_s > generation.deadline_s:
            raise DeadlineTooShort(generation.deadline_s, wait_s)
        placement = self.placer.place(sample, choice, now)
        return LiveRoom(sample, deadline, now, placement)

    # ------------------------------------------------------------ the workers' side

    def _on_frame(self, envelope: Envelope, now: float) -> None:
        heard = self.workers.receive(envelope, now)
        if heard is None:
            return
        if heard.is_gone:
            self._strays.take(heard.worker.name)
            self._on_gone(heard.worker, Cause.DECODE, now)
        if heard.is_back:
            self._on_back(heard.worker, now)
        if heard.message is not None:
            self._on_message(heard.worker, heard.message, now)
        if isinstance(envelope.body, Hello) and heard.worker.is_ready:
            self._cancel_strays(heard.worker, now)
        if isinstance(envelope.body, Hello | Status):
            self._place_waiting(now)

    def _on_message(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Status():
                self.workers.on_status(worker, message, now)
            case Events():
                if not self.placer.residency.apply(worker.name, message):
                    self.workers.ask_snapshot(worker, now)
            case Tokens():
                for run in message.runs:
                    self._on_tokens(worker, run, now)
            case PromptLogprobs():
                self._on_prompt_logprobs(worker, message, now)
            case Finished():
                self._on_finished(worker, message, now)
            case _:
                self.counts["unexpected_messages"] += not isinstance(message, Heartbeat)

    def _on_tokens(self, worker: Worker, run: TokenRun, now: float) -> None:
        live = self._live(worker, Room(run.room), now)
        if live is None or live.state is RoomState.FINISHING or run.epoch != live.epoch:
            return
        live.heard(now)
        num_tokens, rest = divmod(len(run.tokens), TOKEN_BYTES)
        if rest or run.start < 0 or (run.logprobs and len(run.logprobs) != num_tokens):
            self._give_up(live, FailReason.INTERNAL, "malformed tokens from decode", now)
            return
        if run.start > live.num_tokens:  # frames were lost with the connection that carried them
            self._resume(live, now)
            return
        tokens = unpack_u32(run.tokens)
        if live.contradicts(run.start, tokens):
            self._give_up(live, FailReason.INTERNAL, "decode took back tokens that were delivered", now)
            return
        num_known = live.num_tokens - run.start
        if len(tokens) > num_known:
            self._take_tokens(live, tokens[num_known:], run.logprobs[num_known:], run.usage, now)

    def _take_tokens(
        self,
        live: LiveRoom,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
        usage: Usage | None,
        now: float,
    ) -> None:
        """The next ones, at least one."""
        if live.state is RoomState.WAITING:
            live.first_token_s = now - live.submitted_at
        if live.is_computing and live.placement is not None:
            self.placer.succeeded(live.placement)
        self._release_prefill(live)
        self.rooms.move(live, RoomEvent.TOKENS)
        live.retries.progressed()
        live.output += tokens
        usage = None if usage is None else live.timed(usage)
        live.held.append(OutputDelta(tokens=tuple(tokens), logprobs=logprobs, usage=usage))
        self._deliver_held(live)

    def _deliver_held(self, live: LiveRoom) -> None:
        """Tokens go out when the prompt's logprobs are complete: those take another way and may come later."""
        if live.has_prompt_logprobs:
            self._out.extend(Deliver(live.room, delta) for delta in live.held)
            live.held.clear()

    def _on_prompt_logprobs(self, worker: Worker, message: PromptLogprobs, now: float) -> None:
        live = self._live(worker, Room(message.room), now)
        if live is None or live.state is RoomState.FINISHING:
            return
        live.heard(now)
        values = unseen(live.num_prompt_logprobs, message.start, message.values)
        if values is None:
            self._start_over(live, f"prompt logprobs {live.num_prompt_logprobs} .. {message.start - 1} never came", now)
        elif values:
            live.num_prompt_logprobs += len(values)
            self._out.append(Deliver(live.room, OutputDelta(prompt_logprobs=tuple(values))))
            self._deliver_held(live)

    def _on_finished(self, worker: Worker, message: Finished, now: float) -> None:
        live = self.rooms.get(Room(message.room))
        if live is None or live.placement is None or live.placement.decode != worker.name:
            return  # over there and here
        if message.epoch != live.epoch:
            return
        live.heard(now)
        usage = live.timed(message.usage)
        if live.state is RoomState.FINISHING:
            self._complete(live, message.finish or FinishReason.STOP, usage)
        elif message.finish is None:
            self._on_failed(live, message, now)
        elif usage.output_len > live.num_tokens:
            self._resume(live, now)  # decode tells the rest again
        elif not live.has_prompt_logprobs:
            self._start_over(live, f"prompt logprobs from {live.num_prompt_logprobs} on never came", now)
        else:
            self.placer.succeeded(live.placement)
            self._complete(live, message.finish, usage)

    def _on_failed(self, live: LiveRoom, message: Finished, now: float) -> None:
        reason = message.reason or FailReason.INTERNAL
        half = blame(reason)
        if half is not None and live.placement is not None:
            self.placer.failed(live.placement, half, now)
        cause = cause_of(reason, message.retryable)
        if cause is None or not self._retry(live, cause, now):
            self._end(live, told(reason), message.message or reason.value)

    def _on_gone(self, worker: Worker, cause: Cause, now: float) -> None:
        """What a lost decode worker had goes elsewhere. A lost prefill worker is decode's matter."""
        self.placer.residency.forget(worker.name)
        for live in self.rooms.on(worker.name):
            if not self._retry(live, cause, now):
                text = "the workers that computed it ended, one after the other, without a token between them"
                self._end(live, FailReason.PEER_LOST, text)

    def _on_back(self, worker: Worker, now: float) -> None:
        """The connection to it was interrupted: whatever was said in the meantime is asked for again."""
        for live in self.rooms.on(worker.name):
            self._resume(live, now)

    # ------------------------------------------------------------ one room

    def _retry(self, live: LiveRoom, cause: Cause, now: float) -> bool:
        """Whether the room goes on: submitted again, waiting for a worker, or complete as it is."""
        placement = live.placement
        if self._is_complete(live):
            return True
        remedy = live.retries.next(cause, live.is_started)
        if remedy is Remedy.GIVE_UP or placement is None:
            return False
        if cause is Cause.NUMERICAL:
            live.sample = live.sample.alone()
        choice = None
        try:
            if remedy is not Remedy.LATER:
                choice = self.placer.choose_next(live.sample, placement, remedy, now)
        except RequestFailed:
            if not waits_for_workers(cause, live.is_started):
                return False  # the client is told of the failure itself
        self.counts[f"retried_{cause.value}"] += 1
        self._unplace(live, now)
        if choice is None:
            live.rests_until = now if cause in _AT_ONCE else now + _REST_S
        else:
            self._place(live, choice, now)
        return True

    def _place_waiting(self, now: float) -> None:
        """Rooms between workers go where there are some again."""
        if not self.rooms.unplaced or self.workers.shortage() is not None:
            return
        for live in list(self.rooms.unplaced.values()):
            if now < live.rests_until:
                continue
            try:
                choice = self.placer.choose(live.sample, now)
            except RequestFailed:
                continue  # whoever is there is too small for it
            self._place(live, choice, now)

    def _place(self, live: LiveRoom, choice: Choice, now: float) -> None:
        live.place(self.placer.place(live.sample, choice, now), now)
        self.rooms.unplaced.pop(live.room, None)
        self.rooms.move(live, RoomEvent.RESUBMIT)
        self._submit_to_decode(live, now)

    def _unplace(self, live: LiveRoom, now: float) -> None:
        """Give back the room's place; output that it was not delivered is generated anew elsewhere."""
        self._release(live)
        live.unplace(now)
        live.forget_held()
        self.rooms.unplaced[live.room] = live

    def _resume(self, live: LiveRoom, now: float) -> None:
        """Ask decode to go on behind what came: it may have said more that was lost, or may never have heard of it."""
        if live.state is RoomState.FINISHING:  # the client has all it wants
            self._cancel_at_decode(live, FailReason.CANCELLED, now)
        if not self._is_complete(live):
            self.counts["resumed"] += 1
            self._submit_to_decode(live, now)

    def _is_complete(self, live: LiveRoom) -> bool:
        """Whether the client has all there is: then the room ends, though decode's Finished did not come."""
        finish = FinishReason.STOP if live.state is RoomState.FINISHING else live.finish
        if finish is not None:
            self._complete(live, finish, live.own_usage())
        return finish is not None

    def _submit_to_decode(self, live: LiveRoom, now: float) -> None:
        assert live.placement is not None  # whoever submits has placed it
        decode = self.workers.get(live.placement.decode)
        assert decode is not None  # workers are never removed from the registry
        generation, prefill = live.sample.generation, live.placement.prefill
        sampling = generation.sampling
        if live.has_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        live.epoch += 1
        submit = Submit(
            room=live.room,
            epoch=live.epoch,
            prompt=generation.prompt + pack_u32(live.output),
            prompt_len=live.prompt_len,
            keys=live.sample.keys.of(decode.facts.page_size),
            namespace=generation.namespace,
            sampling=sampling,
            prefill=None if prefill is None else self.workers.address(prefill),
            remaining_ms=max(1, math.ceil(1000 * (live.deadline - now))),
            cache=generation.cache,
            local_len=live.placement.local_len,
        )
        self._to_decode(live, submit)
        live.quiet_since = now

    def _to_decode(self, live: LiveRoom, message: Message) -> None:
        worker = None if live.placement is None else self.workers.get(live.placement.decode)
        if worker is not None and worker.is_ready:
            self.workers.send(worker, message)

    def _cancel_at_decode(self, live: LiveRoom, reason: FailReason, now: float) -> None:
        worker = None if live.placement is None else self.workers.get(live.placement.decode)
        if worker is None:
            return
        if worker.is_ready:
            self._echoes.cancelled(worker.name, live.room, now)
            self.workers.send(worker, Cancel(room=live.room, reason=reason))
        else:
            self._strays.left(worker.name, live.room)

    def _cancel_strays(self, worker: Worker, now: float) -> None:
        """A worker that is back in the same life, and still has rooms that have ended or gone elsewhere."""
        for room in self._strays.take(worker.name):
            live = self.rooms.get(room)
            if live is None or live.placement is None or live.placement.decode != worker.name:
                self._echoes.cancelled(worker.name, room, now)
                self.workers.send(worker, Cancel(room=room, reason=FailReason.CANCELLED))

    def _live(self, worker: Worker, room: Room, now: float) -> LiveRoom | None:
        """The room, if this worker has it. A worker that talks about a room it has not is told so, now and then."""
        live = self.rooms.get(room)
        if live is not None and live.placement is not None and live.placement.decode == worker.name:
            return live
        if self._echoes.may_cancel(worker.name, room, now):
            self._echoes.cancelled(worker.name, room, now)
            self.workers.send(worker, Cancel(room=room, reason=FailReason.CANCELLED))
        return None

    def _start_over(self, live: LiveRoom, text: str, now: float) -> None:
        """Prompt logprobs were lost, which nobody tells again: nothing was delivered behind them."""
        self._cancel_at_decode(live, FailReason.CANCELLED, now)
        if not self._retry(live, Cause.GAP, now):
            self._end(live, FailReason.PEER_LOST, text)

    def _give_up(self, live: LiveRoom, reason: FailReason, text: str, now: float) -> None:
        self._cancel_at_decode(live, reason, now)
        self._end(live, reason, text)

    def _end(self, live: LiveRoom, reason: FailReason, text: str) -> None:
        """The room fails; but a client that has all it wants is not told of it."""
        if live.state is RoomState.FINISHING and reason is not FailReason.CANCELLED:
            self._complete(live, FinishReason.STOP, live.own_usage())
            return
        self._remove(live)
        self.counts[f"failed_{reason.value}"] += 1
        self._out.append(Fail(live.room, RequestFailed(reason, text)))

    def _complete(self, live: LiveRoom, finish: FinishReason, usage: Usage) -> None:
        self._remove(live)
        self.counts["finished"] += 1
        self._out.append(Deliver(live.room, OutputDelta(finish=finish, usage=usage)))

    def _remove(self, live: LiveRoom) -> None:
        self._release(live)
        self.rooms.remove(live)

    def _release(self, live: LiveRoom) -> None:
        """Free the room's place on its workers."""
        if live.placement is not None:
            self._release_prefill(live)
            self.placer.release_decode(live.placement, live.num_tokens)

    def _release_prefill(self, live: LiveRoom) -> None:
        """The prompt is computed, or needs not be any more."""
        if live.is_computing and live.placement is not None:
            self.placer.release_prefill(live.placement)
        live.is_computing = False

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
