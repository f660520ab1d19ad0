"""The staged path: gather -> one bulk write for each window and pair of ranks -> scatter, below the ticket protocol.

A staged write is a write like any other to whoever posts it (endpoint.py): it has an id, it reads PENDING until every
byte is in its page, then DONE, and the notification bound to it is heard after that. So gates, drains, coverage and
fences hold as they are, and no page of a ticket is written after its clean drain: DONE is the reader's word that it has
*scattered* (StageAck), and a clean Drained needs every write seen DONE. A chunk counts when its notification is heard:
after the scatter, from every writing rank (coverage.py), the last one after all others.

Each rank has one staging region: one half is its ring for what it receives (staged_reader.py), the other for what it
sends (staged_writer.py); staged_transport.py drives both. A lease belongs to one write of one pair of ranks, so nobody
holds one while waiting for another. Here is what both sides share, and `choose`, the one place that says which path a
chunk takes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, NamedTuple, Protocol, Self

from deltaserve.control.transfer.ring import ALIGNMENT, StagingRing
from deltaserve.core.extents import Copy
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.layout.copy_plan import PlacedPages, Route
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.transport import Evidence, Transport, TransportError, WriteId, WriteState
from deltaserve.core.wire.staged_frames import StageFrame, encode_stage

STAGING = "staging"
"""Component of the region that holds a rank's staging memory: the last one it announces, if it has any."""
SHORT_RUN_BYTES = 20 << 10
"""A descriptor costs as much as gathering and scattering so many bytes (benchmarks/bench_staging.py)."""
ASKING_BYTES = 4 << 20
"""Asking for memory and hearing of the scatter take as long as gathering and scattering so many bytes: a short prompt
comes sooner without. From before memory was asked for ahead; `benchmarks/bench_unequal.py --asking 200` takes it anew,
on idle cores: on busy ones it found 2 to 16 ms, for each message waits for a core."""
COUNTERS = (
    "staged_writes",
    "staged_ahead",
    "staged_bytes",
    "scattered_bytes",
    "scatter_microseconds",
    "staging_fallbacks",
    "staging_malformed",
    "staging_refused",
)
"""Writes, those whose lease was there already, bytes written by way of staging memory, and scattered here, and how long
that took; writes that went directly in the end; frames that are none, and plans of what was not granted."""
AGAIN_S = 0.5
"""An ask without an answer, and a lease of which nothing came, is told again so often: one of the two may be lost, or
was overtaken by the news that nobody needs the lease."""


class StagingMode(Enum):
    AUTO = "auto"
    """Staged where it is cheaper."""
    ON = "on"
    """Staged wherever two ranks hold different heads."""


class StagedPart(NamedTuple):
    """Pages of one page group that go from one rank to another."""

    group: str
    staged: StagedRoute
    src: PlacedPages
    dst: PlacedPages
    tokens: range
    """Tokens of the prompt that both sides hold."""

    @classmethod
    def of(cls, group: str, staged: StagedRoute, src: PlacedPages, dst: PlacedPages) -> Self:
        return cls(group, staged, src, dst, staged.tokens(src, dst))

    def pages(self, first: int, end: int) -> Self:
        """The part of the reader's pages [first, end), and what fills them."""
        dst = PlacedPages(self.dst.region, self.dst.first + first, self.dst.pages[first:end])
        route = self.staged.route
        start, stop = dst.first * route.dst.page_size, (dst.first + len(dst.pages)) * route.dst.page_size
        tokens = range(max(start, self.tokens.start), min(stop, self.tokens.stop))
        src_first, src_end = tokens.start // route.src.page_size, -(-tokens.stop // route.src.page_size)
        src_pages = self.src.pages[src_first - self.src.first : src_end - self.src.first]
        return self._replace(src=PlacedPages(self.src.region, src_first, src_pages), dst=dst, tokens=tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes in a buffer, where the next part starts at whole elements of any dtype."""
        return -(-self.staged.num_bytes(len(self.tokens)) // ALIGNMENT) * ALIGNMENT


class StagedWindow(NamedTuple):
    """What one bulk write moves."""

    region: RegionId
    """Region of the reader's staging memory."""
    parts: tuple[StagedPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def can_be_direct(self) -> bool:
        return not any(part.staged.route.needs_staging for part in self.parts)

    def direct(self) -> list[Copy]:
        return [copy for part in self.parts for copy in part.staged.route.copies(part.src, part.dst)]


Window = tuple[Copy, ...] | StagedWindow
"""What one post moves: copies between pages, or a bulk write."""


class StagingMemory(Protocol):
    """A rank's pages and its staging region. Each step of an iterator moves a few MiB."""

    def gather(self, group: str, staged: StagedRoute, src: PlacedPages, tokens: range, offset: int) -> Iterator[int]:
        """Copy from pages to the bytes of the staging region from `offset` on; yields after each slice."""
        ...

    def scatter(self, group: str, staged: StagedRoute, offset: int, dst: PlacedPages, tokens: range) -> Iterator[int]:
        """Copy from the staging region to pages; yields after each slice."""
        ...

    def scatter_microseconds(self) -> int:
        """Microseconds that all scatters took so far, without what was done between their slices."""
        ...

    def num_pages(self, group: str) -> int:
        """Pages in the arena of a page group."""
        ...

    def checksum(self, offset: int, num_bytes: int) -> int:
        """crc32 of bytes of the staging region."""
        ...


def ring_bytes(region_bytes: int) -> int:
    """Bytes of each of the two rings of a staging region."""
    return region_bytes // (2 * ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StagingConfig:
    region: RegionId
    num_bytes: int
    """Bytes of the region: one half to receive, one to send."""
    mode: StagingMode = StagingMode.AUTO
    patience_s: float = 2.0
    """A wait for memory may take so long. Less than a write may, or that ends it."""

    @property
    def ring_bytes(self) -> int:
        return ring_bytes(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Staging:
    config: StagingConfig
    memory: StagingMemory


def choose(mode: StagingMode, routes: Sequence[Route], num_copies: int, num_bytes: int) -> bool:
    """Whether a chunk between two ranks that both have staging memory is staged; a direct write takes `num_copies`."""
    if any(route.is_recut for route in routes):
        return True
    if all(route.is_whole or route.has_nothing for route in routes):  # equal sizes, or a latent: runs of whole pages
        return False
    return mode is StagingMode.ON or num_bytes + ASKING_BYTES < num_copies * SHORT_RUN_BYTES


def cut_staged(region: RegionId, pools: Sequence[Sequence[StagedPart]], window_bytes: int) -> deque[Window]:
    """Windows of at most `window_bytes`, or a page of the reader.

    `pools`: parts of one pool have the same pages in all groups.
    """
    windows: deque[Window] = deque()
    for parts in pools:
        num_pages = len(parts[0].dst.pages) if parts else 0
        page_bytes = sum(part.staged.num_bytes(len(part.tokens)) for part in parts) // max(1, num_pages)
        pages = max(1, window_bytes // max(1, page_bytes))
        for first in range(0, num_pages, pages):
            windows.append(StagedWindow(region, tuple(part.pages(first, first + pages) for part in parts)))
    return windows


class StagingRank:
    """What the two sides of a rank share: its memory, the transport below, counters and time."""

    def __init__(self, transport: Transport, staging: Staging, counters: Counter[str]) -> None:
        """`counters`: COUNTERS."""
        self.transport = transport
        self.memory = staging.memory
        self.config = staging.config
        self.counters = counters
        self.proves = transport.evidence is Evidence.COMPLETION
        """Whether a notification proves that the bytes before it are there."""
        self.now = 0.0
        self.ids = count(1)
        """Numbers of writes, staged or not."""
        self._frames: deque[WriteId] = deque()
        """Writes of ours that only carry a frame and are not seen DONE."""

    def look_at_clock(self, now: float) -> None:
        self.now = now

    def ring(self) -> StagingRing[Any]:
        """A ring of one half of the region."""
        return StagingRing(self.config.ring_bytes, self.config.patience_s)

    def send(self, peer: PeerName, rank: int, frame: StageFrame) -> None:
        """Raises TransportError."""
        self._frames.append(self.transport.write(peer, (), encode_stage(frame), rank))

    def tell(self, peer: PeerName, rank: int, frame: StageFrame) -> None:
        try:
            self.send(peer, rank, frame)
        except TransportError:  # the peer is gone: its writes fail, and so do ours
            return

    def forget_frames(self) -> None:
        """Poll the frames on their way, as a transport wants it of every write."""
        self._frames = deque(w for w in self._frames if self.transport.poll(w) is WriteState.PENDING)
