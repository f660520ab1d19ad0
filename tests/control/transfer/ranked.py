"""Workers of several ranks over the loopback transport, with the bytes of their heads in their pages."""

from collections import deque
from collections.abc import Sequence
from random import Random

from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.ranks import RankGroup
from deltaserve.core.extents import Region
from deltaserve.core.ids import PageId, PeerName, PoolId, RegionId
from deltaserve.core.layout.copy_plan import PageFormat, PageSlice, PlacedPages, Route
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import RegionInfo
from deltaserve.sim.loopback import Fabric, LoopbackTransport


class HeadMemory:
    """Arenas of one rank; `fill` writes bytes that say which head, of the whole model, of which page they are."""

    def __init__(self, cache: CacheSpec, shard: Shard, num_pages: int) -> None:
        self.cache = cache
        self.shard = shard
        self.layouts = [PageFormat.of_group(group, cache.page_size, shard.size) for group in cache.groups]
        self.arenas = {RegionId(i): bytearray(num_pages * lay.page_bytes) for i, lay in enumerate(self.layouts)}
        self.num_pages = num_pages

    def _heads(self, index: int, page: int) -> list[tuple[str, slice]]:
        """Name of each head that this rank holds, and its bytes."""
        layout, heads = self.layouts[index], []
        for number, block in enumerate(layout.blocks):
            first, end = self.shard.heads(block.num_heads)
            start, size = page * layout.page_bytes + layout.block_start(number), layout.head_bytes(block)
            for head in range(first, end):
                where = slice(start + (head - first) * size, start + (head - first + 1) * size)
                heads.append((f"{self.cache.groups[index].name} block {number} head {head}", where))
        return heads

    def fill(self, page: int, content: int) -> None:
        for index in range(len(self.layouts)):
            for head, where in self._heads(index, page):
                self.arenas[RegionId(index)][where] = head_bytes(head, where.stop - where.start, content)

    def problems(self, page: int, content: int) -> list[str]:
        """Heads of the page that are not those of `content`."""
        return [
            f"page {page} {head}"
            for index in range(len(self.layouts))
            for head, where in self._heads(index, page)
            if self.arenas[RegionId(index)][where] != head_bytes(head, where.stop - where.start, content)
        ]

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...], slices: Sequence[Sequence[PageSlice]]) -> bytes:
        indexes = [i for i, group in enumerate(self.cache.groups) if self.cache.pool_of(group) == pool]
        return pack_u32(
            hash(
                tuple(
                    bytes(self.arenas[RegionId(i)][page * self.layouts[i].page_bytes + at :][:num])
                    for i, of_group in zip(indexes, slices, strict=True)
                    for at, num in of_group
                )
            )
            & 0xFFFFFFFF
            for page in pages
        )

    def checksums_there(self, pool: PoolId, routes: Sequence[Route], src: PlacedPages, dst: PlacedPages) -> bytes:
        raise NotImplementedError("pages are of one size here")


def head_bytes(head: str, num_bytes: int, content: int) -> bytes:
    return Random(f"{head}.{content}").randbytes(num_bytes)


class RankedWorker:
    """One worker's data plane: every rank performs its commands at a pace of its own, reports are reduced.

    Drive it with `perform` and `poll`; `chance` None: all ranks keep step.
    """

    def __init__(
        self,
        name: PeerName,
        fabric: Fabric,
        cache: CacheSpec,
        num_ranks: int,
        num_pages: int = 16,
        window_bytes: int = 1 << 20,
        chance: Random | None = None,
    ) -> None:
        self.name = name
        self.memories: list[HeadMemory] = []
        self.transports: list[LoopbackTransport] = []
        self.endpoints: list[Endpoint] = []
        self.group = RankGroup(num_ranks)
        self._queues: list[deque[TransferCommand]] = [deque() for _ in range(num_ranks)]
        self._chance = chance
        for rank in range(num_ranks):
            self._add(name, fabric, cache, Shard(rank, num_ranks), num_pages, window_bytes)

    def _add(
        self, name: PeerName, fabric: Fabric, cache: CacheSpec, shard: Shard, num_pages: int, window_bytes: int
    ) -> None:
        memory = HeadMemory(cache, shard, num_pages)
        transport = LoopbackTransport(name, fabric, memory.arenas)
        infos = []
        for index, group in enumerate(cache.groups):
            region = Region(RegionId(index), 0, len(memory.arenas[RegionId(index)]), "cpu")
            transport.register(region)
            infos.append(RegionInfo(id=index, base=0, num_bytes=region.num_bytes, device="cpu", component=group.name))
        config = EndpointConfig(cache, tuple(infos), shard, window_bytes=window_bytes, checksums=True)
        self.memories.append(memory)
        self.transports.append(transport)
        self.endpoints.append(Endpoint(config, transport, memory))

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        for queue, of_rank in zip(self._queues, self.group.fan_out(command), strict=True):
            if of_rank is not None:
                queue.append(of_rank)
        return self.poll(now)

    def poll(self, now: float) -> list[TransferReport]:
        reports: list[TransferReport] = []
        for rank, endpoint in enumerate(self.endpoints):
            if self._chance is not None and self._chance.random() < 0.5:
                continue  # this one lags
            queue = self._queues[rank]
            of_rank = [report for _ in range(len(queue)) for report in endpoint.perform(queue.popleft(), now)]
            for report in [*of_rank, *endpoint.poll(now)]:
                reports += self.group.reduce(rank, report)
        return reports

    @property
    def is_quiet(self) -> bool:
        return not any(self._queues) and all(endpoint.is_idle() for endpoint in self.endpoints)
