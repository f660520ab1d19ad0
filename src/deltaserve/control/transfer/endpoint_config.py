"""What an endpoint is told of its rank: its memory, and how to write from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.copy_plan import PageSlice, PlacedPages, Route
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.wire.messages import RegionInfo


class Memory(Protocol):
    """What the endpoint needs of its rank's memory besides moving it. Called for pages that no step writes."""

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        """Packed uint32 crc32 of each page, over the given slices of each group of the pool, in order."""
        ...

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        """Checksums of the pages `dst` as a reader has them, once what `src` holds is copied: of what is written there.

        `routes`: of each group of the pool, in order.
        """
        ...


MAX_WINDOWS = 2
"""Posts in flight per peer."""


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """This rank's memory, as the transport knows it."""

    cache: CacheSpec
    """Layout of the whole model's cache, not of this rank's part."""
    regions: tuple[RegionInfo, ...]
    """One of each page group, named as the group."""
    shard: Shard = Shard()
    """This rank's number and the number of ranks."""
    window_bytes: int = 8 << 20
    """Most bytes of one post: what another ticket of the same peer waits for, times the tickets before it."""
    checksums: bool = False
    stall_s: float = 5.0
    """A write may take so long, and the time its bytes take on a slow link; then it counts as failed."""
