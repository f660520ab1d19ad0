"""A real Receiver and a real Sender, joined by a lossy channel and a data plane whose writes land at any later time.

Grant, Revoke and Drained may be lost, doubled and reordered; a write may fail and land all the same, in parts, after
its ticket is revoked. The model shadows the ownership of every page. Whatever happens: a byte lands only on pages
GRANTED or QUARANTINED under its own ticket, the source pages of a write that may still read are pinned, and after
`heal` (everything delivered, then a fence of both sides) every page is FREE.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.control.cache.pages import PageState
from deltaserve.control.transfer.commands import PostChunk, TicketId
from deltaserve.control.transfer.receiver import Heard, Ticket
from deltaserve.control.transfer.sender import GrantVerdict, SendTicket
from deltaserve.control.transfer.tables import ReceiverState, SenderState
from deltaserve.core.ids import Attempt, Room, TicketSeq
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.wire.messages import Done, Drain, Drained, Grant, Piece, Revoke
from tests.control.transfer.toys import DECODE, DECODE_BOOT, PREFILL, PREFILL_BOOT, DecodeSide, PrefillSide, done_of

NUM_PAGES = (12, 14)
ToPrefill = tuple[Grant | Revoke, int]
"""(message, the mark its frame carries)"""


@dataclass
class Flight:
    """A posted chunk: on its way, perhaps for ever."""

    post: PostChunk
    num_landed: int = 0
    """Pages that have landed so far."""
    told: bool = False
    """The writer knows: DONE or ERROR."""
    notified: bool = False

    @property
    def num_pages(self) -> int:
        """Pages of the pool with most in this chunk."""
        return max((len(pairs.src) for pairs in self.post.pairs), default=0)


class TicketMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.decode = DecodeSide(NUM_PAGES)
        self.prefill = PrefillSide(NUM_PAGES)
        self.receiver, self.sender = self.decode.receiver, self.prefill.sender
        self.now = 0.0
        self.num_rooms = 0
        self.to_prefill: list[ToPrefill] = []
        self.to_decode: list[Drained] = []
        self.dones: list[Done] = []
        self.flights: list[Flight] = []
        self.ended: set[TicketId] = set()
        self.shadow: dict[TicketId, Ticket] = {}
        """Tickets under which a byte may land: from grant to Done, release or fence."""

    # ------------------------------------------------------------ decode

    @rule(spans=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 4)) for _ in NUM_PAGES]))
    def grant(self, spans: tuple[tuple[int, int], ...]) -> None:
        """As many pages of each pool as that pool lacks, from where it lacks them."""
        self.num_rooms += 1
        room = Room(self.num_rooms.to_bytes(16, "little"))
        missing = [range(first, first + num_pages) for first, num_pages in spans]
        ticket = self.receiver.grant(PREFILL, PREFILL_BOOT, room, Attempt(1), missing)
        if ticket is not None:
            assert ticket.id not in self.ended | self.shadow.keys(), "a ticket number is used twice"
            self.shadow[ticket.id] = ticket
            self.send(self.decode.message(ticket))

    def send(self, message: Grant | Revoke) -> None:
        self.to_prefill.append((message, self.receiver.closed_below(PREFILL, PREFILL_BOOT)))

    @precondition(lambda self: self.shadow)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.shadow.values())))
        self.send(Revoke(ticket=ticket.id.seq) if ticket.is_revoked else self.decode.message(ticket))

    @precondition(lambda self: any(not t.is_revoked for t in self.receiver))
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.receiver if not t.is_revoked]))
        if self.receiver.revoke(ticket, self.now) is Heard.RELEASED:
            self.over(ticket)
        else:
            self.send(Revoke(ticket=ticket.id.seq))

    def over(self, ticket: Ticket) -> None:
        self.ended.add(ticket.id)
        del self.shadow[ticket.id]

    @precondition(lambda self: self.dones)
    @rule(data=st.data(), keep=st.booleans())
    def announce(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.dones) - 1))
        report = self.dones[index] if keep else self.dones.pop(index)
        ticket, heard = self.receiver.landed(PREFILL, report)
        assert heard is not Heard.BREACH
        if ticket is not None and heard is Heard.RELEASED:
            self.over(ticket)

    @precondition(lambda self: any(t.state is ReceiverState.LANDED for t in self.receiver))
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.receiver if t.state is ReceiverState.LANDED]))
        pages = self.receiver.accept(ticket)
        self.over(ticket)
        for pool, of_pool in zip(self.decode.pools, pages, strict=True):
            pool.free(of_pool)  # used, and given back at once: the next grant takes them

    @precondition(lambda self: self.to_decode)
    @rule(data=st.data(), keep=st.booleans())
    def hear_drained(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_decode) - 1))
        self.apply_drained(self.to_decode[index] if keep else self.to_decode.pop(index))

    def apply_drained(self, drained: Drained) -> None:
        key = TicketId(DECODE_BOOT, PREFILL_BOOT, TicketSeq(drained.ticket))
        ticket = self.receiver.get(key)
        heard = self.receiver.drained(key, drained.outcome)
        if heard is Heard.RELEASED and ticket is not None:
            self.over(ticket)
        elif heard is Heard.FENCE:
            self.fence()

    @rule(passed=st.floats(0.0, 0.5))
    def wait(self, passed: float) -> None:
        """Time alone frees nothing; an overdue drain triggers the fence."""
        before = [pool.num_free for pool in self.decode.pools]
        self.now += passed
        overdue = self.receiver.overdue(self.now)
        assert [pool.num_free for pool in self.decode.pools] == before
        if overdue:
            self.fence()

    @rule(chance=st.integers(0, 5))
    def fence_now_and_then(self, chance: int) -> None:
        if chance == 0:
            self.fence()
        elif chance == 1:
            self.fence_at_prefill()

    def fence(self) -> None:
        """Decode destroys its endpoint: what is on its way is dropped. Prefill sees errors, and fences as well."""
        for ticket in list(self.receiver):
            if not ticket.is_revoked and self.receiver.revoke(ticket, self.now) is Heard.RELEASED:
                self.over(ticket)
        for ticket in self.receiver.fenced(PREFILL):
            self.over(ticket)
        self.dones.clear()
        for flight in self.flights:
            flight.num_landed, flight.notified = flight.num_pages, True
        self.fence_at_prefill()
        self.sender.advance_mark(DECODE, DECODE_BOOT, self.receiver.closed_below(PREFILL, PREFILL_BOOT))  # the Hello's

    # ------------------------------------------------------------ prefill

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data(), keep=st.booleans())
    def hear_frame(self, data: st.DataObject, keep: bool) -> None:
        """Any frame, in any order; kept: it will come again. A mark never runs ahead of what decode has closed."""
        index = data.draw(st.integers(0, len(self.to_prefill) - 1))
        self.hear(*(self.to_prefill[index] if keep else self.to_prefill.pop(index)))

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data())
    def lose_frame(self, data: st.DataObject) -> None:
        self.to_prefill.pop(data.draw(st.integers(0, len(self.to_prefill) - 1)))

    @rule()
    def hear_everything(self) -> None:
        """A healthy moment: all frames arrive, in order."""
        self.hear_all_frames()
        while self.to_decode:
            self.apply_drained(self.to_decode.pop(0))

    def hear_all_frames(self) -> None:
        while self.to_prefill:
            self.hear(*self.to_prefill.pop(0))

    def hear(self, message: Grant | Revoke, mark: int) -> None:
        self.sender.advance_mark(DECODE, DECODE_BOOT, mark)
        if isinstance(message, Grant):
            self.hear_grant(message)
        else:
            self.hear_revoke(message)

    def hear_grant(self, grant: Grant) -> None:
        key = TicketId(DECODE_BOOT, PREFILL_BOOT, TicketSeq(grant.ticket))
        known = self.sender.get(key)
        _, verdict = self.sender.accept(DECODE, DECODE_BOOT, grant, PromptPages(1 << 20, 4, 4))
        assert (verdict is GrantVerdict.REPEATED) == (known is not None)
        if verdict is GrantVerdict.OPENED:
            assert key not in self.opened, "a ticket is opened twice"
            self.opened.add(key)

    @initialize()
    def nothing_opened(self) -> None:
        self.opened: set[TicketId] = set()
        self.finished: set[TicketId] = set()
        """Whose last chunk was posted."""

    def hear_revoke(self, revoke: Revoke) -> None:
        ticket = self.sender.revoked(DECODE, DECODE_BOOT, revoke.ticket)
        if ticket is None:
            outcome = self.sender.drain_of(DECODE, DECODE_BOOT, revoke.ticket)
            self.to_decode.append(Drained(ticket=revoke.ticket, outcome=outcome))
        elif ticket.state is SenderState.DIRTY:
            self.to_decode.append(Drained(ticket=revoke.ticket, outcome=Drain.DIRTY))
        elif ticket.state is SenderState.OPEN:
            self.sender.close(ticket)
            self.drain_if_idle(ticket)

    def drain_if_idle(self, ticket: SendTicket) -> None:
        """The gate of a closed ticket reports when nothing is outstanding."""
        if ticket.state is not SenderState.CLOSING or self.outstanding(ticket):
            return
        self.sender.gate_drained(ticket.id, Drain.CLEAN)
        if ticket.answer_revoke:
            self.to_decode.append(Drained(ticket=ticket.id.seq, outcome=Drain.CLEAN))

    def outstanding(self, ticket: SendTicket) -> list[Flight]:
        return [f for f in self.flights if f.post.ticket == ticket.id and not f.told]

    def sendable(self) -> list[SendTicket]:
        return [t for t in self.sender if t.is_open and t.id not in self.finished]

    @precondition(lambda self: self.sendable())
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.sendable()))
        books = zip(ticket.firsts, ticket.pages, ticket.cursors, strict=True)
        left = [first + len(pages) - cursor for first, pages, cursor in books]
        counts = [data.draw(st.integers(0, most)) for most in left]
        is_last = counts == left and not self.outstanding(ticket)
        room = zip(self.prefill.pools, counts, strict=True)
        if (not is_last and not any(counts)) or any(pool.num_free < count for pool, count in room):
            return
        taken = zip(self.prefill.pools, counts, strict=True)
        src = tuple(pool.allocate(count) or () for pool, count in taken)
        ends = [cursor + count for cursor, count in zip(ticket.cursors, counts, strict=True)]
        self.flights.append(Flight(self.sender.post(ticket, ends, src, b"first" if is_last else None)))
        if is_last:
            self.finished.add(ticket.id)
        for pool, pages in zip(self.prefill.pools, src, strict=True):
            pool.free(pages)  # the request is over: only the pins hold the bytes in place

    @precondition(lambda self: any(t.is_open for t in self.sender))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The request ends on prefill."""
        ticket = data.draw(st.sampled_from([t for t in self.sender if t.is_open]))
        self.sender.close(ticket)
        self.drain_if_idle(ticket)

    # ------------------------------------------------------------ the data plane

    @precondition(lambda self: any(f.num_landed < f.num_pages for f in self.flights))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Some more pages of a write land, also long after it was called failed."""
        flight = data.draw(st.sampled_from([f for f in self.flights if f.num_landed < f.num_pages]))
        more = data.draw(st.integers(1, flight.num_pages - flight.num_landed))
        self.write(flight, flight.num_landed + more)

    def write(self, flight: Flight, end: int) -> None:
        first, flight.num_landed = flight.num_landed, end
        ticket = self.shadow.get(flight.post.ticket)
        assert ticket is not None, "a byte landed under a ticket that is over"
        expected = PageState.QUARANTINED if ticket.is_revoked else PageState.GRANTED
        for pairs in flight.post.pairs:
            at = pairs.first - ticket.coverage.missing[pairs.pool].start
            assert pairs.dst == ticket.pages[pairs.pool][at : at + len(pairs.src)]
            assert {self.decode.pools[pairs.pool].state(page) for page in pairs.dst[first:end]} <= {expected}

    @precondition(lambda self: any(not f.told for f in self.flights))
    @rule(data=st.data(), ok=st.booleans())
    def complete(self, data: st.DataObject, ok: bool) -> None:
        """The writer learns of a write: DONE when it has landed, ERROR at any time."""
        flight = data.draw(st.sampled_from([f for f in self.flights if not f.told]))
        if ok:
            if flight.num_landed < flight.num_pages:
                self.write(flight, flight.num_pages)
            self.notify(flight)
        flight.told = True
        ticket = self.sender.get(flight.post.ticket)
        if ticket is None:
            return
        if not ok:
            self.sender.failed(ticket.id)
            if ticket.answer_revoke:
                self.to_decode.append(Drained(ticket=ticket.id.seq, outcome=Drain.DIRTY))
            return
        self.sender.chunk_sent(ticket.id, flight.post.chunk)
        if flight.post.payload is not None and ticket.state is not SenderState.DIRTY:
            self.sender.sent_all(ticket)
            if ticket.answer_revoke:
                self.to_decode.append(Drained(ticket=ticket.id.seq, outcome=Drain.CLEAN))
        self.drain_if_idle(ticket)

    def notify(self, flight: Flight) -> None:
        ticket = self.shadow.get(flight.post.ticket)
        if flight.notified or ticket is None:
            return
        flight.notified = True
        post = flight.post
        pieces = tuple(Piece(pool=p.pool, first=p.first, end=p.first + len(p.src)) for p in post.pairs)
        self.dones.append(done_of(ticket, post.chunk, pieces, post.payload is not None))

    def fence_at_prefill(self) -> None:
        """Prefill destroys its endpoint: nothing reads its pages, but what has left them may land all the same."""
        for ticket in self.sender.fenced(DECODE):
            if ticket.answer_revoke:
                self.to_decode.append(Drained(ticket=ticket.id.seq, outcome=Drain.DIRTY))
        for flight in self.flights:
            flight.told = True
        self.flights = [f for f in self.flights if f.num_landed < f.num_pages]

    # ------------------------------------------------------------ what always holds

    @invariant()
    def books_agree(self) -> None:
        self.decode.check()
        self.prefill.check()
        assert {t.id for t in self.receiver} == self.shadow.keys()

    @invariant()
    def no_page_is_in_two_tickets(self) -> None:
        for pool in range(len(NUM_PAGES)):
            pages = [page for ticket in self.receiver for page in ticket.pages[pool]]
            assert len(set(pages)) == len(pages)

    @invariant()
    def bytes_in_flight_have_a_ticket(self) -> None:
        """I5 before it happens: whatever may still land has its pages under that very ticket."""
        for flight in self.flights:
            assert flight.num_landed == flight.num_pages or flight.post.ticket in self.shadow

    @invariant()
    def sources_are_pinned(self) -> None:
        """I10: a write nobody has seen the end of reads pages that cannot be handed out."""
        pinned = [set(pool._pins) for pool in self.prefill.pools]
        for flight in self.flights:
            if not flight.told:
                for pairs in flight.post.pairs:
                    assert set(pairs.src) <= pinned[pairs.pool]

    @invariant()
    def tombstones_are_above_the_mark(self) -> None:
        assert self.sender.num_tombstones <= self.num_rooms

    def teardown(self) -> None:
        if not hasattr(self, "decode"):
            return
        self.heal()
        assert self.decode.all_free
        assert all(pool.num_free == pool.num_pages and not pool.num_pinned for pool in self.prefill.pools)
        assert (len(self.receiver), len(self.sender)) == (0, 0)
        mark = self.receiver.closed_below(PREFILL, PREFILL_BOOT)
        self.sender.advance_mark(DECODE, DECODE_BOOT, mark)
        assert self.sender.num_tombstones == 0

    def heal(self) -> None:
        """Every frame arrives, then both sides fence."""
        self.hear_all_frames()
        self.fence()


TicketMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestTicketMachine = TicketMachine.TestCase
