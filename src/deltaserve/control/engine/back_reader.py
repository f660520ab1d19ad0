"""Prefill's half of the way back: pages that only decode has enter the tree of prefill.

    WriteBack, or Offer.held_len -> Grant of the pages that this tree lacks -> landed -> in the tree

Of windows and states it is what going on at the answer's end needs. What is not worth its way (way_price.py) is not
asked for, and only memory is granted that nobody waits for. Until the pages have landed they are nobody's; then they
enter the tree where the prefix before them is still there, and are freed where it is not. One that comes to nothing
costs nothing but what the next turn of its conversation computes.

A prompt whose next page is on its way here waits for it, as one does for another request that computes the same page:
behind its own offer, which said that decode has more of it, or behind the answer of the turn before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.control.engine.api import Event, InstanceConfig
from deltaserve.control.engine.checks import refuse_write_back
from deltaserve.control.engine.meter import Meter
from deltaserve.control.engine.open_tickets import OpenTickets, grant_of
from deltaserve.control.engine.outflow import Outflow
from deltaserve.control.engine.parts import Parts, facts_of
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.engine.way_price import WayPrice, WaySize
from deltaserve.control.peer.page_fit import may_write_back
from deltaserve.control.peer.table import Peer
from deltaserve.control.sched.request import Request
from deltaserve.control.transfer.commands import Landed, PagesVerified, PeerFenced, TransferReport
from deltaserve.control.transfer.receiver import Heard, Receiver, Ticket
from deltaserve.core.ids import Attempt, Namespace, PeerName, Room
from deltaserve.core.keys import KEY_BYTES, extend_keys, key_at, num_keys
from deltaserve.core.tokens import TOKEN_BYTES, token_len
from deltaserve.core.wire.messages import Drained, Draining, Failed, Message, Offer, WriteBack

_LASTS_S = 10.0
"""Pages that have not landed by then are withdrawn."""
_WAIT_S = 1.0
"""A prompt waits for pages that are on their way here for so long; then it is computed from what is here."""
_REPEAT_S = 1.0
"""Seconds between two grants of the same ticket; where somebody waits for memory nothing lasts longer."""
_MAX_AT_ONCE = 4
"""Write backs of one decode worker that are under way at once; others are not asked for."""
_POOL_SHARE = 4
"""One write back takes at most one page in so many."""


@dataclass(frozen=True, slots=True)
class _Path:
    """What decode has, in whole pages of this side, and how it names that."""

    room: Room
    attempt: Attempt
    namespace: Namespace
    tokens: bytes
    keys: bytes


@dataclass(slots=True, eq=False)
class _Fill:
    """A path whose pages are on their way here."""

    ticket: Ticket
    path: _Path
    first_key: bytes
    """Key of the first page that comes."""
    since: float
    next_grant: float

    @property
    def peer(self) -> PeerName:
        return self.ticket.peer

    @property
    def room(self) -> Room:
        return self.ticket.room

    @property
    def attempt(self) -> Attempt:
        return self.ticket.attempt


class BackReader:
    """All write backs to this worker that are under way. Whoever is returned has to be fenced."""

    def __init__(
        self, config: InstanceConfig, parts: Parts, links: PeerLinks, receiver: Receiver, outflow: Outflow, meter: Meter
    ) -> None:
        """`outflow`: has the prompts that were offered. `meter`: tells what this worker computes in a second."""
        self._config = config
        self._parts = parts
        self._links = links
        self._receiver = receiver
        self._outflow = outflow
        self._meter = meter
        self._price = WayPrice()
        self._cache = parts.cache
        self._facts = facts_of(config)
        self._tickets: OpenTickets[_Fill] = OpenTickets(config, links, receiver)
        self._fills: dict[tuple[PeerName, Room], _Fill] = {}
        self._num_asked = self._num_pulls = self._num_dear = self._num_pages = self._num_bytes = 0

    # ------------------------------------------------------------ driving

    def tick(self, turn: EngineTurn) -> set[PeerName]:
        """Ask again, and give up what takes too long or what others need the memory of."""
        is_short = self._parts.scheduler.waiting.blocked_need > 0
        for fill in list(self._fills.values()):
            if turn.now >= (fill.since + _REPEAT_S if is_short else fill.since + _LASTS_S):
                self._withdraw(fill, turn)
            elif turn.now >= fill.next_grant and self._links.is_ready(fill.peer):
                self._grant(fill, turn)
        return self._receiver.overdue(turn.now)

    def leave(self, turn: EngineTurn) -> None:
        """Nothing is waited for any more."""
        for fill in list(self._fills.values()):
            self._withdraw(fill, turn)

    def drop_peer(self, peer: PeerName, turn: EngineTurn) -> None:
        """The peer's process or endpoint is over."""
        for fill in [fill for fill in self._fills.values() if fill.peer == peer]:
            self._withdraw(fill, turn)

    # ------------------------------------------------------------ frames

    def on_frame(self, peer: Peer, message: Message, turn: EngineTurn) -> PeerName | None:
        match message:
            case WriteBack():
                self._on_write_back(peer, message, turn)
            case Offer():
                self._on_offer(peer, message, turn)
            case Failed():
                fill = self._fills.get((peer.name, Room(message.room)))
                if fill is not None and fill.attempt == message.attempt:
                    self._withdraw(fill, turn)
            case Draining() | Drained() if self._tickets.drains(peer, message, turn):
                return peer.name
        return None

    def _on_write_back(self, peer: Peer, told: WriteBack, turn: EngineTurn) -> None:
        if not self._may_take(peer, Room(told.room), turn) or refuse_write_back(self._config, told) is not None:
            return
        namespace = Namespace(told.namespace)
        keys = extend_keys(self._config.seed_of(namespace), told.tokens, self._cache.page_size)
        path = _Path(Room(told.room), Attempt(told.attempt), namespace, told.tokens, keys)
        missing = self._missing(path)
        if not missing:
            return
        size, rate = self._size(missing), self._meter.prefill_tokens_per_s
        if self._price.is_worth(size, told.next_turn_chance, rate):
            self._ask(peer, path, missing, turn)
        else:
            self._num_dear += 1

    def _on_offer(self, peer: Peer, offer: Offer, turn: EngineTurn) -> None:
        """A prompt is to be computed that begins with pages of decode's tree: they are pulled where they are here
        before they are computed."""
        room, attempt, num_pages = Room(offer.room), Attempt(offer.attempt), offer.held_len // self._cache.page_size
        request = self._outflow.waiting_request(peer.name, room, attempt) if num_pages > 0 else None
        if request is None or not self._may_take(peer, room, turn):
            return
        tokens = offer.prompt[: num_pages * self._cache.page_size * TOKEN_BYTES]
        keys = bytes(request.keys[: num_pages * KEY_BYTES])
        path = _Path(room, attempt, request.namespace, tokens, keys)
        missing = self._missing(path)
        if missing and self._price.is_sooner(self._size(missing), self._meter.prefill_tokens_per_s):
            self._num_pulls += self._ask(peer, path, missing, turn)

    def _may_take(self, peer: Peer, room: Room, turn: EngineTurn) -> bool:
        """Whether pages may come from a decode worker: one path of each room, and a few of each worker."""
        if not self._config.options.writes_back or turn.is_draining:
            return False
        of_peer = [fill for fill in self._fills.values() if fill.peer == peer.name]
        if len(of_peer) >= _MAX_AT_ONCE or any(fill.room == room for fill in of_peer):
            return False
        return peer.hello is not None and may_write_back(peer.hello.facts, self._facts)

    def _missing(self, path: _Path) -> list[range]:
        """Page indexes of a path, per pool, that are to be written: none where this tree has them, or they are on their
        way already."""
        first, end = self._cache.match(path.namespace, path.tokens, path.keys).num_pages, num_keys(path.keys)
        if first == end or self._tickets.is_coming(key_at(path.keys, first)):
            return []
        return [range(first, end), *self._tails(end)]

    def _size(self, missing: Sequence[range]) -> WaySize:
        num_bytes = self._tickets.bytes_of([len(pages) for pages in missing])
        return WaySize(num_bytes, len(missing[0]) * self._config.cache.page_size)

    def _ask(self, peer: Peer, path: _Path, missing: Sequence[range], turn: EngineTurn) -> bool:
        """Grant pages for a path; whether there are any."""
        if not self._has_memory(missing):
            return False
        ticket = self._tickets.grant(peer.name, path.room, path.attempt, missing)
        if ticket is None:
            return False
        fill = _Fill(ticket, path, key_at(path.keys, missing[0].start), turn.now, turn.now)
        self._fills[fill.peer, fill.room] = fill
        self._tickets.open(ticket, fill, fill.first_key, turn)
        self._num_asked += 1
        self._grant(fill, turn)
        return True

    def awaits(self, request: Request, cached_len: int, now: float) -> bool:
        """Whether a request, of which this tree has so many tokens, had better wait for what is on its way here: for a
        bounded time, and where that is sooner here than computed."""
        page_size = self._config.cache.page_size
        key = key_at(request.keys, cached_len // page_size) if self._fills else b""
        fill = next((fill for fill in self._fills.values() if fill.first_key == key), None)
        if fill is None or now >= fill.since + _WAIT_S:
            return False
        return self._price.is_sooner(self._size(fill.ticket.coverage.missing), self._meter.prefill_tokens_per_s)

    def _tails(self, end: int) -> list[range]:
        """Page indexes of each window and state that going on at page index `end` needs."""
        cache = self._config.cache
        needed = (kept.first_needed(end * cache.page_size, cache.page_size) for kept in cache.pools[1:])
        return [range(first, end) for first in needed]

    def _has_memory(self, missing: Sequence[range]) -> bool:
        """Memory that nobody waits for, and no prompt that is being computed will; what is evicted for it was used
        longer ago."""
        budget, sched, needs = self._parts.budget, self._parts.scheduler, tuple(map(len, missing))
        if sched.waiting.blocked_need or needs[0] * _POOL_SHARE > self._config.num_pages[0]:
            return False
        return budget.fits(needs, sched.running.reserve()) and budget.make_room(needs)

    def _grant(self, fill: _Fill, turn: EngineTurn) -> None:
        fill.next_grant = turn.now + _REPEAT_S
        self._links.send(fill.peer, grant_of(fill.ticket), turn)

    # ------------------------------------------------------------ landing

    def on_report(self, report: TransferReport | Event, turn: EngineTurn) -> PeerName | None:
        match report:
            case Landed():
                self._on_landed(report, turn)
            case PagesVerified():
                return self._on_verified(report, turn)
            case PeerFenced():
                self._tickets.fenced(report.peer, report.result, turn)
        return None

    def _on_landed(self, report: Landed, turn: EngineTurn) -> None:
        ticket, heard = self._tickets.landed(report, turn)
        fill = self._tickets.holder_of(ticket)
        if fill is None:
            return
        if heard is Heard.BREACH:
            self._withdraw(fill, turn)
        elif heard is Heard.COMPLETE:
            verification = self._receiver.verification(fill.ticket, token_len(fill.path.tokens))
            if verification is None:
                self._accept(fill, turn)
            else:
                turn.do(verification)

    def _on_verified(self, report: PagesVerified, turn: EngineTurn) -> PeerName | None:
        fill = self._tickets.holder_of(self._receiver.get(report.ticket))
        if fill is None:
            return None
        if report.problem is None:
            self._accept(fill, turn)
            return None
        fill.ticket.is_refuted = True
        self._withdraw(fill, turn)
        return fill.peer

    def _accept(self, fill: _Fill, turn: EngineTurn) -> None:
        """Everything has landed: the pages enter the tree, behind what was there when they were asked for."""
        self._forget(fill)
        self._tickets.forget(fill.ticket)
        pages = self._receiver.accept(fill.ticket)
        self._tickets.over(fill.ticket, turn)
        num_bytes = self._tickets.num_bytes(fill.ticket)
        self._price.learn(num_bytes, turn.now - fill.since, turn.now)
        path, first = fill.path, fill.ticket.coverage.missing[0].start
        if self._parts.budget.enter_tree(path.namespace, path.tokens, path.keys, first, pages):
            waiting = self._outflow.waiting_request(fill.peer, fill.room, fill.attempt)
            if waiting is not None:  # else nobody waited for them, or not for so long
                waiting.pulled_len += len(pages[0]) * self._config.cache.page_size
            self._num_pages += len(pages[0])
            self._num_bytes += num_bytes

    def _withdraw(self, fill: _Fill, turn: EngineTurn) -> None:
        self._forget(fill)
        self._tickets.withdraw(fill.ticket, turn)

    def _forget(self, fill: _Fill) -> None:
        del self._fills[fill.peer, fill.room]
        self._parts.scheduler.waiting.look_again()

    # ------------------------------------------------------------ views

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_write_backs_asked_total": self._num_asked,
            "deltaserve_pulls_total": self._num_pulls,
            "deltaserve_write_backs_dear_total": self._num_dear,
            "deltaserve_write_back_pages_total": self._num_pages,
            "deltaserve_write_back_bytes_total": self._num_bytes,
        }
