"""All memory of a rank that peers may reach: its pages."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_checksums import CHECKED_BYTES
from deltaserve.compute.memory.staged_copies import StagedCopies
from deltaserve.core.extents import Region
from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.core.layout.copy_plan import PageSlice, PlacedPages, Route
from deltaserve.core.layout.prompt_pages import tokens_before
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import Sharing


class DeviceMemory:
    """Safe to use from the transfer thread for pages no step writes."""

    def __init__(
        self,
        cache: CacheSpec,
        num_pages: Sequence[int],
        device: torch.device,
        shard: Shard = Shard(),
        sharing: Sharing = Sharing.PRIVATE,
    ) -> None:
        """`num_pages` per pool of `cache.pools`."""
        self.kv = KvPool(cache, num_pages, device, shard, sharing)
        self._copies = StagedCopies(device)
        self._device = device

    def work_beside_steps(self) -> None:
        """For the thread that moves pages: on a GPU what it asks for, copies and checksums, has a stream of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def regions(self) -> list[tuple[str, Region]]:
        """(component, region): one per group, named as it. Region ids count from 0."""
        arenas = self.kv.arenas
        return [(arena.layout.group.name, arena.region(RegionId(index))) for index, arena in enumerate(arenas)]

    def checksums(
        self, pool: PoolId, pages: Sequence[PageId], slices: Sequence[Sequence[PageSlice]] | None = None
    ) -> bytes:
        """Packed uint32 crc32 of each page, over these slices of each group of the pool, in order; None: all of it."""
        return self.kv.checksums(pool, pages, slices)

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        """Checksums of pages `dst` of a reader, once what `src` holds is copied there: over what is written of each."""
        arenas = [arena for arena in self.kv.arenas if self.kv.cache.pool_of(arena.layout.group) == pool]
        page_bytes = sum(route.dst_page_bytes for route in routes)
        step = max(1, CHECKED_BYTES // max(1, page_bytes))
        sums = []
        for start in range(0, len(dst.pages), step):
            num_pages = len(dst.pages[start : start + step])
            placed = PlacedPages(RegionId(0), dst.first + start, range(num_pages))
            crcs = [0] * num_pages
            for arena, route in zip(arenas, routes, strict=True):
                crcs = self._continued(crcs, StagedRoute.of(route), arena.bytes, src, placed)
            sums += crcs
        return pack_u32(sums)

    def _continued(
        self, crcs: Sequence[int], staged: StagedRoute, arena: Tensor, src: PlacedPages, there: PlacedPages
    ) -> list[int]:
        """Each crc continued over a page of `there`, which are as many pages made here as the reader's."""
        route, tokens = staged.route, staged.tokens(src, there)
        buffer = torch.empty(staged.num_bytes(len(tokens)), dtype=torch.uint8, device=arena.device)
        pages = torch.empty(len(crcs) * route.dst_page_bytes, dtype=torch.uint8, device=arena.device)
        for _ in self._copies.gather(staged, arena, src, tokens, buffer):
            pass
        for _ in self._copies.scatter(staged, buffer, pages, there, tokens):
            pass
        data, continued = pages.cpu().numpy().data, []
        written = tokens_before(tokens.stop, there.first, len(crcs), route.dst.page_size)
        for page, (crc, num_tokens) in enumerate(zip(crcs, written, strict=True)):
            at = page * route.dst_page_bytes
            for offset, num_bytes in route.arriving(num_tokens):
                crc = zlib.crc32(data[at + offset : at + offset + num_bytes], crc)
            continued.append(crc)
        return continued
