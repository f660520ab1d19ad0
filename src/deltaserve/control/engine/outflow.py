"""The writer's part: prompts computed for other workers, Offer -> Starting -> (Grant) -> chunks -> sent.

It holds nothing for a room before its Offer, and of a room's end only what the transport may still read: pins.
A room's pages go out as its steps close them, [max(cursor, the reader's prefix), computed end), in whole pages of the
reader except the last (core/layout/prompt_pages.py); a prefix only this side had cached goes out first, before the rest
is computed.
"""

from deltaserve.control.engine.api import Event, InstanceConfig
from deltaserve.control.engine.checks import STEP_FAILURES, Refusal, grant_fits, page_keys, refuse_offer
from deltaserve.control.engine.kept_logprobs import KeptLogprobs
from deltaserve.control.engine.meter import Meter
from deltaserve.control.engine.parts import Parts
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.rooms import PrefillRoom, make_request, prompt_logprobs_frames
from deltaserve.control.engine.status import PREFILL_TABLE, PrefillEvent, PrefillState
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.engine.watched import RoomPart, WatchedRooms, digest_of
from deltaserve.control.peer.table import Peer
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.step_progress import StepProgress
from deltaserve.control.sched.waiting import HORIZON_STEPS, Claim
from deltaserve.control.transfer.commands import (
    ChunkSent,
    CloseGate,
    GateDrained,
    GateDraining,
    OpenGate,
    PeerFenced,
    TransferReport,
    WriteFailed,
)
from deltaserve.control.transfer.sender import GrantVerdict, Sender, SendTicket
from deltaserve.control.transfer.tables import SenderState
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Attempt, Boot, PeerName, PoolId, Role, Room
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.machine import advance
from deltaserve.core.wire.first_token import DraftHandover, FirstToken, encode_first_token
from deltaserve.core.wire.messages import (
    Ask,
    AskLogprobs,
    Cancel,
    Drain,
    Drained,
    Draining,
    Envelope,
    Failed,
    Grant,
    Message,
    Offer,
    Queued,
    Revoke,
    Sent,
    Starting,
)


class Outflow:
    """All attempts computed here for readers. As the scheduler's gatekeeper it says which of them may be computed."""

    def __init__(self, config: InstanceConfig, parts: Parts, links: PeerLinks, meter: Meter) -> None:
        self.config = config
        self.parts = parts
        self.links = links
        self.sender = Sender(Boot(config.boot), parts.pools, config.evidence)
        self._meter = meter
        self.rooms: dict[tuple[PeerName, Room], PrefillRoom] = {}
        self._by_request: dict[Request, PrefillRoom] = {}
        self._ungranted: dict[PeerName, int] = {}
        """Tokens announced to a decode worker that it has not granted yet."""
        self.logprobs = KeptLogprobs()
        self.watched = WatchedRooms(links)
        self._horizon = HORIZON_STEPS * config.options.sched.step_len
        self._draft = config.cache.draft_group

    def __len__(self) -> int:
        return len(self.rooms)

    def requests(self) -> list[Request]:
        """The requests of all rooms."""
        return list(self._by_request)

    def waiting_request(self, peer: PeerName, room: Room, attempt: Attempt) -> Request | None:
        """The request of an attempt that waits to be computed."""
        known = self.rooms.get((peer, room))
        is_asked = known is not None and known.attempt == attempt and known.state is PrefillState.QUEUED
        return known.request if known is not None and is_asked else None

    def waiting(self) -> list[Request]:
        """The requests of rooms whose prompt is not computed yet."""
        return [r.request for r in self.rooms.values() if r.state in (PrefillState.QUEUED, PrefillState.COMPUTING)]

    # ------------------------------------------------------------ driving

    def tick(self, turn: EngineTurn) -> None:
        for room in [r for r in self.rooms.values() if turn.now >= r.request.deadline]:
            self._fail(room, FailReason.DEADLINE, "the deadline passed on prefill", turn)
        for room in self.rooms.values():
            if room.is_announced and room.ticket is None and room.asks_again(turn.now):
                self._announce(room, turn)  # a lost Cancel must not leave its pages waiting for a grant
        self.logprobs.expire(self.rooms, turn.now)
        self.sender.forget_strangers(self.links.table)
        self.watched.tick((room for _, room in self.rooms), turn)

    def started(self, request: Request, turn: EngineTurn) -> bool:
        """Note that a request was admitted; whether it is of this part."""
        room = self._by_request.get(request)
        if room is None:
            return False
        room.cached_len = request.num_computed
        self._move(room, PrefillEvent.START)
        self._send_ready(room, turn)
        return True

    def yielded(self, request: Request) -> bool:
        """Note that a request gave up what was computed and waits again; whether it is of this part."""
        room = self._by_request.get(request)
        if room is None:
            return False
        self._move(room, PrefillEvent.YIELD)
        request.truncate(room.num_tokens)
        request.start_over()
        room.first = None
        self.parts.scheduler.waiting.add(request)
        return True

    def advance(self, progress: StepProgress, turn: EngineTurn) -> bool:
        """Take one step's outcome; whether the request is of this part."""
        room = self._by_request.get(progress.request)
        if room is None:
            return False
        failure = STEP_FAILURES.get(progress.outcome)
        if failure is not None:
            self._fail(room, *failure, turn)
            return True
        if progress.prompt_logprobs:
            frames = prompt_logprobs_frames(room.room, progress.computed_from + 1, progress.prompt_logprobs)
            self.logprobs.keep((room.peer, room.room), room.attempt, frames)
            for frame in frames:
                self.links.send(room.peer, frame, turn)
        if not progress.drawn:
            self.parts.scheduler.share_step(room.request, is_extend=True)
        else:
            self.parts.scheduler.running.leave_computed(room.request)
            sampled = progress.drawn[0]
            draft = None if self._draft is None else DraftHandover(group=self._draft, features=progress.features)
            first = FirstToken(
                token=sampled.token,
                logprobs=sampled.logprobs,
                cached_len=room.cached_len,
                loaded_len=room.request.loaded_len,
                pulled_len=min(room.request.pulled_len, room.cached_len),
                held_ms=1000.0 * (turn.now - room.request.arrival),
                sent_bytes=room.sent_bytes,
                draft=draft,
            )
            room.first = first
            self.parts.scheduler.running.leave(room.request)
            self._move(room, PrefillEvent.COMPUTE_AHEAD)
            if room.ticket is None:
                self.parts.scheduler.waiting.hold(room.request)
        self._send_ready(room, turn)
        return True

    # ------------------------------------------------------------ frames

    def on_frame(self, peer: Peer, envelope: Envelope, message: Message | None, turn: EngineTurn) -> None:
        """`message`: the envelope's body, if it may be acted on."""
        self.hear_mark(peer, envelope)
        if message is None or peer.boot is None:
            return
        if peer.role == Role.FRONT.value:
            self.watched.on_frame(peer, message, turn)
            return
        match message:
            case Offer() as offer:
                self._on_offer(peer, offer, turn)
            case Ask() as ask:
                self._on_ask(peer, ask, turn)
            case AskLogprobs() as ask:
                self._on_ask_logprobs(peer, ask, turn)
            case Grant() as grant:
                self._on_grant(peer, peer.boot, grant, turn)
            case Revoke() as revoke:
                self.revoke(peer, peer.boot, revoke, turn)
            case Cancel() as cancel:
                room = self.rooms.get((peer.name, Room(cancel.room)))
                if room is not None:
                    self._end(room, turn)
                    self._part_ended(room, (FailReason.CANCELLED, "decode ended it"), turn)
                self.logprobs.forget((peer.name, Room(cancel.room)))

    def hear_mark(self, peer: Peer, envelope: Envelope) -> None:
        """A reader says of which tickets it wants to hear no more; a Hello's mark counts as well."""
        if peer.boot is not None and (envelope.src_boot, envelope.dst_boot) == (peer.boot, self.config.boot):
            self.sender.advance_mark(peer.name, peer.boot, envelope.closed_below)

    def _on_offer(self, peer: Peer, offer: Offer, turn: EngineTurn) -> None:
        key = (peer.name, Room(offer.room))
        known = self.rooms.get(key)
        if known is not None and known.attempt >= offer.attempt:
            if known.attempt == offer.attempt:
                self._tell(known, turn)
            return
        if known is not None:
            self._end(known, turn)
        refusal = self._refusal(offer, turn.is_draining)
        if refusal is not None:
            failed = Failed(room=offer.room, attempt=offer.attempt, reason=refusal[0], message=refusal[1])
            self.links.send(peer.name, failed, turn)
            digest = digest_of(offer.namespace, offer.prompt, offer.prompt_len)
            self.watched.ended(Room(offer.room), RoomPart(digest, failure=refusal), turn)
            return
        self.watched.begins(offer, turn)
        request = make_request(offer, page_keys(self.config, offer), turn.now)
        request.is_urgent = request.output_len > 0  # its client has had tokens already
        request.hands_over = self._draft is not None
        room = PrefillRoom(peer.name, Room(offer.room), Attempt(offer.attempt), request, request.num_tokens)
        self.rooms[key] = room
        self._by_request[request] = room
        self.parts.scheduler.waiting.add(request)
        self._tell(room, turn)

    def _on_ask(self, peer: Peer, ask: Ask, turn: EngineTurn) -> None:
        room = self.rooms.get((peer.name, Room(ask.room)))
        if room is not None and room.attempt == ask.attempt:
            self._tell(room, turn)
        elif room is None or room.attempt < ask.attempt:
            self._unknown(peer, ask, turn)

    def _on_ask_logprobs(self, peer: Peer, ask: AskLogprobs, turn: EngineTurn) -> None:
        frames = self.logprobs.again((peer.name, Room(ask.room)), Attempt(ask.attempt), ask.start)
        if frames is None:
            self._unknown(peer, ask, turn)
            return
        for frame in frames:
            self.links.send(peer.name, frame, turn)

    def _unknown(self, peer: Peer, asked: Ask | AskLogprobs | Grant, turn: EngineTurn) -> None:
        reason, text = FailReason.CANCELLED, "no such attempt here"
        self.links.send(peer.name, Failed(room=asked.room, attempt=asked.attempt, reason=reason, message=text), turn)

    def _refusal(self, offer: Offer, is_draining: bool) -> Refusal | None:
        if is_draining:
            return FailReason.DRAINING, "prefill is draining"
        if len(self.rooms) >= self.config.options.max_queued_requests:
            return FailReason.OVERLOADED, "prefill's queue is full"
        return refuse_offer(self.config, offer)

    def _on_grant(self, peer: Peer, boot: Boot, grant: Grant, turn: EngineTurn) -> None:
        room = self.rooms.get((peer.name, Room(grant.room)))
        if room is None or room.attempt != grant.attempt:
            if self.sender.was_sent(peer.name, boot, grant.ticket):  # decode may not have seen its announcements yet
                self.links.send(peer.name, Sent(ticket=grant.ticket), turn)
            else:
                self._unknown(peer, grant, turn)
            return
        if peer.hello is None:
            return
        facts = peer.hello.facts
        prompt = PromptPages(room.num_tokens, self.config.cache.page_size, facts.page_size)
        if not grant_fits(self.config, facts.pool_pages, grant, prompt):
            self._fail(room, FailReason.BAD_EXTENT, "the grant's coverage does not fit the prompt", turn)
            return
        ticket, verdict = self.sender.accept(peer.name, boot, grant, prompt)
        if verdict is GrantVerdict.CLOSED:
            self._end(room, turn)  # the attempt is over: decode grants each one once
        if verdict is not GrantVerdict.OPENED or ticket is None:
            return
        room.ticket = ticket
        turn.do(OpenGate(peer.name, ticket.id, tuple(map(len, ticket.pages))))
        self._answered(room)
        scheduler = self.parts.scheduler
        room.request.is_ahead = False
        scheduler.waiting.unhold(room.request)
        if room.state is PrefillState.QUEUED:
            scheduler.waiting.queue.discard(room.request)
            room.request.is_urgent = True  # decode holds memory for it
            scheduler.waiting.add(room.request)
        self._send_ready(room, turn)

    def revoke(self, peer: Peer, boot: Boot, revoke: Revoke, turn: EngineTurn) -> None:
        """A reader withdraws a ticket, of a room or of an answer that it asked for."""
        ticket = self.sender.revoked(peer.name, boot, revoke.ticket)
        if ticket is None:
            outcome = self.sender.drain_of(peer.name, boot, revoke.ticket)
            self.links.send(peer.name, Drained(ticket=revoke.ticket, outcome=outcome), turn)
        elif ticket.state is SenderState.DIRTY:
            self._answer_revoke(ticket, Drain.DIRTY, turn)
        elif (room := self._room_of(ticket)) is not None:
            self._end(room, turn)
            self.watched.withdrawn(room.room, turn)
        else:
            self._close(ticket, turn)

    # ------------------------------------------------------------ reports

    def on_report(self, report: TransferReport | Event, turn: EngineTurn) -> PeerName | None:
        """Take note of what became of writes. Returns the peer that had to be fenced for it."""
        match report:
            case ChunkSent():
                self._on_sent(report, turn)
            case WriteFailed():
                return self._on_write_failed(report, turn)
            case GateDraining():
                ticket = self.sender.get(report.ticket)
                if ticket is not None and ticket.answer_revoke:
                    draining = Draining(ticket=ticket.id.seq, bytes_outstanding=report.bytes_outstanding)
                    self.links.send(ticket.peer, draining, turn)
            case GateDrained():
                return self._on_drained(report, turn)
            case PeerFenced():
                for ticket in self.sender.fenced(report.peer):
                    self._answer_revoke(ticket, Drain.DIRTY, turn)
                self.sender.forget_boots(report.peer, self.links.table.get(report.peer).boot)
        return None

    def _on_sent(self, report: ChunkSent, turn: EngineTurn) -> None:
        ticket = self.sender.chunk_sent(report.ticket, report.chunk)
        self._meter.count_sent(report.num_bytes)
        room = None if ticket is None else self._room_of(ticket)
        if room is not None:
            room.sent_bytes += report.num_bytes
        if ticket is not None and report.is_last:
            self._answer_revoke(ticket, self.sender.sent_all(ticket), turn)
            if room is not None:
                self._end(room, turn)
                self._part_ended(room, None, turn)

    def _on_write_failed(self, report: WriteFailed, turn: EngineTurn) -> PeerName | None:
        ticket = self.sender.failed(report.ticket)
        if ticket is None:
            return None
        if (room := self._room_of(ticket)) is not None:
            self._fail(room, FailReason.TRANSFER_FAILED, report.message, turn)
        return self._fence(report.peer, turn)

    def _on_drained(self, report: GateDrained, turn: EngineTurn) -> PeerName | None:
        ticket = self.sender.gate_drained(report.ticket, report.outcome)
        if ticket is None:
            return None
        self._answer_revoke(ticket, report.outcome, turn)
        return self._fence(ticket.peer, turn) if report.outcome is Drain.DIRTY else None

    def _answer_revoke(self, ticket: SendTicket, outcome: Drain, turn: EngineTurn) -> None:
        """The ticket is over, or will be with its endpoint: if it was revoked, its reader waits to hear how."""
        if ticket.answer_revoke:
            self.links.send(ticket.peer, Drained(ticket=ticket.id.seq, outcome=outcome), turn)

    def _room_of(self, ticket: SendTicket) -> PrefillRoom | None:
        """The room that is sent by this ticket."""
        room = self.rooms.get((ticket.peer, ticket.room))
        return room if room is not None and room.ticket is ticket else None

    def _fence(self, peer: PeerName, turn: EngineTurn) -> PeerName:
        """Fence this side's endpoint: every room of that peer fails, and decode is told to fence as well."""
        for room in [r for r in self.rooms.values() if r.peer == peer]:
            self._fail(room, FailReason.PEER_FENCED, "prefill had to fence this peer", turn)
        self.links.fence(peer, turn)
        return peer

    def leave_rooms(self, turn: EngineTurn) -> None:
        """All rooms end: their readers have them computed elsewhere."""
        for room in list(self.rooms.values()):
            self._fail(room, FailReason.DRAINING, "prefill takes up another role", turn)

    def drop_peer(self, peer: PeerName, turn: EngineTurn) -> None:
        """The peer's life is over and its endpoint is being fenced: nobody is left to answer."""
        for room in [r for r in self.rooms.values() if r.peer == peer]:
            self._end(room, turn)
            self._part_ended(room, (FailReason.PEER_LOST, "its decode worker is gone"), turn)
        for ticket in self.sender.of_peer(peer):
            self._close(ticket, turn)  # of an answer that it had asked for
        self.logprobs.forget_reader(peer)
        self.watched.drop_front(peer)

    # ------------------------------------------------------------ compute

    def may_start(self, request: Request) -> bool:
        """Ungranted prompts of one decode worker are announced up to the horizon: a full one stalls nobody else."""
        room = self._by_request.get(request)
        if room is None or request.is_urgent or room.is_announced:
            return True
        return self._ungranted.get(room.peer, 0) < self._horizon

    def claim(self, request: Request, cached_len: int, turn: EngineTurn) -> Claim:
        """Ask for the grant. Until it comes a prompt is computed ahead, if its pages can wait in the tree."""
        room = self._by_request.get(request)
        if room is None:
            return Claim.FULL
        if not room.is_announced:
            room.cached_len = cached_len
            self._ungranted[room.peer] = self._ungranted.get(room.peer, 0) + room.num_tokens
            self._announce(room, turn)
        if room.ticket is not None:
            return Claim.FULL
        return Claim.SPARE if self.parts.scheduler.running.shares_prompt(request) else Claim.NOTHING

    def _answered(self, room: PrefillRoom) -> None:
        """The room waits for no grant any more."""
        if room.is_announced and not room.is_answered:
            room.is_answered = True
            self._ungranted[room.peer] -= room.num_tokens
            if not self._ungranted[room.peer]:
                del self._ungranted[room.peer]
            self.parts.scheduler.waiting.look_again()

    def _tell(self, room: PrefillRoom, turn: EngineTurn) -> None:
        """Answer the reader's question: queued, or starting."""
        if room.is_announced:
            self._announce(room, turn)
        else:
            self.links.send(room.peer, Queued(room=room.room, attempt=room.attempt), turn)

    def _announce(self, room: PrefillRoom, turn: EngineTurn) -> None:
        room.is_announced = True
        starting = Starting(room=room.room, attempt=room.attempt, cached_len=room.cached_len)
        self.links.send(room.peer, starting, turn)

    def _send_ready(self, room: PrefillRoom, turn: EngineTurn) -> None:
        """Post what is computed and not posted yet."""
        ticket = room.ticket
        has_pages = room.state in (PrefillState.COMPUTING, PrefillState.AHEAD)
        if ticket is None or not ticket.is_open or not has_pages:
            return
        if room.first is not None:
            self._post(room, ticket, ticket.prompt.num_pages, encode_first_token(room.first), turn)
            self._move(room, PrefillEvent.SEND)
            return
        end = ticket.prompt.num_closed(room.request.num_computed)
        if any(cursor < end for cursor in ticket.cursors):
            self._post(room, ticket, end, None, turn)

    def _post(self, room: PrefillRoom, ticket: SendTicket, end: int, payload: bytes | None, turn: EngineTurn) -> None:
        """The prompt up to the reader's page `end`, in every pool from where the last chunk ended."""
        pools = range(self.config.cache.num_pools)
        sources = ((PoolId(pool), ticket.sources(PoolId(pool), end)) for pool in pools)
        pages = tuple(room.request.pages(pool, pages.start, pages.stop) for pool, pages in sources)
        turn.do(self.sender.post(ticket, [end for _ in pools], pages, payload))

    # ------------------------------------------------------------ endings

    def _fail(self, room: PrefillRoom, reason: FailReason, message: str, turn: EngineTurn) -> None:
        self.links.send(room.peer, Failed(room=room.room, attempt=room.attempt, reason=reason, message=message), turn)
        self._end(room, turn)
        self._part_ended(room, (reason, message), turn)

    def _part_ended(self, room: PrefillRoom, failure: Refusal | None, turn: EngineTurn) -> None:
        """Whoever waits for the room is told. An attempt that decode makes anew has not ended."""
        request = room.request
        digest = digest_of(request.namespace, request.tokens, request.prompt_len)
        self.watched.ended(room.room, RoomPart(digest, room.cached_len, failure), turn)

    def _end(self, room: PrefillRoom, turn: EngineTurn) -> None:
        """Forget the room. An open ticket's gate is closed; what it pinned stays until that is answered."""
        self._move(room, PrefillEvent.END)
        self._answered(room)
        if room.ticket is not None:
            self._close(room.ticket, turn)
        self.parts.scheduler.finish(room.request)
        del self.rooms[room.peer, room.room]
        del self._by_request[room.request]

    def _close(self, ticket: SendTicket, turn: EngineTurn) -> None:
        if ticket.state is SenderState.OPEN:
            self.sender.close(ticket)
            turn.do(CloseGate(ticket.peer, ticket.id))

    def _move(self, room: PrefillRoom, event: PrefillEvent) -> None:
        room.state = advance(PREFILL_TABLE, room.state, event, f"room {room.room.hex()[:8]} on prefill")

    # ------------------------------------------------------------ views

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_ticket_tombstones": self.sender.num_tombstones,
            "deltaserve_kept_prompt_logprobs": self.logprobs.num_numbers,
        }
