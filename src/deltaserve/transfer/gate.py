"""The write gate: per ticket, whether posts may go out and what is outstanding. Lives beside the transport.

    post: gate open? -> in flight += 1 ...... DONE seen: in flight -= 1;  ERROR: the ticket is dirty for good
A chunk is a row of windows; its notification goes with the last of them, so it can never overtake the data. A chunk of
no pages is its notification alone.
"""

from collections import deque
from dataclasses import dataclass, field

from deltaserve.base.extents import Copy, Span
from deltaserve.transfer.commands import PostChunk, TicketId
from deltaserve.transport.base import WriteId


@dataclass(slots=True, eq=False)
class ChunkJob:
    """A chunk on its way: windows not posted yet, writes not DONE yet."""

    command: PostChunk
    windows: deque[tuple[Copy, ...]]
    notification: bytes
    num_bytes: int
    in_flight: set[WriteId] = field(default_factory=set)
    announced: bool = False
    """The write that carries the notification was posted."""

    @property
    def is_last(self) -> bool:
        return self.command.payload is not None


@dataclass(slots=True)
class Gate:
    """One ticket's gate on the writer."""

    ticket: TicketId
    is_open: bool = True
    is_dirty: bool = False
    has_posted: bool = False
    drain_wanted: bool = False
    data_in_flight: int = 0
    """Writes of this ticket posted and not seen DONE, failed ones not counted."""


def cut_windows(copies: list[Copy], window_bytes: int) -> deque[tuple[Copy, ...]]:
    """Group copies into posts of at most `window_bytes`; a longer copy is cut."""
    windows: deque[tuple[Copy, ...]] = deque()
    window: list[Copy] = []
    room = window_bytes
    for copy in copies:
        offset, left = 0, copy.src.num_bytes
        while left:
            part = min(left, room)
            window.append(Copy(_part(copy.src, offset, part), _part(copy.dst, offset, part)))
            offset, left, room = offset + part, left - part, room - part
            if room == 0:
                windows.append(tuple(window))
                window, room = [], window_bytes
    if window:
        windows.append(tuple(window))
    return windows


def _part(span: Span, offset: int, num_bytes: int) -> Span:
    return Span(span.region, span.offset + offset, num_bytes)
