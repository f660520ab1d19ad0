"""Serving requests: rooms of fronts, from Submit to Finished.

A Submit that names a prefill worker is offered to it (intake.py); one that names none is computed here. From the first
token on both are the same: rows of the scheduler until a stop id, the length, or the front ends them.
"""

from collections import Counter
from collections.abc import Sequence

from deltaserve.control.cache.lease import Match
from deltaserve.control.engine.api import Event, InstanceConfig
from deltaserve.control.engine.back_writer import BackWriter
from deltaserve.control.engine.checks import STEP_FAILURES, Refusal, refuse_submit
from deltaserve.control.engine.ended import EndedAnswer
from deltaserve.control.engine.intake import Arrived, AttemptFailed, Intake, Outcome
from deltaserve.control.engine.near import Weighing, known_better
from deltaserve.control.engine.own_pace import OwnPace
from deltaserve.control.engine.parts import Parts
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.rooms import DecodeRoom, RoomBook, ToFronts
from deltaserve.control.engine.status import DecodeEvent, DecodeState
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.table import Peer
from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.control.sched.ending import finish_of
from deltaserve.control.sched.plan import Sampled
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.sched.step_progress import Decoded, StepProgress
from deltaserve.control.transfer.commands import (
    Landed,
    PagesVerified,
    PeerFenced,
    TransferReport,
)
from deltaserve.control.transfer.receiver import Receiver
from deltaserve.core.errors import FailReason
from deltaserve.core.hints import MAX_RETAIN_MS, Hint, HintAnswer, HintOutcome
from deltaserve.core.ids import Attempt, PeerName, Room
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import TOKEN_BYTES, unpack_u32
from deltaserve.core.wire.first_token import FirstToken
from deltaserve.core.wire.messages import (
    CacheUse,
    Cancel,
    Cores,
    Drained,
    Draining,
    Failed,
    Finish,
    FinishReason,
    Hello,
    Message,
    PrefillWay,
    PromptLogprobs,
    Queued,
    Sent,
    Starting,
    Submit,
)

_NO_SHARE = "longer than the share of the cache that may be kept, or others keep that: some of the path is not kept"
_ASKED = (DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED)
_WITH_PREFILL = frozenset({DecodeState.OFFERED, DecodeState.GRANTED})
_REMOTE = (*_ASKED, DecodeState.VERIFYING)


class Serving:
    """All rooms of fronts. Those that other workers compute are under way at the intake."""

    def __init__(
        self, config: InstanceConfig, parts: Parts, links: PeerLinks, receiver: Receiver, back: BackWriter
    ) -> None:
        """`back`: what hears of rooms that begin, and of complete answers."""
        self.config = config
        self.parts = parts
        self.links = links
        self.receiver = receiver
        self.back = back
        self.rooms = RoomBook()
        self.intake = Intake(config, parts, links, receiver, self.rooms)
        self._outbox = ToFronts(links)
        self._pace = OwnPace(parts.scheduler.running)
        self._stopping: dict[Room, DecodeRoom] = {}
        """Rooms of which the front found a stop string, while steps compute them."""
        self._num_near = 0
        """Prompts computed here although a prefill worker was there."""
        self._num_unsent_drafts = 0
        """Tokens of prompts that came without what our draft head keeps of them."""

    def requests(self) -> list[Request]:
        """The requests of all rooms."""
        return [room.request for room in self.rooms]

    def granted(self) -> set[Request]:
        """The requests of rooms whose pages are on their way, or about to be."""
        return {room.request for room in self.rooms if room.ticket is not None}

    def num_with_prefill(self) -> int:
        """Rooms whose prompts prefill computes, or has queued; 0 where one of them waits for memory or a row: the
        sooner rows here are through, the sooner it has that."""
        states = Counter(room.state for room in self.rooms if room.prefill is not None)
        return 0 if states[DecodeState.STARTED] else sum(states[state] for state in _WITH_PREFILL)

    # ------------------------------------------------------------ driving

    def tick(self, turn: EngineTurn) -> None:
        for name in self.receiver.overdue(turn.now):
            self._lose(name, turn)
        deserted = {front for front in self.rooms.fronts() if self.links.is_deserted(front, turn.now)}
        for room in self.rooms:
            self._tick_room(room, deserted, turn)
        self.rooms.ended.expire(turn.now)
        self.back.tick(turn.now)

    def hang_up_on_those_that_left(self, turn: EngineTurn) -> None:
        """Prefill workers that no front knows any more are dialled no more, once no room is of theirs."""
        for name in self.links.unnamed():
            is_idle = not self.receiver.of_peer(name) and all(room.prefill != name for room in self.rooms)
            if is_idle and self.back.may_let_go(name):
                self.links.let_go(name, turn)
                self.intake.forget_way(name)
                self.back.drop_peer(name, turn)

    def _tick_room(self, room: DecodeRoom, deserted: set[PeerName], turn: EngineTurn) -> None:
        if turn.now >= room.request.deadline:
            self._fail(room, FailReason.DEADLINE, "the deadline passed", turn)
        elif room.front in deserted:
            self._fail(room, FailReason.CANCELLED, "the front was lost", turn)
        elif room.state in _REMOTE:
            self.intake.repeat(room, turn)
            self._come_to(self.intake.unanswered(room, turn.now), turn)

    def resume(self, request: Request, turn: EngineTurn) -> None:
        """A room whose memory was taken: what is missing of it is computed here, or by a new attempt."""
        room = self.rooms.of_request(request)
        if room is None:
            return
        room.move(DecodeEvent.RETRACT)
        prefill = room.submit.prefill
        matched_len = self._matched_len(request)
        if (
            prefill is None
            or not self.links.is_ready(PeerName(prefill.name))
            or self._is_near(room, matched_len, turn.now)
        ):
            self._compute_here(room)
            return
        room.attempt = Attempt(room.attempt + 1)
        room.move(DecodeEvent.OFFER)
        self._offer(room, PeerName(prefill.name), matched_len, turn)

    def _is_near(self, room: DecodeRoom, matched_len: int, now: float) -> bool:
        """Whether what a room goes on behind is computed here. Where prompts are not weighed, if it is short."""
        weighing = self._weigh(room, now)
        if weighing is not None:
            return weighing.is_near
        return room.request.num_tokens - matched_len <= self.config.options.sched.near_len

    def started(self, request: Request, now: float) -> None:
        """The room's request was admitted to a row."""
        room = self.rooms.of_request(request)
        if room is None:
            return
        room.move(DecodeEvent.RUN)
        if room.times.running is None:
            room.times.running = now
        if room.prefill is None and request.num_retractions == 0:
            room.decode_cached_len = request.num_computed

    def flush(self, turn: EngineTurn) -> None:
        """Tokens of all rooms go out, one frame per front."""
        self._outbox.flush(turn)

    def advance(self, progress: StepProgress, turn: EngineTurn) -> None:
        """One step's outcome for one request."""
        room = self.rooms.of_request(progress.request)
        if room is None:
            return
        failure = STEP_FAILURES.get(progress.outcome)
        if failure is not None:
            self._fail(room, *failure, turn)
            return
        if progress.prompt_logprobs:
            self._tell_prompt_logprobs(room, progress.computed_from + 1, progress.prompt_logprobs, turn)
        self.parts.scheduler.share_step(room.request, is_extend=progress.is_extend)
        if progress.is_extend:
            self._pace.extended(turn.now)
        if progress.drawn:
            self._on_tokens(room, progress.drawn, turn)
        if room.finish_len is not None and room.room in self.rooms:
            self._stop_at(room, room.finish_len, turn)

    def decoded(self, decoded: Decoded, turn: EngineTurn) -> None:
        """One step's outcome for the rows that go on by one token."""
        audience = self.rooms.audience(decoded.requests)
        self._outbox.decoded(audience, decoded.tokens)
        ended = [r for r in decoded.ending if self.rooms.of_request(r) is not None]
        if audience.stops and not audience.stops.isdisjoint(tokens := unpack_u32(decoded.tokens)):
            drawn = zip(decoded.requests, tokens, strict=True)
            ended += [request for request, token in drawn if token in request.sampling.stop_token_ids]
        for request in ended:
            room = self.rooms.of_request(request)
            if room is not None:
                self._end_if_complete(room, int.from_bytes(request.tokens[-TOKEN_BYTES:], "little"), turn)
        for room in [room for room in self._stopping.values() if room.request in decoded.requests]:
            self._stop_at(room, room.finish_len or 1, turn)

    # ------------------------------------------------------------ frames

    def on_frame(self, peer: Peer, message: Message, turn: EngineTurn) -> None:
        match message:
            case Hello() as hello:
                self.links.on_prefills(peer.name, hello.peers, turn)
            case Submit() as submit:
                self._on_submit(peer.name, submit, turn)
            case Finish() as finish:
                self._on_finish(peer.name, finish, turn)
            case Cancel() as cancel:
                room = self.rooms.get(cancel.room)
                if room is not None and room.front == peer.name:
                    self._fail(room, cancel.reason, "cancelled", turn)
            case Draining() | Drained() | Sent():
                self._on_ticket_frame(peer, message, turn)
            case Queued() | Starting() | Failed() | PromptLogprobs():
                self._on_prefill_frame(peer, message, turn)

    def _on_prefill_frame(
        self, peer: Peer, body: Queued | Starting | Failed | PromptLogprobs, turn: EngineTurn
    ) -> None:
        known = self.rooms.get(body.room)
        room = known if known is not None and known.prefill == peer.name else None
        match body:
            case Starting():
                self._on_starting(peer, room, body, turn)
            case Queued() if room is not None and body.attempt == room.attempt:
                room.is_queued = True  # prefill has the offer: whole prompts are not sent twice
            case Failed() if room is not None and body.attempt == room.attempt:
                if room.state in _ASKED or room.arrived is not None:  # else everything is here
                    self._attempt_failed(room, body.reason, body.message, turn)
                if body.reason is FailReason.PEER_FENCED:
                    self._lose(peer.name, turn)
            case PromptLogprobs() if room is not None:
                self._tell_prompt_logprobs(room, body.start, body.values, turn)

    def _on_starting(self, peer: Peer, room: DecodeRoom | None, body: Starting, turn: EngineTurn) -> None:
        if room is None or room.state not in _ASKED or body.attempt > room.attempt:
            # of a room that is over, or whose attempts are counted anew
            self.links.send(peer.name, Cancel(room=body.room, reason=FailReason.CANCELLED), turn)
        elif body.attempt == room.attempt:
            self.intake.started(room, body.cached_len, turn)

    def _on_submit(self, front: PeerName, submit: Submit, turn: EngineTurn) -> None:
        if self._is_repeat(front, submit, turn):
            return
        refusal = self._refusal(submit, turn.is_draining)
        if refusal is not None:
            self._outbox.refused(front, submit, *refusal, turn)
            return
        room = self.rooms.open(front, submit, turn.now)
        self.back.begun(room)
        room.hints = self._answers(room.request)
        room.weighing = self._weigh(room, turn.now)
        if submit.prefill is None or (room.weighing is not None and room.weighing.is_near):
            if submit.prefill is not None:
                self._num_near += 1
                self.intake.passed_over(PeerName(submit.prefill.name), turn.now)
            self._compute_here(room)
        else:
            self.links.on_prefill(front, submit.prefill, turn)
            missing = None if room.weighing is None else room.weighing.missing_len
            held_len = self._matched_len(room.request) if missing is None else room.request.num_tokens - missing
            self._offer(room, PeerName(submit.prefill.name), held_len, turn)

    def _matched_len(self, request: Request) -> int:
        return self.parts.cache.match(request.namespace, request.tokens, request.keys).num_tokens

    def _offer(self, room: DecodeRoom, prefill: PeerName, matched_len: int, turn: EngineTurn) -> None:
        """Have prefill compute the prompt. It may ask for what is held here before: `matched_len` tokens at most."""
        room.held_len = self.back.offered(room, prefill, matched_len, turn)
        self.intake.offer(room, prefill, turn)

    def _answers(self, request: Request) -> tuple[HintAnswer, ...]:
        """What becomes of hints, as far as it is known before their request has ended."""
        return tuple(self._answer(hint, request) for hint in request.hints.answered)

    def _answer(self, hint: Hint, request: Request) -> HintAnswer:
        if not self.parts.scheduler.running.uses_tree(request):
            bypasses = request.cache is CacheUse.BYPASS
            reason = "no_cache: nothing is left in a cache" if bypasses else "decode keeps no cache of prefixes"
            return HintAnswer(hint=hint, outcome=HintOutcome.REFUSED, reason=reason)
        if hint is not Hint.RETAIN:
            return HintAnswer(hint=hint, outcome=HintOutcome.ACCEPTED)
        num_pages = request.prompt_len // self.config.cache.page_size
        if self.parts.cache.may_retain(request.namespace) < num_pages:
            return HintAnswer(hint=hint, outcome=HintOutcome.CLIPPED, reason=_NO_SHARE)
        if request.hints.retain_ms > MAX_RETAIN_MS:
            reason = f"kept for {MAX_RETAIN_MS // 1000} s at most"
            return HintAnswer(hint=hint, outcome=HintOutcome.CLIPPED, reason=reason)
        return HintAnswer(hint=hint, outcome=HintOutcome.ACCEPTED)

    def _is_repeat(self, front: PeerName, submit: Submit, turn: EngineTurn) -> bool:
        """Whether the Submit is of a room known here; then the front is told what it missed.

        A room whose output is not what the client has was opened before another worker went on with the answer: it
        ends, and is opened anew behind what the client has.
        """
        room, ended = self.rooms.get(submit.room), self.rooms.ended
        if room is None:
            if submit.epoch <= ended.epoch(Room(submit.room)):
                return True  # an old one, late
            answer = ended.answer(Room(submit.room))
            if answer is None or not answer.told.can_be_told_again(front, submit):
                return False
            ended.asked_again(Room(submit.room), submit.epoch)
            self._outbox.repeat_ended(answer, submit, turn)
            return True
        if room.front != front or submit.epoch <= room.epoch:
            return True
        self.rooms.renumber(room, submit.epoch)
        told = room.told()
        if not told.continues(front, submit):
            self._drop(room, turn)
            return False
        self._outbox.repeat(told, submit, turn)
        return True

    def _weigh(self, room: DecodeRoom, now: float) -> Weighing | None:
        """What speaks for computing a prompt here; None: nobody asks, or prefill has to compute it."""
        request, way = room.request, room.submit.prefill_way
        if way is None or request.cache is CacheUse.BYPASS or request.sampling.prompt_logprobs is not None:
            return None
        match = self.parts.cache.match(request.namespace, request.tokens, request.keys, request.num_tokens - 1)
        others = [other for other in self.rooms if other is not room]
        options = self.config.options
        num_rows = sum(other.has_output and other.state is DecodeState.RUNNING for other in others)
        filed_len, load_len = self._filed(room, match)
        return Weighing(
            missing_len=request.num_tokens - match.num_tokens,
            backlog_len=sum(other.weighing.to_compute_len for other in others if other.weighing and other.is_near),
            num_rows=num_rows,
            way=self._known_better(room, way, match.num_tokens),
            most_len=options.sched.near_len,
            cores=Cores.SHARED if options.weighs_work else Cores.OWN,
            filed_len=filed_len,
            load_len=load_len,
            pace=self._pace.pace(room.submit.prefill_tokens_per_s, num_rows, now),
        )

    def _filed(self, room: DecodeRoom, match: Match) -> tuple[int, int]:
        """Tokens beyond a match that the file has, and what loading them takes, in tokens that prefill computes
        meanwhile, or this worker where prefill's rate is not known."""
        tiering, running = self.parts.tiering, self.parts.scheduler.running
        token_s, rate = running.step_target.extend_s, room.submit.prefill_tokens_per_s
        rate = rate or (1.0 / token_s if token_s else None)
        if tiering is None or rate is None or not running.shares_prompt(room.request):
            return 0, 0
        found = tiering.loadable(room.request, match)
        return (0, 0) if found is None else (found.num_tokens, int(found.load_s * rate))

    def _known_better(self, room: DecodeRoom, way: PrefillWay, matched_len: int) -> PrefillWay:
        """The front may take for here what has been evicted, and does not know what has become of a room since."""
        request, evicted_len = room.request, max(0, room.submit.decode_hit_len - matched_len)
        pullable_len = max(0, way.pulled_len - evicted_len) if self.back.may_be_asked(room) else 0
        if not request.output_len:
            return known_better(way, pullable_len, None)
        if room.times.landed is not None:  # prefill has computed so much of it
            return known_better(way, 0, max(1, request.num_tokens - room.attempt_len))
        return known_better(way, pullable_len, way.lacking_len + request.output_len)

    def _refusal(self, submit: Submit, is_draining: bool) -> Refusal | None:
        if is_draining:
            return FailReason.DRAINING, "decode is draining"
        if len(self.rooms) >= self.config.options.max_queued_requests + self.config.max_running_requests:
            return FailReason.OVERLOADED, "decode's queue is full"
        return refuse_submit(self.config, submit)

    def _on_finish(self, front: PeerName, finish: Finish, turn: EngineTurn) -> None:
        room = self.rooms.get(finish.room)
        if room is None or room.front != front or not room.has_output:
            return
        room.finish_len = max(1, min(finish.output_len, room.request.output_len))
        if not self.parts.scheduler.steps.is_in_flight(room.request):
            self._stop_at(room, room.finish_len, turn)
        else:
            kept_len = room.request.prompt_len + room.finish_len
            self.parts.scheduler.running.share_under_step(room.request, kept_len)
            self._stopping[room.room] = room

    def _stop_at(self, room: DecodeRoom, output_len: int, turn: EngineTurn) -> None:
        room.request.truncate(room.request.prompt_len + output_len)
        self._complete(room, FinishReason.STOP, turn)

    def _on_ticket_frame(self, peer: Peer, message: Draining | Drained | Sent, turn: EngineTurn) -> None:
        if not isinstance(message, Sent):
            if self.intake.tickets.drains(peer, message, turn):
                self._lose(peer.name, turn)
        elif (ticket := self.intake.tickets.told_of(peer, message.ticket)) is not None:
            self.intake.sent(ticket, turn.now)

    # ------------------------------------------------------------ transfer reports

    def on_endpoint(self, peer: PeerName, turn: EngineTurn) -> None:
        """The endpoint of a peer came or went: what its rooms wait to tell it may go out."""
        for room in self.rooms:
            if room.prefill == peer:
                self.intake.repeat(room, turn)

    def on_report(self, report: TransferReport | Event, turn: EngineTurn) -> None:
        match report:
            case Landed():
                self._come_to(self.intake.landed(report, turn), turn)
            case PagesVerified():
                self._come_to(self.intake.verified(report, turn), turn)
            case PeerFenced():
                self.intake.tickets.fenced(report.peer, report.result, turn)

    def _come_to(self, outcome: Outcome | None, turn: EngineTurn) -> None:
        match outcome:
            case Arrived():
                self._arrived(outcome.room, outcome.first, turn)
            case AttemptFailed():
                self._attempt_failed(outcome.room, outcome.reason, outcome.message, turn)
                if outcome.fence is not None:
                    self._lose(outcome.fence, turn)

    def _tell_prompt_logprobs(
        self, room: DecodeRoom, start: int, values: tuple[TokenLogprobs, ...], turn: EngineTurn
    ) -> None:
        told = room.new_prompt_logprobs(start, values)
        if told is None:
            self.intake.lost_logprobs(room, turn)
            return
        for frame in told:
            self.links.send(room.front, frame, turn)
        if not told or room.lacks_prompt_logprobs:
            return
        self.intake.ask_logprobs(room, turn)  # for none: prefill may forget them
        if room.arrived is not None:
            first, room.arrived = room.arrived, None
            self._arrived(room, first, turn)

    def _arrived(self, room: DecodeRoom, first: FirstToken, turn: EngineTurn) -> None:
        """The prompt's pages are ours: share them, take the first token, queue for a row."""
        if room.lacks_prompt_logprobs:
            self.intake.await_logprobs(room, first, turn.now)
            return
        request = room.request
        request.begin_at(room.attempt_len)
        if request.lease is None or not request.lease.num_pages:  # the token was drawn from all that is here
            request.num_finite = request.num_computed
        room.prefill_cached_len = max(room.prefill_cached_len, first.cached_len)
        room.prefill_loaded_len, room.prefill_pulled_len = first.loaded_len, first.pulled_len
        request.draft_start = self._draft_start(room, first)
        room.move(DecodeEvent.QUEUE)
        self.parts.scheduler.running.share_computed(request)
        if self.parts.tiering is not None and request.draft_start is not None:
            self.parts.tiering.leave_out(request, request.draft_start.first, room.attempt_len)
        request.append(first.token)
        self._on_tokens(room, (Sampled(first.token, first.logprobs),), turn)
        if room.room in self.rooms:
            self.parts.scheduler.waiting.add_landed(request)

    def _draft_start(self, room: DecodeRoom, first: FirstToken) -> DraftStart | None:
        """Position from which our draft head has to fill the prompt's pages: prefill may have none, or another."""
        cache, sent = self.config.cache, first.draft
        if cache.draft_group is None:
            return None
        if sent is not None and sent.group == cache.draft_group:
            return DraftStart(room.attempt_len, sent.features)
        start = DraftStart(min(room.attempt_len, room.request.owned_first[0] * cache.page_size), b"")
        self._num_unsent_drafts += room.attempt_len - start.first
        return start

    # ------------------------------------------------------------ progress

    def _on_tokens(self, room: DecodeRoom, drawn: Sequence[Sampled], turn: EngineTurn) -> None:
        """The request's newest tokens: tell the front, end the request if the last of them ends it."""
        for sampled in drawn:
            self._outbox.token(room, sampled, turn.now)
        self._end_if_complete(room, drawn[-1].token, turn)

    def _end_if_complete(self, room: DecodeRoom, last_token: int, turn: EngineTurn) -> None:
        finish = finish_of(room.request.sampling, room.request.output_len, last_token)
        if finish is not None and room.finish_len is None:
            self._complete(room, finish, turn)

    def _compute_here(self, room: DecodeRoom) -> None:
        room.prefill = None
        room.move(DecodeEvent.QUEUE)
        room.request.origin = Origin.COMPUTED
        self.parts.scheduler.waiting.add(room.request)

    # ------------------------------------------------------------ endings

    def _attempt_failed(self, room: DecodeRoom, reason: FailReason, message: str, turn: EngineTurn) -> None:
        """End an attempt. Before the first token the front may try elsewhere; after it this worker computes the
        rest itself."""
        if room.state not in _REMOTE:
            return
        if not room.has_output:
            self._fail(room, reason, message, turn)
            return
        self.intake.withdraw(room, reason, turn)
        self.parts.scheduler.discard(room.request)
        room.move(DecodeEvent.LOCAL)
        room.attempt = Attempt(room.attempt + 1)
        self._compute_here(room)

    def _lose(self, peer: PeerName, turn: EngineTurn) -> None:
        """Fence a peer and fail what was under way with it."""
        self.links.fence(peer, turn)
        self.drop_peer(peer, FailReason.PEER_FENCED, turn)
        self.receiver.fencing(peer)

    def drop_peer(self, peer: PeerName, reason: FailReason, turn: EngineTurn) -> None:
        """End what depends on a peer whose process or endpoint has ended: a front's rooms end, prefill's attempts
        fail."""
        for room in self.rooms:
            if room.prefill == peer and room.state in _REMOTE:
                self._attempt_failed(room, reason, "the link to the prefill worker ended", turn)
            elif room.front == peer:
                self._fail(room, FailReason.CANCELLED, "the front was lost", turn)
        self.back.drop_peer(peer, turn)

    def leave_rooms(self, turn: EngineTurn) -> None:
        """All rooms end without a word: their fronts submit them elsewhere when they hear that this engine is over."""
        for room in self.rooms:
            self._drop(room, turn)

    def _complete(self, room: DecodeRoom, finish: FinishReason, turn: EngineTurn) -> None:
        answer = self._outbox.finished(room, finish, turn)
        if room.state in _REMOTE:  # a resumed room, ended by a stop string
            self.intake.withdraw(room, FailReason.CANCELLED, turn)
        self._end(room, turn.now, answer)
        self.back.answered(room, turn)

    def _fail(self, room: DecodeRoom, reason: FailReason, message: str, turn: EngineTurn) -> None:
        self._outbox.failed(room, reason, message, turn)
        self._drop(room, turn, reason)

    def _drop(self, room: DecodeRoom, turn: EngineTurn, reason: FailReason = FailReason.CANCELLED) -> None:
        """End a room without a word to its front."""
        if room.state in _REMOTE:
            self.intake.withdraw(room, reason, turn)
        self._end(room, turn.now, None)

    def _end(self, room: DecodeRoom, now: float, answer: EndedAnswer | None) -> None:
        """Everything the room held goes back; what was computed stays in the tree."""
        room.move(DecodeEvent.END)
        self._stopping.pop(room.room, None)
        self.parts.scheduler.finish(room.request)
        self.rooms.close(room, now, answer)

    # ------------------------------------------------------------ views

    def metrics(self) -> dict[str, float]:
        return (
            self.intake.metrics()
            | self.back.metrics()
            | {
                "deltaserve_late_dones_total": self.receiver.late_dones,
                "deltaserve_conditional_prefills_total": self._num_near,
                "deltaserve_unsent_draft_tokens_total": self._num_unsent_drafts,
                "deltaserve_draining_bytes": sum(t.bytes_outstanding for t in self.receiver.quarantined()),
            }
        )
