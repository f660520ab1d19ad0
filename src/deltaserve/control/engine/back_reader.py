"""Prefill's half of the way back: pages of answers that decode has computed enter the tree of prefill.

    WriteBack -> Grant of the pages that this tree lacks -> landed -> in the tree

Of windows and states it is what going on at the answer's end needs. What is not worth its way (back_price.py) is not
asked for, and only memory is granted that nobody waits for. Until the pages have landed they are nobody's; then they
enter the tree where the prefix before them is still there, and are freed where it is not. A write back that comes to
nothing costs nothing but what the next turn of its conversation computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.control.engine.api import Event, InstanceConfig
from deltaserve.control.engine.back_price import BackPrice
from deltaserve.control.engine.checks import refuse_write_back
from deltaserve.control.engine.meter import Meter
from deltaserve.control.engine.open_tickets import OpenTickets, grant_of
from deltaserve.control.engine.parts import Parts, facts_of
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.page_fit import may_write_back
from deltaserve.control.peer.table import Peer
from deltaserve.control.transfer.commands import Landed, PagesVerified, PeerFenced, TransferReport
from deltaserve.control.transfer.receiver import Heard, Receiver, Ticket
from deltaserve.core.ids import Attempt, Namespace, PeerName, Room
from deltaserve.core.keys import extend_keys, key_at, num_keys
from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import Drained, Draining, Failed, Message, WriteBack

_LASTS_S = 10.0
"""Pages that have not landed by then are withdrawn."""
_REPEAT_S = 1.0
"""Seconds between two grants of the same ticket; where somebody waits for memory nothing lasts longer."""
_MAX_AT_ONCE = 4
"""Write backs of one decode worker that are under way at once; others are not asked for."""
_POOL_SHARE = 4
"""One write back takes at most one page in so many."""


@dataclass(slots=True, eq=False)
class _Fill:
    """An answer whose pages are on their way here."""

    ticket: Ticket
    namespace: Namespace
    tokens: bytes
    keys: bytes
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
        self, config: InstanceConfig, parts: Parts, links: PeerLinks, receiver: Receiver, meter: Meter
    ) -> None:
        """`meter`: tells what this worker computes in a second."""
        self._config = config
        self._parts = parts
        self._links = links
        self._receiver = receiver
        self._meter = meter
        self._price = BackPrice()
        self._facts = facts_of(config)
        self._tickets: OpenTickets[_Fill] = OpenTickets(config, links, receiver)
        self._fills: dict[tuple[PeerName, Room], _Fill] = {}
        self._num_asked = self._num_dear = self._num_pages = self._num_bytes = 0

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
            case Failed():
                fill = self._fills.get((peer.name, Room(message.room)))
                if fill is not None and fill.attempt == message.attempt:
                    self._withdraw(fill, turn)
            case Draining() | Drained() if self._tickets.drains(peer, message, turn):
                return peer.name
        return None

    def _on_write_back(self, peer: Peer, told: WriteBack, turn: EngineTurn) -> None:
        if not self._config.options.writes_back or turn.is_draining or not self._may_take(peer, told):
            return
        namespace, cache = Namespace(told.namespace), self._parts.cache
        keys = extend_keys(self._config.seed_of(namespace), told.tokens, cache.page_size)
        first, end = cache.match(namespace, told.tokens, keys).num_pages, num_keys(keys)
        if first == end or self._tickets.is_coming(key_at(keys, first)):
            return
        missing = [range(first, end), *self._tails(end)]
        if not self._has_memory(missing) or not self._is_worth(told, missing):
            return
        ticket = self._tickets.grant(peer.name, Room(told.room), Attempt(told.attempt), missing)
        if ticket is None:
            return
        fill = _Fill(ticket, namespace, told.tokens, keys, turn.now, turn.now)
        self._fills[fill.peer, fill.room] = fill
        self._tickets.open(ticket, fill, key_at(keys, first), turn)
        self._num_asked += 1
        self._grant(fill, turn)

    def _may_take(self, peer: Peer, told: WriteBack) -> bool:
        """Whether it is of use here: one of each room, and a few of each worker."""
        of_peer = [fill for fill in self._fills.values() if fill.peer == peer.name]
        if len(of_peer) >= _MAX_AT_ONCE or any(fill.room == told.room for fill in of_peer):
            return False
        is_fit = peer.hello is not None and may_write_back(peer.hello.facts, self._facts)
        return is_fit and refuse_write_back(self._config, told) is None

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

    def _is_worth(self, told: WriteBack, missing: Sequence[range]) -> bool:
        num_bytes = self._tickets.bytes_of(list(map(len, missing)))
        num_tokens = len(missing[0]) * self._config.cache.page_size
        rate = self._meter.prefill_tokens_per_s
        is_worth = self._price.is_worth(num_bytes, num_tokens, told.next_turn_chance, rate)
        self._num_dear += not is_worth
        return is_worth

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
            verification = self._receiver.verification(fill.ticket, token_len(fill.tokens))
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
        self._price.learn(num_bytes, turn.now - fill.since)
        first = fill.ticket.coverage.missing[0].start
        if self._parts.budget.enter_tree(fill.namespace, fill.tokens, fill.keys, first, pages):
            self._num_pages += len(pages[0])
            self._num_bytes += num_bytes

    def _withdraw(self, fill: _Fill, turn: EngineTurn) -> None:
        self._forget(fill)
        self._tickets.withdraw(fill.ticket, turn)

    def _forget(self, fill: _Fill) -> None:
        del self._fills[fill.peer, fill.room]

    # ------------------------------------------------------------ views

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_write_backs_asked_total": self._num_asked,
            "deltaserve_write_backs_dear_total": self._num_dear,
            "deltaserve_write_back_pages_total": self._num_pages,
            "deltaserve_write_back_bytes_total": self._num_bytes,
        }
