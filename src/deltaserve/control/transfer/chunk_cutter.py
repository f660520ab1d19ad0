"""What a chunk is to each reading rank of a peer: windows of bytes, direct or staged, and the notification behind them.

Arithmetic over routes (core/layout/copy_plan.py): nothing is posted here (endpoint.py).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from deltaserve.control.transfer.commands import PagePairs, PostChunk
from deltaserve.control.transfer.endpoint_config import EndpointConfig, Memory
from deltaserve.control.transfer.gate import ChunkJob, bytes_of, cut_windows
from deltaserve.control.transfer.ring import ALIGNMENT
from deltaserve.control.transfer.staging import (
    STAGING,
    StagedPart,
    StagingMode,
    Window,
    choose,
    cut_staged,
    ring_bytes,
)
from deltaserve.core.ids import PeerName, PoolId, RegionId
from deltaserve.core.layout.copy_plan import PlacedPages, Route, plan_cache
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.transport import TransportError
from deltaserve.core.wire.codec import encode_done
from deltaserve.core.wire.messages import Done, Piece, RankEnd

_MAX_RANKS = 64
"""Most ranks of a peer."""


@dataclass(frozen=True, slots=True)
class FarReader:
    """A reading rank of the peer: where its regions are, and what this rank sends it of each page group."""

    rank: int
    regions: Mapping[str, RegionId]
    routes: Mapping[str, Route]
    staged_bytes: int
    """Most bytes of a staged write, where a page is not larger: both rings hold two such writes."""


def _staged(group: str, route: Route, src: PlacedPages, dst: PlacedPages) -> StagedPart:
    return StagedPart.of(group, StagedRoute.of(route), src, dst)


class ChunkCutter:
    """Cuts the chunks of one rank. `mode`: when to stage; None: this rank has no staging memory."""

    def __init__(self, config: EndpointConfig, memory: Memory, mode: StagingMode | None) -> None:
        self._config = config
        self._cache = config.cache
        self._memory = memory
        self._mode = mode
        self._regions = {region.component: RegionId(region.id) for region in config.regions}

    def readers(self, peer: PeerName, theirs: Sequence[RankEnd], far: CacheSpec) -> tuple[FarReader, ...]:
        """Raises TransportError for an impossible number of ranks, or one that announced no region of a page group."""
        if not 0 < len(theirs) <= _MAX_RANKS:
            raise TransportError(f"{peer} announced {len(theirs)} ranks; possible are 1 to {_MAX_RANKS}")
        rank, groups = self._config.shard.rank, self._cache.groups
        plan = plan_cache(self._cache, self._config.shard.size, far, len(theirs))
        regions = [{region.component: RegionId(region.id) for region in end.regions} for end in theirs]
        kept = {group.name for group in far.groups}
        missing = sorted({name for name in kept for of_rank in regions if name not in of_rank})
        if missing:
            raise TransportError(f"{peer} announced no region for {', '.join(missing)}")
        return tuple(
            FarReader(
                reader,
                regions[reader],
                {group.name: plan.route(group.name, rank, reader) for group in groups},
                self._staged_bytes(theirs[reader]),
            )
            for reader in plan.readers_of(rank)
        )

    def _staged_bytes(self, theirs: RankEnd) -> int:
        """Memory of either side may be less than that of two windows."""
        ours = self._config.regions
        rings = (ring_bytes(region.num_bytes) for region in (*ours, *theirs.regions) if region.component == STAGING)
        return max(ALIGNMENT, min((self._config.window_bytes, *(ring // 2 for ring in rings))))

    def writes_rows(self, reader: FarReader) -> bool:
        """Whether pages for this reader go in rows: they are cut otherwise there, and nothing stages them."""
        return self._staging_of(reader) is None and any(route.is_recut for route in reader.routes.values())

    def ahead_bytes(self, reader: FarReader, num_pages: tuple[int, ...]) -> int:
        """Most bytes of a ticket's first write; 0 where it is not staged. `num_pages`: per pool, that it covers."""
        if self._mode is None or self._staging_of(reader) is None:
            return 0
        num_copies, num_bytes = 0, 0
        for pool, count in enumerate(num_pages):
            for group in self._cache.groups_of(PoolId(pool)):
                route = reader.routes[group.name]
                num_copies += count * len(route.heads)
                num_bytes += count * StagedRoute.of(route).num_bytes(route.dst.page_size)
        routes = list(reader.routes.values())
        if not num_bytes or not choose(self._mode, routes, num_copies, num_bytes):
            return 0
        return min(num_bytes, reader.staged_bytes) + ALIGNMENT * len(routes)

    def job(self, command: PostChunk, reader: FarReader) -> ChunkJob:
        windows = self._windows(command, reader)
        num_bytes = sum(map(bytes_of, windows)) + len(command.payload or b"")
        return ChunkJob(command, reader.rank, windows, encode_done(self._done(command, reader)), num_bytes)

    def _staging_of(self, reader: FarReader) -> RegionId | None:
        """The reader's staging memory, if both sides have some."""
        return None if self._mode is None else reader.regions.get(STAGING)

    def _windows(self, command: PostChunk, reader: FarReader) -> deque[Window]:
        region = self._staging_of(reader)
        pools = [self._parts(reader, pairs) for pairs in command.pairs]
        if region is not None and self._is_staged(command, reader):
            return cut_staged(region, [list(starmap(_staged, parts)) for parts in pools], reader.staged_bytes)
        copies = [copy for parts in pools for _, route, src, dst in parts for copy in route.copies(src, dst)]
        return deque(cut_windows(copies, self._config.window_bytes))

    def _is_staged(self, command: PostChunk, reader: FarReader) -> bool:
        """Whether to stage, by the copies that a direct write would take: counted, not made, there may be thousands."""
        if self._mode is None:
            return False
        num_copies, num_bytes = 0, 0
        for pairs in command.pairs:
            for group in self._cache.groups_of(pairs.pool):
                slices = reader.routes[group.name].src_slices
                num_copies += len(pairs.src) * len(slices)
                num_bytes += len(pairs.src) * sum(each.num_bytes for each in slices)
        return choose(self._mode, list(reader.routes.values()), num_copies, num_bytes)

    def _parts(self, reader: FarReader, pairs: PagePairs) -> Iterator[tuple[str, Route, PlacedPages, PlacedPages]]:
        """(page group, its route, source pages, the reader's pages) of each group of a pool that moves something."""
        for group in self._cache.groups_of(pairs.pool):
            route = reader.routes[group.name]
            if not route.has_nothing:
                src = PlacedPages(self._regions[group.name], pairs.src_first, pairs.src)
                yield group.name, route, src, PlacedPages(reader.regions[group.name], pairs.first, pairs.dst)

    def _done(self, command: PostChunk, reader: FarReader) -> Done:
        return Done(
            ticket=command.ticket.seq,
            reader_boot=command.ticket.reader_boot,
            writer_boot=command.ticket.writer_boot,
            chunk=command.chunk,
            pieces=tuple(self._piece(reader, pairs) for pairs in command.pairs),
            payload=command.payload,
        )

    def _piece(self, reader: FarReader, pairs: PagePairs) -> Piece:
        checksums = b""
        if self._config.checksums:
            groups = self._cache.groups_of(pairs.pool)
            routes = [reader.routes[group.name] for group in groups]
            if any(route.is_recut for route in routes):
                src = PlacedPages(RegionId(0), pairs.src_first, pairs.src)
                dst = PlacedPages(RegionId(0), pairs.first, pairs.dst)
                checksums = self._memory.checksums_there(pairs.pool, routes, src, dst)
            else:
                checksums = self._memory.checksums(pairs.pool, pairs.src, [route.src_slices for route in routes])
        return Piece(pool=pairs.pool, first=pairs.first, end=pairs.first + len(pairs.dst), checksums=checksums)
