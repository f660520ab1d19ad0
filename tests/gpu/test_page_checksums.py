"""Checksums of a GPU's pages: those that the host's memory has of the same bytes, by one copy for all pages."""

import pytest
import torch

from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.copy_plan import PageSlice
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
FULL = PageGroup("kv", num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
DRAFT = PageGroup("draft", num_layers=1, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
PAGES = tuple(map(PageId, (31, 0, 7, 7, 12)))


@pytest.mark.parametrize("slices", [None, [[PageSlice(64, 32), PageSlice(128, 64)], [PageSlice(100, 28)]]])
def test_a_gpus_pages_have_the_checksums_of_the_hosts(slices: list[list[PageSlice]] | None) -> None:
    here, there = (DeviceMemory(CacheSpec(4, (FULL, DRAFT)), (32,), device) for device in (CUDA, CPU))
    for mine, theirs in zip(here.kv.arenas, there.kv.arenas, strict=True):
        mine.bytes.copy_(torch.randint(0, 256, mine.bytes.shape, dtype=torch.uint8, device=CUDA))
        theirs.bytes.copy_(mine.bytes)
    here.checksums(PoolId(0), PAGES, slices)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        told = here.checksums(PoolId(0), PAGES, slices)
    assert told == there.checksums(PoolId(0), PAGES, slices)
    assert sum(event.count for event in profile.key_averages() if "Memcpy DtoH" in event.key) == 1
