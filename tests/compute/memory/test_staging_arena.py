"""Staging memory beside the pages of a rank."""

import itertools

import torch

from deltaserve.compute.memory.staging_arena import PagesOfGroup, StagingArena
from deltaserve.core.ids import PageId, RegionId
from deltaserve.core.layout.copy_plan import PageFormat, PlacedPages, plan_routes
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import HeadBlock
from deltaserve.core.layout.staged_route import StagedRoute


def test_the_time_of_scatters_is_counted_without_what_is_done_between_slices() -> None:
    """A clock that is a second later each time it is asked."""
    writer, reader = (PageFormat((HeadBlock(2, 2, 8),), 4, DType.FLOAT32, ranks) for ranks in (1, 2))
    staged = StagedRoute.of(plan_routes(writer, reader)[0][0])
    pages = torch.zeros(3 * reader.page_bytes, dtype=torch.uint8)
    ticks = itertools.count()
    arena = StagingArena(
        torch.ones(1 << 12, dtype=torch.uint8), {"kv": PagesOfGroup(pages, 3)}, lambda: float(next(ticks))
    )
    placed = PlacedPages(RegionId(0), 0, (PageId(2), PageId(0)))
    assert arena.scatter_microseconds() == 0
    slices = 0
    for _ in arena.scatter("kv", staged, 0, placed, range(8)):
        slices += 1
        next(ticks)  # what is done in between
        assert arena.scatter_microseconds() == slices * 1_000_000
    assert slices > 0
    assert arena.scatter_microseconds() == (slices + 1) * 1_000_000  # the last step waits for the device
    assert pages.view(3, -1).any(-1).tolist() == [True, False, True]
