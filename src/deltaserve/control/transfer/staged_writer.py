"""The writing side of the staged path: asks for memory, gathers, writes once, and waits for the word of the scatter.

The writer cuts the plan of a window once: page lists and page groups. It asks for memory first and gathers meanwhile;
the plan travels with the bytes. The states of a write are STAGED_WRITE (tables.py).

The first write of a ticket finds its lease there already: it is asked for when the ticket's gate opens, once, ahead of
the forward that computes the pages, and again after each chunk for the next one.

A wait for memory ends: at the end of the patience here or there, as when a window never fits, the writer gives back
what it has and writes directly, counts it and keeps the reason. Where elements must be converted there is no direct
write: that write ends with an error. ERROR keeps its buffer until the fence: bytes of it may still be read.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.control.transfer.commands import TicketId
from deltaserve.control.transfer.ring import StagingRing, StagingTooSmall
from deltaserve.control.transfer.staging import AGAIN_S, StagedWindow, StagingRank
from deltaserve.control.transfer.tables import STAGED_WRITE, StagedWriteEvent, StagedWriteState
from deltaserve.core.extents import Copy, Span
from deltaserve.core.ids import PeerName
from deltaserve.core.machine import advance
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import FenceResult, TransportError, WriteId, WriteState
from deltaserve.core.wire.staged_frames import (
    FrameOfReader,
    StageAck,
    StageAsk,
    StagedData,
    StagedPages,
    StageLease,
    StageRecall,
    StageRefusal,
    StageRelease,
    StageReserve,
    encode_stage,
)


class _AheadKey(NamedTuple):
    """The next write of a ticket to a rank of the peer."""

    peer: PeerName
    rank: int
    ticket: TicketId


@dataclass(slots=True)
class _Ahead:
    """Memory asked for before there is anything to send."""

    write: WriteId
    num_bytes: int
    lease: StageLease | None = None
    """Memory that was lent; None: not yet."""


@dataclass(slots=True, eq=False)
class _StagedWrite:
    """A staged write of ours."""

    id: WriteId
    peer: PeerName
    rank: int
    ticket: TicketId
    window: StagedWindow
    note: bytes | None
    ask_at: float
    """When to ask again, while there is no answer."""
    lease: StageLease | None
    state: StagedWriteState
    gather: Iterator[int] | None = None
    """The gather while it is under way. None: not begun, or over."""
    buffer: Span | None = None
    """Where its bytes are gathered; None: it has no memory here yet."""
    posted: WriteId | None = None
    """The bulk write, or the direct one that took its place."""

    @property
    def waits_for_answer(self) -> bool:
        return self.state in (StagedWriteState.ASKING, StagedWriteState.GATHERED)

    def ask(self) -> StageAsk:
        return StageAsk(write=self.id, num_bytes=self.window.num_bytes)

    def plan(self, lease: StageLease, checksum: int | None) -> StagedData:
        return StagedData(
            write=self.id,
            round=lease.round,
            offset=lease.offset,
            ticket=self.ticket.seq,
            reader_boot=self.ticket.reader_boot,
            writer_boot=self.ticket.writer_boot,
            parts=tuple(
                StagedPages(
                    group=part.group,
                    first=part.dst.first,
                    num_tokens=len(part.tokens),
                    pages=pack_u32(part.dst.pages),
                )
                for part in self.window.parts
            ),
            note=self.note or b"",
            checksum=checksum,
        )


class StagedWriter:
    """All staged writes of a rank. For one thread."""

    def __init__(self, here: StagingRank) -> None:
        self._here = here
        self._writes: dict[WriteId, _StagedWrite] = {}
        self._ahead: dict[_AheadKey, _Ahead] = {}
        self.ring: StagingRing[WriteId] = here.ring()
        """Memory to send from."""
        self.moves: Counter[tuple[StagedWriteState, StagedWriteEvent]] = Counter()
        self.last_reason = ""
        """Why a write went directly, the last time."""

    # ------------------------------------------------------------ asking ahead

    def reserve(self, peer: PeerName, rank: int, ticket: TicketId, num_bytes: int) -> None:
        """Ask for the lease of the ticket's next write, which has at most so many bytes. Once until it is used."""
        key = _AheadKey(peer, rank, ticket)
        if key not in self._ahead:
            ahead = self._ahead[key] = _Ahead(WriteId(next(self._here.ids)), num_bytes)
            self._here.tell(peer, rank, StageReserve(write=ahead.write, num_bytes=num_bytes))

    def reserve_no_more(self, ticket: TicketId) -> None:
        """No write of the ticket comes any more."""
        for key in [key for key in self._ahead if key.ticket == ticket]:
            ahead = self._ahead.pop(key)
            self._here.tell(key.peer, key.rank, StageRelease(write=ahead.write))

    def _find_ahead(self, peer: PeerName, rank: int, write: int) -> _AheadKey | None:
        return next((k for k, of in self._ahead.items() if (k.peer, k.rank, of.write) == (peer, rank, write)), None)

    # ------------------------------------------------------------ writes

    def write(
        self, peer: PeerName, ticket: TicketId, window: StagedWindow, notification: bytes | None, rank: int
    ) -> WriteId:
        """Start a staged write. Raises TransportError if nothing was started."""
        here = self._here
        ahead = self._ahead.pop(_AheadKey(peer, rank, ticket), None)
        if ahead is not None and ahead.num_bytes < window.num_bytes:
            here.tell(peer, rank, StageRelease(write=ahead.write))
            ahead = None
        id = WriteId(next(here.ids)) if ahead is None else ahead.write
        lease = None if ahead is None else ahead.lease
        state = StagedWriteState.ASKING if lease is None else StagedWriteState.LENT
        write = _StagedWrite(id, peer, rank, ticket, window, notification, here.now + AGAIN_S, lease, state)
        if lease is None:
            here.send(peer, rank, write.ask())
        self._writes[id] = write
        here.counters["staged_writes"] += 1
        here.counters["staged_ahead"] += lease is not None
        try:
            place = self.ring.ask(id, window.num_bytes, here.now)
        except StagingTooSmall as error:
            self._withdraw(write, str(error))
            return id
        if place is not None:
            self._begin(write, place.offset)
        return id

    def poll(self, id: WriteId) -> WriteState:
        write = self._writes.get(id)
        if write is None:
            return WriteState.ERROR
        if write.posted is not None and StagedWriteEvent.COMPLETE in STAGED_WRITE[write.state]:
            state = self._here.transport.poll(write.posted)
            if state is WriteState.ERROR:
                self._move(write, StagedWriteEvent.FAIL)
            elif state is WriteState.DONE:
                self._move(write, StagedWriteEvent.COMPLETE)
                self._free_buffer(write)
        if write.state is StagedWriteState.FAILED:
            return WriteState.ERROR
        if write.state is not StagedWriteState.DONE:
            return WriteState.PENDING
        del self._writes[id]
        return WriteState.DONE

    def fence(self, peer: PeerName, result: FenceResult) -> None:
        """The peer's endpoint is gone, or cannot be: then what it may read of ours is nobody else's."""
        self._ahead = {key: ahead for key, ahead in self._ahead.items() if key.peer != peer}
        for write in [write for write in self._writes.values() if write.peer == peer]:
            del self._writes[write.id]
            if result is FenceResult.CLOSED or self.ring.is_waiting(write.id):
                self._free_buffer(write)
            elif self.ring.lease_of(write.id) is not None:
                self.ring.lose(write.id)

    def hear(self, peer: PeerName, rank: int, frame: FrameOfReader) -> None:
        write = self._writes.get(WriteId(frame.write))
        if write is not None and (write.peer, write.rank) == (peer, rank):
            self._answered(write, frame)
            return
        ahead = self._find_ahead(peer, rank, frame.write)
        match frame:
            case StageLease() if ahead is not None:
                self._ahead[ahead].lease = frame
            case StageLease():  # the write is over, as its ask came late
                self._here.tell(peer, rank, StageRelease(write=frame.write))
            case StageRecall() if ahead is not None:
                del self._ahead[ahead]
                self._here.tell(peer, rank, StageRelease(write=frame.write))

    def _answered(self, write: _StagedWrite, frame: FrameOfReader) -> None:
        match frame:
            case StageLease() if write.waits_for_answer:
                write.lease = frame
                self._move(write, StagedWriteEvent.LEND)
                self._post(write)
            case StageLease() if write.lease != frame:  # given again, after the first one's scatter; or too late
                self._here.tell(write.peer, write.rank, StageRelease(write=frame.write))
            case StageRefusal() if write.waits_for_answer:
                self._fall_back(write, frame.reason)
            case StageAck() if StagedWriteEvent.ACK in STAGED_WRITE[write.state]:
                self._move(write, StagedWriteEvent.ACK)

    # ------------------------------------------------------------ turns

    def wait(self) -> None:
        """Look at what waits: for memory here, for an answer."""
        now = self._here.now
        for id, reason in self.ring.give_up(now):
            self._withdraw(self._writes[id], reason)
        for id, place in self.ring.admit(now):
            self._begin(self._writes[id], place.offset)
        for write in self._writes.values():
            if write.waits_for_answer and now >= write.ask_at:
                write.ask_at = now + AGAIN_S
                self._here.tell(write.peer, write.rank, write.ask())

    def move_a_slice(self) -> bool:
        """Move a slice of the oldest gather. False: there is none."""
        for write in self._writes.values():
            if write.gather is None:
                continue
            if next(write.gather, None) is None:
                write.gather = None
                self._move(write, StagedWriteEvent.GATHER)
                self._post(write)
            return True
        return False

    def _begin(self, write: _StagedWrite, offset: int) -> None:
        config = self._here.config
        write.buffer = Span(config.region, config.ring_bytes + offset, write.window.num_bytes)
        write.gather = self._gather(write.window, write.buffer.offset)

    def _gather(self, window: StagedWindow, offset: int) -> Iterator[int]:
        for part in window.parts:
            yield from self._here.memory.gather(part.group, part.staged, part.src, part.tokens, offset)
            offset += part.num_bytes

    def _post(self, write: _StagedWrite) -> None:
        """The bulk write, when both its buffer and its lease are there."""
        if write.state is not StagedWriteState.WRITING or write.lease is None or write.buffer is None:
            return
        window, lease, buffer, here = write.window, write.lease, write.buffer, self._here
        checksum = None if here.proves else here.memory.checksum(buffer.offset, buffer.num_bytes)
        copy = Copy(buffer, Span(window.region, lease.offset, buffer.num_bytes))
        plan = encode_stage(write.plan(lease, checksum))
        try:
            write.posted = here.transport.write(write.peer, [copy], plan, write.rank)
            here.counters["staged_bytes"] += window.num_bytes
        except TransportError:
            self._move(write, StagedWriteEvent.FAIL)

    def _withdraw(self, write: _StagedWrite, reason: str) -> None:
        """There is no memory here: the reader's lease, given or not yet, is not needed."""
        self._here.tell(write.peer, write.rank, StageRelease(write=write.id))
        self._fall_back(write, reason)

    def _fall_back(self, write: _StagedWrite, reason: str) -> None:
        """Write directly, with no memory of this write left here or there."""
        self._here.counters["staging_fallbacks"] += 1
        self.last_reason = reason
        self._move(write, StagedWriteEvent.FALL_BACK)
        self._free_buffer(write)
        if not write.window.can_be_direct:
            self._move(write, StagedWriteEvent.FAIL)
            return
        try:
            copies = write.window.direct()
            write.posted = self._here.transport.write(write.peer, copies, write.note, write.rank)
        except TransportError:
            self._move(write, StagedWriteEvent.FAIL)

    def _free_buffer(self, write: _StagedWrite) -> None:
        write.gather = None
        if self.ring.lease_of(write.id) is not None or self.ring.is_waiting(write.id):
            self.ring.give_back(write.id)

    def _move(self, write: _StagedWrite, event: StagedWriteEvent) -> None:
        self.moves[write.state, event] += 1
        write.state = advance(STAGED_WRITE, write.state, event, f"staged write {write.id} to {write.peer}")

    # ------------------------------------------------------------ views

    @property
    def is_moving(self) -> bool:
        """The next turn gathers something."""
        return any(write.gather is not None for write in self._writes.values())

    @property
    def is_quiet(self) -> bool:
        """Nothing is leased, waits or moves."""
        return not (self.ring.num_leased_bytes or self.ring.num_waiting or self._writes or self._ahead)
