"""Workers of several ranks with staging memory, over the loopback transport."""

from collections.abc import Iterator
from random import Random

import torch

from deltaserve.compute.memory.staging_arena import PagesOfGroup, StagingArena
from deltaserve.control.transfer.commands import ExpectPages
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig
from deltaserve.control.transfer.staged_transport import StagedTransport
from deltaserve.control.transfer.staging import STAGING, Staging, StagingConfig, StagingMode
from deltaserve.core.extents import Region
from deltaserve.core.ids import PageId, PeerName, RegionId
from deltaserve.core.layout.copy_plan import PlacedPages
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.transport import Evidence
from deltaserve.core.wire.messages import RegionInfo
from deltaserve.sim.loopback import Fabric, LoopbackTransport
from tests.control.transfer.ranked import HeadMemory, RankedWorker
from tests.control.transfer.test_ranks import TICKET, D, P, Scene

STAGING_REGION = RegionId(9)
NUM_PAGES = 16
WINDOW_BYTES = 700


DST = [0, 5, 6, 11, 2, 15, 8, 10]
"""Pages that TICKET covers, in every pool."""


def expected(num_pools: int) -> ExpectPages:
    return ExpectPages(P, TICKET, (0,) * num_pools, (tuple(map(PageId, DST)),) * num_pools)


class SlowArena(StagingArena):
    """Takes turns to move anything, as large pages do."""

    def __init__(self, buffer: torch.Tensor, groups: dict[str, PagesOfGroup], chance: Random | None) -> None:
        super().__init__(buffer, groups)
        self._chance = chance

    def gather(self, group: str, staged: StagedRoute, src: PlacedPages, tokens: range, offset: int) -> Iterator[int]:
        yield from self._pause()
        yield from super().gather(group, staged, src, tokens, offset)

    def scatter(self, group: str, staged: StagedRoute, offset: int, dst: PlacedPages, tokens: range) -> Iterator[int]:
        yield from self._pause()
        yield from super().scatter(group, staged, offset, dst, tokens)

    def _pause(self) -> Iterator[int]:
        yield from (0 for _ in range(self._chance.randint(0, 12) if self._chance is not None else 0))


class StagedWorker(RankedWorker):
    """Every rank has `num_bytes` of staging memory."""

    window_bytes = WINDOW_BYTES
    evidence = Evidence.COMPLETION

    def __init__(
        self,
        name: PeerName,
        fabric: Fabric,
        cache: CacheSpec,
        num_ranks: int,
        num_bytes: int,
        mode: StagingMode = StagingMode.ON,
        chance: Random | None = None,
    ) -> None:
        self.arenas: list[SlowArena] = []
        self._staging_bytes = num_bytes
        self._mode = mode
        super().__init__(name, fabric, cache, num_ranks, NUM_PAGES, self.window_bytes, chance)

    def _add(
        self, name: PeerName, fabric: Fabric, cache: CacheSpec, shard: Shard, num_pages: int, window_bytes: int
    ) -> None:
        memory = HeadMemory(cache, shard, num_pages)
        buffer = bytearray(self._staging_bytes)
        regions_of_rank = {**memory.arenas, STAGING_REGION: buffer}
        transport = LoopbackTransport(name, fabric, regions_of_rank, evidence=self.evidence)
        infos = []
        regions = [*memory.arenas.items(), (STAGING_REGION, buffer)]
        for (id, data), component in zip(regions, [*(g.name for g in cache.groups), STAGING], strict=True):
            transport.register(Region(id, 0, len(data), "cpu"))
            infos.append(RegionInfo(id=id, base=0, num_bytes=len(data), device="cpu", component=component))
        groups = {
            group.name: PagesOfGroup(torch.frombuffer(memory.arenas[RegionId(index)], dtype=torch.uint8), num_pages)
            for index, group in enumerate(cache.groups)
        }
        arena = SlowArena(torch.frombuffer(buffer, dtype=torch.uint8), groups, self._chance)
        self.arenas.append(arena)
        staging = Staging(StagingConfig(STAGING_REGION, self._staging_bytes, self._mode, patience_s=20.0), arena)
        config = EndpointConfig(cache, tuple(infos), shard, window_bytes=window_bytes, checksums=True, stall_s=60.0)
        self.memories.append(memory)
        self.transports.append(transport)
        self.endpoints.append(Endpoint(config, transport, memory, staging))

    def staged(self) -> Iterator[StagedTransport]:
        for endpoint in self.endpoints:
            assert endpoint.staged is not None
            yield endpoint.staged

    def count(self, name: str) -> int:
        return sum(endpoint.counters[name] for endpoint in self.endpoints)

    def check(self) -> None:
        for staged in self.staged():
            staged.check_integrity()

    @property
    def is_unstaged(self) -> bool:
        """No lease, wait or slice is left."""
        return all(staged.is_quiet for staged in self.staged())


class StagedScene(Scene):
    """A writing and a reading worker, attached, both with staging memory."""

    writer: StagedWorker
    reader: StagedWorker

    def __init__(
        self,
        num_writers: int,
        num_readers: int,
        kv_heads: int = 4,
        seed: int | None = None,
        num_bytes: int = 1 << 14,
        reader_bytes: int | None = None,
        mode: StagingMode = StagingMode.ON,
    ) -> None:
        self._bytes = {P: num_bytes, D: reader_bytes or num_bytes}
        self._mode = mode
        super().__init__(num_writers, num_readers, kv_heads, seed)
        self.reader_does(expected(self.cache.num_pools))

    def worker(self, name: PeerName, num_ranks: int) -> RankedWorker:
        return StagedWorker(name, self.fabric, self.cache, num_ranks, self._bytes[name], self._mode, self.chance)

    def turn(self) -> None:
        super().turn()
        self.writer.check()
        self.reader.check()
