"""Decode's side of getting a prompt computed elsewhere: offer, grant, landing, revoke, fence.

Between offer and grant a room holds a lease of its prefix and nothing else, and gives even that up when a running row
or a room before it needs the memory: the grant, not the offer, names the prefix that counts.

A room whose next page is on its way to another room waits at the *grant*: prefill has computed the shared part once
(its own scheduler sees to that), and when that transfer ends the match is longer and only the rest is moved.
"""

from dataclasses import dataclass

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.open_tickets import OpenTickets, grant_of
from deltaserve.control.engine.parts import Parts
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.rooms import DecodeRoom, RoomBook
from deltaserve.control.engine.status import DecodeEvent, DecodeState
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.engine.way_price import Way, WayPrice
from deltaserve.control.sched.needs import Needs
from deltaserve.control.sched.queue import TryOutcome
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.transfer.commands import Landed, PagesVerified
from deltaserve.control.transfer.receiver import Heard, Receiver, Ticket
from deltaserve.core.errors import FailReason, ProtocolError
from deltaserve.core.ids import PeerName
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.wire.first_token import FirstToken, decode_first_token
from deltaserve.core.wire.messages import Ask, AskLogprobs, Cancel, Offer

_UNANSWERED = (DecodeState.OFFERED, DecodeState.GRANTED, DecodeState.VERIFYING)
"""An attempt's states in which prefill was, or may be, asked for something."""
_MAX_GAP_S = 8.0
_ARRIVAL_S = 1.0
"""After prefill has seen everything DONE, its announcements take so long at most; else one is lost."""
_LOGPROBS_S = 6.0
"""Seconds after the pages have landed until the prompt's log-probabilities are asked for, if they do not come."""
_AT_ONCE_S = 0.02
"""A grant that came later than that behind Starting waited for memory, a row or others' pages."""
_BOOTSTRAP_S = 5.0
"""A room offered to a peer that is not there for so long fails (and may be retried elsewhere)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A room's prompt is here: its pages are OWNED, its first token known."""

    room: DecodeRoom
    first: FirstToken


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    room: DecodeRoom
    reason: FailReason
    message: str
    fence: PeerName | None = None
    """What this peer announced had not landed: it may still."""


Outcome = Arrived | AttemptFailed


class Intake:
    """All attempts under way. Rooms belong to the instance; here they are found through their tickets."""

    def __init__(
        self,
        config: InstanceConfig,
        parts: Parts,
        links: PeerLinks,
        receiver: Receiver,
        rooms: RoomBook,
    ) -> None:
        self._config = config
        self._rooms = rooms
        self._parts = parts
        self._links = links
        self._receiver = receiver
        self._page_size = config.cache.page_size
        state_pools = parts.scheduler.running.needs.state_pools
        self.tickets: OpenTickets[DecodeRoom] = OpenTickets(config, links, receiver, state_pools)
        self._ways: dict[PeerName, WayPrice] = {}
        """Prefill worker |-> what its hand-overs take."""
        self._planned_bytes = self._landed_bytes = 0

    # ------------------------------------------------------------ offer

    def offer(self, room: DecodeRoom, prefill: PeerName, turn: EngineTurn) -> None:
        """Open the room's next attempt: lease what is here, ask for the rest."""
        room.prefill, room.ticket = prefill, None
        room.attempt_len = room.request.num_tokens
        room.times.started = room.times.granted = room.times.landed = None
        room.waits_since = None
        self._take_lease(room)
        room.is_queued = False
        room.repeat_gap_s, room.next_repeat, room.offered_at = 1.0, turn.now, turn.now
        self.repeat(room, turn)

    def repeat(self, room: DecodeRoom, turn: EngineTurn) -> None:
        """Send what the peer has not answered yet, with growing gaps. Safe at any time: repeats change nothing."""
        prefill = room.prefill
        if turn.now < room.next_repeat or room.state not in _UNANSWERED or prefill is None:
            return
        if not self._links.is_ready(prefill):
            return
        if room.state is DecodeState.GRANTED:
            assert room.ticket is not None
            self._links.send(prefill, grant_of(room.ticket), turn)
        elif room.state is DecodeState.VERIFYING:
            pass  # what it was asked for is here, but for the log-probabilities
        elif room.is_queued:
            self._links.send(prefill, Ask(room=room.room, attempt=room.attempt), turn)
        else:
            self._links.send(prefill, _offer(room, turn.now), turn)
        if room.misses_prompt_logprobs:
            self.ask_logprobs(room, turn)
        room.next_repeat = turn.now + room.repeat_gap_s
        room.repeat_gap_s = min(room.repeat_gap_s * 2, _MAX_GAP_S)

    def ask_logprobs(self, room: DecodeRoom, turn: EngineTurn) -> None:
        """Say how many of the prompt's log-probabilities are here; prefill tells the others again, if there are any."""
        if room.prefill is not None:
            start = room.num_prompt_logprobs + 1
            self._links.send(room.prefill, AskLogprobs(room=room.room, attempt=room.attempt, start=start), turn)

    def lost_logprobs(self, room: DecodeRoom, turn: EngineTurn) -> None:
        """Some were overtaken by later ones, which are dropped: all are asked for from the first that is missing."""
        if room.lost_behind != room.num_prompt_logprobs:
            room.lost_behind = room.num_prompt_logprobs
            room.repeat_gap_s, room.next_repeat = 1.0, turn.now
            self.repeat(room, turn)

    def await_logprobs(self, room: DecodeRoom, first: FirstToken, now: float) -> None:
        """All pages are here. The log-probabilities take another way: if they are not here soon, they are lost."""
        room.arrived = first
        room.repeat_gap_s, room.next_repeat = 1.0, now + 1.0

    def unanswered(self, room: DecodeRoom, now: float) -> AttemptFailed | None:
        """Whether an attempt waits for what will not come.

        An offer that has nobody to go to: refused for good, or not there for too long. Or what prefill sent is lost.
        """
        if room.arrived is not None and now >= (room.times.landed or now) + _LOGPROBS_S:
            return AttemptFailed(room, FailReason.TRANSFER_FAILED, "log-probabilities of the prompt did not come")
        if room.sent_at is not None and self._links.endpoints.is_fencing:
            room.sent_at = now  # what arrived is not heard before that fence is there
        if room.sent_at is not None and room.state is DecodeState.GRANTED and now >= room.sent_at + _ARRIVAL_S:
            return AttemptFailed(room, FailReason.TRANSFER_FAILED, "prefill has sent everything, not all has arrived")
        if room.state is not DecodeState.OFFERED or room.prefill is None or self._links.is_ready(room.prefill):
            return None
        refusal = self._links.refusals.get(room.prefill)
        if refusal is not None:
            return AttemptFailed(room, *refusal)
        if now - room.offered_at > _BOOTSTRAP_S:
            return AttemptFailed(room, FailReason.NO_PEER, "the prefill worker does not answer")
        return None

    def _take_lease(self, room: DecodeRoom) -> None:
        """Lease what is cached, or more of it: never shorter than before, unless the lease was given up."""
        request, cache = room.request, self._parts.cache
        if request.lease is None:
            limit = None if self._parts.scheduler.running.uses_tree(request) else 0
            match = cache.match(request.namespace, request.tokens, request.keys, limit)
            request.lease = cache.lease_kv(match, room.attempt_len)
        elif room.leased_version != cache.version and self._next_key(room):
            request.lease = cache.lengthen(request.lease, request.tokens, request.keys)
        room.leased_version = cache.version
        self._parts.scheduler.waiting.hold(request)

    # ------------------------------------------------------------ grant

    def started(self, room: DecodeRoom, cached_len: int, turn: EngineTurn) -> None:
        """Prefill begins: the room waits for its grant."""
        if room.state is DecodeState.OFFERED:
            room.move(DecodeEvent.START)
            room.times.started, room.prefill_cached_len = turn.now, cached_len
            room.request.origin = Origin.FETCHED
            self._parts.scheduler.waiting.add(room.request)
        elif room.state is DecodeState.GRANTED:
            room.next_repeat = turn.now  # it asks again: the grant was lost
            self.repeat(room, turn)

    def fetch(self, request: Request, reserve: Needs, turn: EngineTurn) -> TryOutcome:
        """Grant the whole delta or nothing. The scheduler's queue says whose turn it is."""
        room = self._rooms.of_request(request)
        if room is None or room.prefill is None or self._waits_for_duplicate(room, turn.now):
            return TryOutcome.HELD_BACK
        if not self._links.is_ready(room.prefill):
            return TryOutcome.HELD_BACK
        self._take_lease(room)
        missing = self._missing(room)
        scheduler = self._parts.scheduler
        leased = request.lease.num_pages if request.lease else 0
        needs = tuple(map(len, missing))
        if not scheduler.waiting.yield_to(request, needs, reserve) or not self._parts.budget.make_room(needs):
            return TryOutcome.NO_ROOM
        ticket = self.tickets.grant(room.prefill, room.room, room.attempt, missing)
        if ticket is None:
            return TryOutcome.NO_ROOM
        scheduler.waiting.unhold(request)
        scheduler.waiting.enter(request)
        room.ticket, room.sent_at = ticket, None
        self.tickets.open(ticket, room, self._next_key(room), turn)
        self._planned_bytes += self.tickets.num_bytes(ticket)
        room.move(DecodeEvent.GRANT)
        room.times.granted = turn.now
        room.decode_cached_len = max(room.decode_cached_len, min(leased * self._page_size, request.prompt_len))
        room.repeat_gap_s, room.next_repeat = 1.0, turn.now
        self.repeat(room, turn)
        return TryOutcome.TAKEN

    def _missing(self, room: DecodeRoom) -> list[range]:
        """Page indexes to be sent, per pool: what continuing behind the prompt needs and the lease does not hold."""
        lease, num_pages = room.request.lease, self._config.cache.num_pages(room.attempt_len)
        missing = []
        for pool, kept in enumerate(self._config.cache.pools):
            first = kept.first_needed(room.attempt_len, self._page_size)
            if lease is not None and lease.first_page(pool) < lease.num_pages:
                first = lease.num_pages
            missing.append(range(first, num_pages))
        return missing

    def _waits_for_duplicate(self, room: DecodeRoom, now: float) -> bool:
        """Whether the room's next page is on its way to another room; for a bounded time."""
        key = self._next_key(room)
        if not key or not self.tickets.is_coming(key):
            room.waits_since = None
            return False
        if room.waits_since is None:
            room.waits_since = now
        return now - room.waits_since < self._config.options.share_wait_s

    def _next_key(self, room: DecodeRoom) -> bytes:
        request = room.request
        if not self._parts.scheduler.running.uses_tree(request):
            return b""
        first = (request.lease.num_pages if request.lease else 0) * KEY_BYTES
        return bytes(request.keys[first : first + KEY_BYTES])

    # ------------------------------------------------------------ landing

    def sent(self, ticket: Ticket, now: float) -> None:
        """Prefill says that it has sent everything of a ticket."""
        room = self.tickets.holder_of(ticket)
        if room is not None and room.sent_at is None:
            room.sent_at = now

    def landed(self, report: Landed, turn: EngineTurn) -> Outcome | None:
        ticket, heard = self.tickets.landed(report, turn)
        room = self.tickets.holder_of(ticket)
        if ticket is None or room is None:
            return None
        if heard is Heard.COMPLETE:
            room.move(DecodeEvent.LAND)
            room.times.landed = turn.now
            verification = self._receiver.verification(ticket, room.attempt_len)
            if verification is None:
                return self._accept(ticket, room, turn)
            turn.do(verification)
        elif heard is Heard.BREACH:
            return AttemptFailed(room, FailReason.BAD_EXTENT, "prefill announced pages it was not granted")
        return None

    def verified(self, report: PagesVerified, turn: EngineTurn) -> Outcome | None:
        ticket = self._receiver.get(report.ticket)
        room = self.tickets.holder_of(ticket)
        if ticket is None or room is None:
            return None
        if report.problem is not None:
            ticket.is_refuted = True
            return AttemptFailed(room, FailReason.TRANSFER_FAILED, report.problem, fence=ticket.peer)
        return self._accept(ticket, room, turn)

    def _accept(self, ticket: Ticket, room: DecodeRoom, turn: EngineTurn) -> Outcome:
        """Everything has landed: the pages are the room's, the last announcement holds its first token."""
        payload = ticket.coverage.payload or b""
        try:
            first = decode_first_token(payload)
        except ProtocolError as error:
            return AttemptFailed(room, FailReason.TRANSFER_FAILED, str(error))
        if not 0 <= first.token < self._config.vocab_size:
            return AttemptFailed(room, FailReason.BAD_EXTENT, "prefill's token is beyond the vocabulary")
        room.ticket = None
        self.tickets.forget(ticket)
        firsts = [missing.start for missing in ticket.coverage.missing]
        room.request.own(tuple(list(pages) for pages in self._receiver.accept(ticket)), firsts)
        self.tickets.over(ticket, turn)
        num_bytes = self.tickets.num_bytes(ticket)
        self._learn(ticket.peer, room, num_bytes, first)
        room.transferred_bytes += num_bytes + len(payload)
        room.transferred_state_bytes += self.tickets.num_state_bytes(ticket)
        self._landed_bytes += num_bytes
        return Arrived(room, first)

    # ------------------------------------------------------------ what it takes

    def _learn(self, peer: PeerName, room: DecodeRoom, num_bytes: int, first: FirstToken) -> None:
        """A hand-over is what an offer took besides its time on prefill's clock, unless the grant waited here."""
        times = room.times
        if times.started is None or times.granted is None or times.landed is None:
            return
        if times.granted - times.started <= _AT_ONCE_S:
            seconds = times.landed - room.offered_at - first.held_ms / 1000.0
            left_bytes = max(0, num_bytes - first.sent_bytes)
            self._ways.setdefault(peer, WayPrice()).learn(left_bytes, seconds, times.landed)

    def way_from(self, peer: PeerName) -> Way | None:
        """What a hand-over by one prefill worker takes. None: not measured."""
        price = self._ways.get(peer)
        return None if price is None else price.way

    def byte_s_of(self, request: Request) -> float | None:
        """Seconds that a byte takes which prefill sends of a request. None: not measured."""
        room = self._rooms.of_request(request)
        way = None if room is None or room.prefill is None else self.way_from(room.prefill)
        return None if way is None else way.byte_s

    @property
    def quickest_way(self) -> Way | None:
        """What a hand-over takes by the prefill worker that is quickest at it. None: not measured."""
        ways = [way for price in self._ways.values() if (way := price.way) is not None]
        return min(ways, key=lambda way: (way.byte_s or 0.0, way.trip_s), default=None)

    def passed_over(self, peer: PeerName, now: float) -> None:
        """A prompt that this prefill worker could have computed was computed here."""
        if (price := self._ways.get(peer)) is not None:
            price.passed_over(now)

    def forget_way(self, peer: PeerName) -> None:
        """The peer is not one of ours any more."""
        self._ways.pop(peer, None)

    # ------------------------------------------------------------ giving up

    def withdraw(self, room: DecodeRoom, reason: FailReason, turn: EngineTurn) -> None:
        """End the current attempt: revoke its ticket, tell prefill. The room keeps no pages of it."""
        ticket, prefill = room.ticket, room.prefill
        if ticket is not None:
            room.ticket = None
            self.tickets.withdraw(ticket, turn)
        if prefill is not None and self._links.is_ready(prefill):
            self._links.send(prefill, Cancel(room=room.room, reason=reason), turn)

    def metrics(self) -> dict[str, float]:
        """Bytes of pages granted to prefill workers, and of those that landed and were accepted."""
        return {
            "deltaserve_transfer_bytes_planned_total": self._planned_bytes,
            "deltaserve_transfer_bytes_landed_total": self._landed_bytes,
        }


def _offer(room: DecodeRoom, now: float) -> Offer:
    request = room.request
    return Offer(
        room=room.room,
        attempt=room.attempt,
        prompt=bytes(request.tokens),
        prompt_len=request.prompt_len,
        namespace=request.namespace,
        sampling=request.sampling,
        remaining_ms=max(1, int((request.deadline - now) * 1000)),
        cache=request.cache,
        held_len=room.held_len,
        hints=request.hints,
        priority=request.priority,
    )
