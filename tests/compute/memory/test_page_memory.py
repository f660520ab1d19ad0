"""Pages as peers see them: addresses, bytes, checksums."""

import ctypes
import zlib

import pytest
import torch

from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.page_checksums import checksums_by_copy, page_checksums
from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.compute.memory.staged_copies import StagedCopies
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.core.ids import PageId, PoolId, RegionId
from deltaserve.core.layout.copy_plan import CachePlan, PageSlice, PlacedPages, plan_cache
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout
from deltaserve.core.layout.prompt_pages import PromptPages, tokens_before
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec, PageGroup, PageTerms
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.lifetime import Lifetime, Retention
from deltaserve.core.tokens import unpack_u32

SHORT = Retention(Lifetime.WINDOW, 128)
FULL = PageGroup("kv", num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
DRAFT = PageGroup("draft", num_layers=1, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
WINDOW = PageGroup("window", num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP8_E4M3, retention=SHORT)
CACHE = CacheSpec(4, (FULL, WINDOW, DRAFT))
CPU = torch.device("cpu")


def memory() -> DeviceMemory:
    return DeviceMemory(CACHE, (10, 5), CPU)


def test_regions_name_real_memory() -> None:
    owner = memory()
    regions = owner.regions()
    assert [name for name, _ in regions] == ["kv", "window", "draft"]
    assert [region.id for _, region in regions] == [0, 1, 2]
    sizes = [KvLayout(group, 4).page_bytes * pages for group, pages in ((FULL, 10), (WINDOW, 5), (DRAFT, 10))]
    assert [region.num_bytes for _, region in regions] == sizes
    assert all(region.device == "cpu" for _, region in regions)
    ctypes.memset(regions[0][1].base, 7, 1)  # as a peer's write would
    assert owner.kv.page_arenas[0].bytes[0] == 7


def test_arena_has_the_layout_of_the_contract() -> None:
    """`[P, H, L, planes, S, D]`: one token's K and V land where core/layout/kv.py says."""
    arena = memory().kv.page_arenas[0]
    row = 6 * arena.rows_per_page + 1 * arena.rows_per_head
    values = torch.arange(8, dtype=torch.bfloat16)[None] + 1
    arena.scatter(2, 1, torch.tensor([row * 4 + 3]), values)  # page 6, head 1, layer 2, V, token 3
    view = arena.bytes.view(torch.bfloat16).view(10, *arena.layout.page_shape)
    assert torch.equal(view[6, 1, 2, 1, 3], values[0])
    assert view.count_nonzero() == 8
    for dtype in (torch.bfloat16, torch.float32):
        found = arena.gather(2, 1, torch.tensor([row]), torch.empty(1, 4 * 8, dtype=dtype), Workspace(CPU))
        assert torch.equal(found.view(4, 8)[3], values[0].to(dtype))


def test_checksums_cover_all_groups_of_a_pool() -> None:
    owner = memory()
    full, _, draft = owner.kv.arenas
    size, small = full.layout.page_bytes, draft.layout.page_bytes
    full.bytes.copy_(torch.randint(0, 256, full.bytes.shape, dtype=torch.uint8))
    draft.bytes.copy_(torch.randint(0, 256, draft.bytes.shape, dtype=torch.uint8))
    pages = (PageId(3), PageId(0), PageId(3))
    want = [
        zlib.crc32(
            full.bytes[p * size : (p + 1) * size].numpy().tobytes()
            + draft.bytes[p * small : (p + 1) * small].numpy().tobytes()
        )
        for p in pages
    ]
    assert list(unpack_u32(owner.checksums(PoolId(0), pages))) == want
    draft.bytes[3 * small] ^= 1
    assert unpack_u32(owner.checksums(PoolId(0), pages))[0] != want[0]
    assert owner.checksums(PoolId(1), ()) == b""


@pytest.mark.parametrize("most_bytes", [1, 700, 1 << 20])
def test_checksums_of_copied_pages_are_those_of_pages_in_place(most_bytes: int) -> None:
    """Copies of one page, of some, and of all; slices in the middle of a page, several, and none of a group."""
    generator = torch.Generator().manual_seed(1)
    full, draft = (torch.randint(0, 256, (9, size), dtype=torch.uint8, generator=generator) for size in (256, 96))
    pages = (7, 0, 3, 3, 8)
    cases: list[list[list[PageSlice]]] = [
        [[PageSlice(0, 256)], [PageSlice(0, 96)]],
        [[PageSlice(64, 32), PageSlice(128, 100)], [PageSlice(90, 6)]],
        [[], [PageSlice(5, 1)]],
        [[], []],
    ]
    for slices in cases:
        data = [
            b"".join(
                arena[page, at : at + length].numpy().tobytes()
                for arena, of_arena in zip((full, draft), slices, strict=True)
                for at, length in of_arena
            )
            for page in pages
        ]
        want = [zlib.crc32(of_page) for of_page in data]
        assert page_checksums((full, draft), pages, slices) == want
        assert checksums_by_copy((full, draft), pages, slices, most_bytes) == want
    assert checksums_by_copy((full,), (), [[PageSlice(0, 8)]], most_bytes) == []


@pytest.mark.parametrize("num_tokens", [1, 11, 12, 13, 24, 31])
@pytest.mark.parametrize("reader", [PageTerms(6, (DType.BFLOAT16,) * 2), PageTerms(4, (DType.FP8_E4M3,) * 2)])
def test_a_writer_tells_the_checksums_of_pages_as_the_reader_will_have_them(num_tokens: int, reader: PageTerms) -> None:
    """Pages may have another size, another dtype, and a part of the heads; the last page counts as far as it is
    written."""
    here = CacheSpec(4, (FULL, DRAFT))
    there = here.under(reader)
    ours, theirs = DeviceMemory(here, (10,), CPU), DeviceMemory(there, (10,), CPU, Shard(1, 2))
    for arena in ours.kv.arenas:
        arena.bytes.view(torch.bfloat16).normal_()
    for arena in theirs.kv.arenas:
        numbers = torch.randn(arena.bytes.numel() // arena.layout.group.dtype.itemsize)
        arena.bytes.copy_(numbers.to(torch_dtype(arena.layout.group.dtype)).view(torch.uint8))
    plan = plan_cache(here, 1, there, 2)
    routes = [plan.route(group.name, 0, 1) for group in here.groups]
    prompt = PromptPages(num_tokens, 4, reader.page_size)
    sources = prompt.sources(0, prompt.num_pages)
    src = PlacedPages(RegionId(0), sources.start, [PageId(9 - page) for page in sources])
    dst = PlacedPages(RegionId(0), 0, [PageId(7 - page) for page in range(prompt.num_pages)])
    told = ours.checksums_there(PoolId(0), routes, src, dst)
    assert told != found(theirs, prompt, dst, plan)
    for mine, yours, route in zip(ours.kv.arenas, theirs.kv.arenas, routes, strict=True):
        staged = StagedRoute.of(route)
        tokens = staged.tokens(src, dst)
        buffer = torch.empty(staged.num_bytes(len(tokens)), dtype=torch.uint8)
        list(StagedCopies(CPU).gather(staged, mine.bytes, src, tokens, buffer))
        list(StagedCopies(CPU).scatter(staged, buffer, yours.bytes, dst, tokens))
    assert told == found(theirs, prompt, dst, plan)


def found(reader: DeviceMemory, prompt: PromptPages, dst: PlacedPages, plan: CachePlan) -> bytes:
    """Checksum of each page over what is written of it."""
    routes = [of_group[0][1] for of_group in plan.routes.values()]
    written = tokens_before(prompt.end, dst.first, len(dst.pages), prompt.reader_size)
    return b"".join(
        reader.checksums(PoolId(0), (PageId(page),), [route.arriving(num_tokens) for route in routes])
        for page, num_tokens in zip(dst.pages, written, strict=True)
    )
