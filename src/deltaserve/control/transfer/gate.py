"""The write gate: per ticket, whether posts may go out and what is outstanding. Lives beside the transport.

    post: gate open? -> in flight += 1 ...... DONE seen: in flight -= 1;  ERROR: the ticket is dirty for good
A chunk is, for each reading rank, a row of windows; its notification goes with the last of them, so it can never
overtake the data. A chunk of no pages is its notification alone.
"""

from collections import deque
from dataclasses import dataclass, field

from deltaserve.control.transfer.commands import PostChunk, TicketId
from deltaserve.control.transfer.staging import StagedWindow, Window
from deltaserve.core.extents import Copy, Span
from deltaserve.core.transport import WriteId


def bytes_of(window: Window) -> int:
    if isinstance(window, StagedWindow):
        return window.num_bytes
    return sum(copy.src.num_bytes for copy in window)


@dataclass(slots=True, eq=False)
class ChunkJob:
    """A chunk on its way to one reading rank: windows not posted yet, writes not DONE yet."""

    command: PostChunk
    reader: int
    """Rank of the peer that it goes to."""
    windows: deque[Window]
    notification: bytes
    num_bytes: int
    in_flight: set[WriteId] = field(default_factory=set)
    announced: bool = False
    """The write that carries the notification was posted."""

    @property
    def is_last(self) -> bool:
        return self.command.payload is not None


@dataclass(slots=True)
class ChunkTotal:
    """A chunk over all its readers."""

    num_left: int
    """Readers that it was not sent to in full."""
    num_bytes: int


@dataclass(slots=True)
class Gate:
    """One ticket's gate on the writer, and what waits behind it."""

    ticket: TicketId
    is_open: bool = True
    is_dirty: bool = False
    has_posted: bool = False
    jobs: deque[ChunkJob] = field(default_factory=deque)
    """Chunks in order, until every byte of one was seen DONE."""
    num_in_flight: int = 0
    """Writes posted and not seen DONE, failed ones not counted."""
    bytes_in_flight: int = 0
    """Bytes of the writes counted by `num_in_flight`."""
    unsent: dict[int, ChunkTotal] = field(default_factory=dict)
    """Chunks not seen DONE by all their readers."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Reading rank |-> bytes of staging memory that are asked for ahead of a write. Absent: it is not staged."""

    def next_job(self) -> ChunkJob | None:
        """The first one with a window that may be posted now. None: not before one of its writes is DONE, or never."""
        if not self.is_open or self.is_dirty:
            return None
        return next((job for job in self.jobs if self._may_post(job)), None)

    def _may_post(self, job: ChunkJob) -> bool:
        if job.announced:
            return False
        if len(job.windows) > 1:
            return True
        if job.is_last and any(other.reader == job.reader for other in self.jobs if other is not job):
            return False  # the window with the payload follows all data for that reader
        return not job.in_flight  # the window with the notification follows all others of its chunk

    def drop_jobs(self) -> None:
        """Post nothing more; jobs with writes in flight stay until these are seen DONE."""
        for job in list(self.jobs):
            job.windows.clear()
            if not job.in_flight:
                self.jobs.remove(job)


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
