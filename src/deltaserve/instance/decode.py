"""The control plane of decode and of unified engines: rooms from Submit to Finished.

A Submit that names a prefill worker is offered to it (intake.py); one that names none is computed here. From the first
token on both are the same: rows of the scheduler until a stop id, the length, or the front ends them.
"""

from deltaserve.base.errors import FailReason
from deltaserve.base.ids import Attempt, Boot, PeerName, Room, TicketSeq
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.base.tokens import token_len
from deltaserve.instance.api import Action, DrainRequested, Event, FrameIn, InstanceConfig, LinkBroken, PeerDied
from deltaserve.instance.checks import STEP_FAILURES, Refusal, refuse_submit
from deltaserve.instance.ended import EndedAnswer
from deltaserve.instance.greeting import Greeter
from deltaserve.instance.intake import Arrived, AttemptFailed, Intake, Outcome
from deltaserve.instance.meter import Meter
from deltaserve.instance.parts import build_parts, check_parts, drain_events, facts_of, pool_metrics, snapshot_events
from deltaserve.instance.rooms import DecodeRoom, RoomBook, ToFronts
from deltaserve.peer.table import Peer
from deltaserve.request.ending import finish_of
from deltaserve.request.request import Origin
from deltaserve.request.status import DecodeEvent, DecodeState
from deltaserve.sched.plan import Sampled, StepPlan, StepResult
from deltaserve.sched.scheduler import Progress
from deltaserve.transfer.commands import (
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    Landed,
    PagesVerified,
    PeerFenced,
    TicketId,
    TransferReport,
)
from deltaserve.transfer.receiver import Heard, Receiver
from deltaserve.wire.messages import (
    CacheUse,
    Cancel,
    Drained,
    Failed,
    Finish,
    FinishReason,
    Flush,
    Hello,
    PromptLogprobs,
    Starting,
    Submit,
)

_ASKED = (DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED)
_REMOTE = (*_ASKED, DecodeState.VERIFYING)


class DecodeInstance:
    """See instance/api.py for how it is driven. Serves the roles DECODE and UNIFIED."""

    def __init__(self, config: InstanceConfig) -> None:
        self.config = config
        self.parts = build_parts(config)
        self.receiver = Receiver(Boot(config.boot), self.parts.pools, config.options.drain_timeout_s, config.evidence)
        self._out: list[Action] = []
        self.links = Greeter(config, facts_of(config), config.options.peer_lost_s, self._out)
        self._rooms = RoomBook()
        self.intake = Intake(config, self.parts, self.links, self.receiver, self._rooms, self._out)
        self._outbox = ToFronts(self.links)
        self._meter = Meter(config.options.heartbeat_s)
        self._is_draining = False

    # ------------------------------------------------------------ driving

    def handle(self, event: Event, now: float) -> None:
        match event:
            case FrameIn():
                self._on_frame(event, now)
            case PeerDied():
                self.links.died(event.peer)
                self._drop_peer(event.peer, FailReason.PEER_LOST, now)
            case LinkBroken():
                self.links.table.broke(event.peer, now)
            case DrainRequested():
                self._is_draining = True
            case _:
                self._on_report(event, now)

    def tick(self, now: float) -> None:
        if self._meter.is_due(now):
            for peer in self.links.beat(now):
                self._lose(peer.name, now, FailReason.PEER_LOST)
            open_tickets, metrics = len(self.receiver), self.metrics()
            self.links.tell_fronts(self._meter.status(self.parts, self._is_draining, open_tickets, metrics))
            self.intake.repeat_revokes()
        for name in self.receiver.overdue(now):
            self._lose(name, now)
        for room in self._rooms:
            self._tick_room(room, now)
        self._rooms.ended.expire(now)

    def _tick_room(self, room: DecodeRoom, now: float) -> None:
        if now >= room.request.deadline:
            self._fail(room, FailReason.DEADLINE, "the deadline passed", now)
        elif self.links.is_deserted(room.front, now):
            self._fail(room, FailReason.CANCELLED, "the front was lost", now)
        elif room.state in _REMOTE:
            self.intake.repeat(room, now)
            if (failed := self.intake.unanswered(room, now)) is not None:
                self._attempt_failed(room, failed.reason, failed.message, now)

    def next_timer(self) -> float | None:
        return self._meter.next_timer(is_busy=bool(self._rooms) or len(self.receiver) > 0)

    def plan(self, now: float) -> StepPlan | None:
        return self.parts.scheduler.plan() if self.parts.scheduler.has_work() else None

    def commit(self, result: StepResult, now: float) -> None:
        progress = self.parts.scheduler.commit(result)
        self._meter.count_step(result, sum(p.request.num_computed - p.computed_from for p in progress))
        for item in progress:
            room = self._rooms.of_request(item.request)
            if room is not None:
                self._advance(room, item, now)

    def turn(self, now: float) -> list[Action]:
        for request in self.parts.scheduler.take_retracted():
            room = self._rooms.of_request(request)
            if room is not None:
                self._resume(room, now)
        scheduler = self.parts.scheduler
        admitted = scheduler.admit(now)
        scheduler.take_yielded()  # they are matched again when their turn comes
        for room in filter(None, map(self._rooms.of_request, admitted)):
            room.move(DecodeEvent.RUN)
            if room.times.running is None:
                room.times.running = now
            if room.prefill is None and room.request.num_retractions == 0:
                room.decode_cached_len = room.request.num_computed
        self._outbox.flush()
        if self._meter.may_publish(now) and (events := drain_events(self.parts.cache)):
            self.links.tell_fronts(events)
        actions = list(self._out)
        self._out.clear()
        return actions

    # ------------------------------------------------------------ frames

    def _on_frame(self, event: FrameIn, now: float) -> None:
        delivery = self.links.receive(event.envelope, now)
        peer = delivery.peer
        if delivery.is_gone:
            self._drop_peer(peer.name, FailReason.PEER_FENCED, now)
        if delivery.is_greeted:
            self.links.send(peer.name, snapshot_events(self.parts.cache))
        match delivery.message:
            case Hello() as hello:
                for address in hello.peers:
                    self.links.dial(address, now)
            case Submit() as submit:
                self._on_submit(peer.name, submit, now)
            case Finish() as finish:
                self._on_finish(finish, now)
            case Flush():
                self.parts.cache.clear()
            case Cancel() as cancel:
                room = self._rooms.get(cancel.room)
                if room is not None and room.front == peer.name:
                    self._fail(room, cancel.reason, "cancelled", now)
            case None:
                pass
            case _:
                self._on_prefill_frame(peer, event, now)

    def _on_prefill_frame(self, peer: Peer, event: FrameIn, now: float) -> None:
        body = event.envelope.body
        if isinstance(body, Drained):
            self._on_drained(peer, body, now)
            return
        if not isinstance(body, Starting | Failed | PromptLogprobs):
            return
        room = self._rooms.get(body.room)
        if room is not None and room.prefill != peer.name:
            room = None
        match body:
            case Starting() if room is not None and room.state in _ASKED and body.attempt <= room.attempt:
                if body.attempt == room.attempt:
                    self.intake.started(room, body.cached_len, now)
            case Starting():  # of a room that is over, or whose attempts are counted anew
                self.links.send(peer.name, Cancel(room=body.room, reason=FailReason.CANCELLED))
            case Failed() if room is not None and body.attempt == room.attempt:
                if room.state in _ASKED:  # else everything has landed
                    self._attempt_failed(room, body.reason, body.message, now)
                if body.reason is FailReason.PEER_FENCED:
                    self._lose(peer.name, now)
            case PromptLogprobs() if room is not None:
                self._tell_prompt_logprobs(room, body.start, body.values, now)

    def _on_submit(self, front: PeerName, submit: Submit, now: float) -> None:
        if self._is_repeat(front, submit, now):
            return
        refusal = self._refusal(submit)
        if refusal is not None:
            self._outbox.refused(front, submit, *refusal)
            return
        room = self._rooms.open(front, submit, now)
        if submit.prefill is None:
            self._compute_here(room)
        else:
            self.links.dial(submit.prefill, now)
            self.intake.offer(room, PeerName(submit.prefill.name), now)

    def _is_repeat(self, front: PeerName, submit: Submit, now: float) -> bool:
        """Whether the Submit is of a room known here; then the front is told what it missed.

        A room whose output is not what the client has was opened before another worker went on with the answer: it
        ends, and is opened anew behind what the client has.
        """
        room, ended = self._rooms.get(submit.room), self._rooms.ended
        if room is None:
            if submit.epoch <= ended.epoch(Room(submit.room)):
                return True  # an old one, late
            answer = ended.answer(Room(submit.room))
            if answer is None or not answer.continues(front, submit):
                return False
            ended.asked_again(Room(submit.room), submit.epoch)
            self._outbox.repeat_ended(answer, submit)
            return True
        if room.front != front or submit.epoch <= room.epoch:
            return True
        room.epoch = submit.epoch
        if not room.has_told(submit):
            self._drop(room, now)
            return False
        self._outbox.repeat(room, token_len(submit.prompt) - submit.prompt_len)
        return True

    def _refusal(self, submit: Submit) -> Refusal | None:
        if self._is_draining:
            return FailReason.DRAINING, "decode is draining"
        if len(self._rooms) >= self.config.options.max_queued_requests + self.config.max_running_requests:
            return FailReason.OVERLOADED, "decode's queue is full"
        return refuse_submit(self.config, submit)

    def _on_finish(self, finish: Finish, now: float) -> None:
        room = self._rooms.get(finish.room)
        if room is None or not room.has_output:
            return
        room.finish_len = max(1, min(finish.output_len, room.request.output_len))
        if not self.parts.scheduler.is_in_flight(room.request):
            self._stop_at(room, room.finish_len, now)

    def _stop_at(self, room: DecodeRoom, output_len: int, now: float) -> None:
        room.request.truncate(room.request.prompt_len + output_len)
        self._complete(room, FinishReason.STOP, now)

    def _on_drained(self, peer: Peer, drained: Drained, now: float) -> None:
        ticket = self.receiver.get(TicketId(Boot(self.config.boot), peer.boot or Boot(0), TicketSeq(drained.ticket)))
        if ticket is None or ticket.peer != peer.name:
            return
        if self.receiver.drained(ticket.id, drained.outcome) is Heard.FENCE:
            self._lose(peer.name, now)
        self.intake.update_mark(peer.name)

    # ------------------------------------------------------------ transfer reports

    def _on_report(self, report: TransferReport | Event, now: float) -> None:
        outcomes: list[Outcome] = []
        match report:
            case EndpointOpened() | EndpointAttached() | EndpointFailed():
                self.links.on_endpoint(report)
                for room in self._rooms:
                    if room.prefill == report.peer:
                        self.intake.repeat(room, now)
            case Landed():
                outcomes = self.intake.landed(report, now)
            case PagesVerified():
                outcomes = self.intake.verified(report)
            case PeerFenced():
                self.intake.fenced(report.peer, report.result)
        for outcome in outcomes:
            match outcome:
                case Arrived():
                    self._arrived(outcome, now)
                case AttemptFailed():
                    self._attempt_failed(outcome.room, outcome.reason, outcome.message, now)
                    if outcome.fence is not None:
                        self._lose(outcome.fence, now)

    def _tell_prompt_logprobs(
        self, room: DecodeRoom, start: int, values: tuple[TokenLogprobs, ...], now: float
    ) -> None:
        told = room.new_prompt_logprobs(start, values)
        if told is not None:
            self.links.send(room.front, told)
        if room.arrived is not None and not room.lacks_prompt_logprobs:
            first, room.arrived = room.arrived, None
            self._arrived(Arrived(room, first), now)

    def _arrived(self, arrived: Arrived, now: float) -> None:
        """The prompt's pages are ours: share them, take the first token, queue for a row."""
        room, first = arrived.room, arrived.first
        if room.lacks_prompt_logprobs:  # they come over another connection
            room.arrived = first
            return
        request = room.request
        request.num_computed = room.attempt_len
        room.prefill_cached_len = max(room.prefill_cached_len, first.cached_len)
        room.move(DecodeEvent.QUEUE)
        self.parts.scheduler.share_computed(request)
        request.append(first.token)
        self._on_token(room, Sampled(first.token, first.logprobs), now)
        if room.room in self._rooms:
            self.parts.scheduler.add_landed(request)

    # ------------------------------------------------------------ progress

    def _advance(self, room: DecodeRoom, progress: Progress, now: float) -> None:
        failure = STEP_FAILURES.get(progress.outcome)
        if failure is not None:
            room.request.cache = CacheUse.BYPASS  # whatever it computed last is not to be trusted
            self._fail(room, *failure, now)
            return
        if progress.prompt_logprobs:
            self._tell_prompt_logprobs(room, progress.computed_from + 1, progress.prompt_logprobs, now)
        if progress.request.num_computed - progress.computed_from > 1:
            self.parts.scheduler.share_computed(room.request)
        if progress.sampled is not None:
            self._on_token(room, progress.sampled, now)
        if room.finish_len is not None and room.room in self._rooms:
            self._stop_at(room, room.finish_len, now)

    def _on_token(self, room: DecodeRoom, sampled: Sampled, now: float) -> None:
        """The request's newest token: tell the front, end the request if it ends it."""
        self._outbox.token(room, sampled, now)
        finish = finish_of(room.request.sampling, room.request.output_len, sampled.token)
        if finish is not None and room.finish_len is None:
            self._complete(room, finish, now)

    def _compute_here(self, room: DecodeRoom) -> None:
        room.prefill = None
        room.move(DecodeEvent.QUEUE)
        room.request.origin = Origin.COMPUTED
        self.parts.scheduler.add(room.request)

    def _resume(self, room: DecodeRoom, now: float) -> None:
        """After a retraction: extend a short missing suffix here, fetch a long one by a new attempt."""
        room.move(DecodeEvent.RETRACT)
        request, prefill = room.request, room.submit.prefill
        match = self.parts.cache.match(request.namespace, bytes(request.tokens), bytes(request.keys))
        missing = request.num_tokens - match.num_tokens
        near = missing <= self.config.options.decode_extend_tokens
        if prefill is None or near or not self.links.is_ready(PeerName(prefill.name)):
            self._compute_here(room)
            return
        room.attempt = Attempt(room.attempt + 1)
        room.move(DecodeEvent.OFFER)
        self.intake.offer(room, PeerName(prefill.name), now)

    # ------------------------------------------------------------ endings

    def _attempt_failed(self, room: DecodeRoom, reason: FailReason, message: str, now: float) -> None:
        """Before the first token the front may try elsewhere; after it this worker computes the rest itself."""
        if room.state not in _REMOTE:
            return
        if not room.has_output:
            self._fail(room, reason, message, now)
            return
        self.intake.withdraw(room, reason, now)
        self.parts.scheduler.discard(room.request)
        room.move(DecodeEvent.LOCAL)
        room.attempt = Attempt(room.attempt + 1)
        self._compute_here(room)

    def _lose(self, peer: PeerName, now: float, reason: FailReason = FailReason.PEER_FENCED) -> None:
        """Fence a peer and fail what was under way with it. PEER_LOST: it is not there, a retry must go elsewhere."""
        self.links.fence(peer)
        self._drop_peer(peer, reason, now)

    def _drop_peer(self, peer: PeerName, reason: FailReason, now: float) -> None:
        """Its life, or its endpoint's, is over. A front's rooms end, prefill's attempts fail."""
        for room in self._rooms:
            if room.prefill == peer and room.state in _REMOTE:
                self._attempt_failed(room, reason, "the link to the prefill worker ended", now)
            elif room.front == peer:
                self._fail(room, FailReason.CANCELLED, "the front was lost", now)

    def _complete(self, room: DecodeRoom, finish: FinishReason, now: float) -> None:
        answer = self._outbox.finished(room, finish, now)
        if room.state in _REMOTE:  # a resumed room, ended by a stop string
            self.intake.withdraw(room, FailReason.CANCELLED, now)
        self._end(room, now, answer)

    def _fail(self, room: DecodeRoom, reason: FailReason, message: str, now: float) -> None:
        self._outbox.failed(room, reason, message, now)
        self._drop(room, now, reason)

    def _drop(self, room: DecodeRoom, now: float, reason: FailReason = FailReason.CANCELLED) -> None:
        """End a room without a word to its front."""
        if room.state in _REMOTE:
            self.intake.withdraw(room, reason, now)
        self._end(room, now, None)

    def _end(self, room: DecodeRoom, now: float, answer: EndedAnswer | None) -> None:
        """Everything the room held goes back; what was computed stays in the tree."""
        room.move(DecodeEvent.END)
        self.parts.scheduler.finish(room.request)
        self._rooms.close(room, now, answer)

    # ------------------------------------------------------------ views

    def transfer_active(self) -> bool:
        return len(self.receiver) > 0

    def is_drained(self) -> bool:
        return self._is_draining and not self._rooms and len(self.receiver) == 0

    def metrics(self) -> dict[str, float]:
        metrics = pool_metrics(self.parts) | self._meter.metrics() | self.intake.metrics()
        metrics["deltaserve_tickets_open"] = len(self.receiver)
        metrics["deltaserve_late_dones_total"] = self.receiver.late_dones
        metrics["deltaserve_quarantine_age_seconds"] = self.receiver.quarantine_age_s
        metrics["deltaserve_stale_frames_total"] = self.links.stale_frames
        return metrics

    def check_integrity(self) -> None:
        self.receiver.check_integrity()
        check_parts(self.parts, [room.request for room in self._rooms])
