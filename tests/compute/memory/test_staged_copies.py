"""Gather, send and scatter, bit for bit as the rows of elements that the plan names (`Route.element_copies`)."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltaserve.compute.memory.element_conversion import ElementConversion, torch_dtype
from deltaserve.compute.memory.staged_copies import SLICE_BYTES, StagedCopies
from deltaserve.core.ids import RegionId
from deltaserve.core.layout.copy_plan import PageFormat, PlacedPages, Route, plan_routes
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import HeadBlock
from deltaserve.core.layout.staged_route import StagedRoute

CPU = torch.device("cpu")
RANKS = list(itertools.product((1, 2, 4, 8), repeat=2))
PAGE_SIZES = list(itertools.product((16, 32, 64), repeat=2))
DTYPES = [
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.BFLOAT16, DType.FP8_E4M3),
    (DType.FP8_E4M3, DType.BFLOAT16),
    (DType.FLOAT32, DType.FP8_E4M3),
    (DType.FLOAT16, DType.FLOAT32),
]
KV = (HeadBlock(8, 4, 2),)
BLOCKS = {
    "kv": KV,
    "fewer heads than ranks": (HeadBlock(2, 4, 3),),
    "latent": (HeadBlock(1, 2, 9),),
    "conv state": (HeadBlock(4, 1, 3), HeadBlock(4, 1, 3), HeadBlock(8, 1, 5)),
}
NUM_PAGES = 12
SRC, DST = RegionId(1), RegionId(2)


def random_arena(layout: PageFormat, seed: int) -> Tensor:
    """[NUM_PAGES * page_bytes] uint8: numbers, some beyond what fp8 holds."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUM_PAGES * layout.page_bytes // layout.dtype.itemsize, generator=generator) * 300
    elements = values.clamp(-448, 448) if layout.dtype is DType.FP8_E4M3 else values
    return elements.to(torch_dtype(layout.dtype)).view(torch.uint8)


def by_elements(route: Route, source: Tensor, src: PlacedPages, target: Tensor, dst: PlacedPages) -> None:
    """One row of elements after the other."""
    src_size, dst_size = route.src.dtype.itemsize, route.dst.dtype.itemsize
    conversion = ElementConversion(CPU)
    for start, there, count in route.element_copies(src, dst):
        row = source[start : start + count * src_size]
        out = target[there : there + count * dst_size]
        if route.src.dtype is route.dst.dtype:
            out.copy_(row)
        else:
            conversion.convert(row.clone(), route.src.dtype, out, route.dst.dtype)


def by_staging(route: Route, source: Tensor, src: PlacedPages, target: Tensor, dst: PlacedPages) -> list[int]:
    staged = StagedRoute.of(route)
    tokens = staged.tokens(src, dst)
    buffer = torch.full((staged.num_bytes(len(tokens)),), 0xAA, dtype=torch.uint8)
    gathered = list(StagedCopies(CPU).gather(staged, source, src, tokens, buffer))
    scattered = list(StagedCopies(CPU).scatter(staged, buffer, target, dst, tokens))
    assert sum(gathered) == sum(scattered) == len(buffer)
    return scattered


def check(blocks: Sequence[HeadBlock], src: PageFormat, dst: PageFormat, here: PlacedPages, there: PlacedPages) -> None:
    routes = plan_routes(src, dst)
    sources = [random_arena(src, rank) for rank in range(src.num_ranks)]
    for reader in range(dst.num_ranks):
        wanted = random_arena(dst, 100 + reader)
        got = wanted.clone()
        for writer, source in enumerate(sources):
            route = routes[writer][reader]
            by_elements(route, source, here, wanted, there)
            by_staging(route, source, here, got, there)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("num_writers", "num_readers"), RANKS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(dtype.value for dtype in pair))
def test_every_byte_is_as_the_plan_says(num_writers: int, num_readers: int, dtypes: tuple[DType, DType]) -> None:
    for src_size, dst_size in PAGE_SIZES:
        src = PageFormat(KV, src_size, dtypes[0], num_writers)
        dst = PageFormat(KV, dst_size, dtypes[1], num_readers)
        torch.manual_seed(src_size + dst_size)
        num_tokens = 128
        here = PlacedPages(SRC, 0, torch.randperm(NUM_PAGES)[: num_tokens // src_size].tolist())
        there = PlacedPages(DST, 0, torch.randperm(NUM_PAGES)[: num_tokens // dst_size].tolist())
        check(KV, src, dst, here, there)


@given(st.data(), st.sampled_from(sorted(BLOCKS)), st.sampled_from(RANKS), st.sampled_from(DTYPES))
def test_any_blocks_any_overlap(
    data: st.DataObject, name: str, ranks: tuple[int, int], dtypes: tuple[DType, DType]
) -> None:
    sizes = data.draw(st.tuples(st.sampled_from((1, 2, 4, 6)), st.sampled_from((1, 2, 4, 6))))
    src = PageFormat(BLOCKS[name], sizes[0], dtypes[0], ranks[0])
    dst = PageFormat(BLOCKS[name], sizes[1], dtypes[1], ranks[1])
    pages = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=6)
    here = PlacedPages(SRC, data.draw(st.integers(0, 3)), data.draw(pages))
    there = PlacedPages(DST, data.draw(st.integers(0, 3)), data.draw(pages))
    check(BLOCKS[name], src, dst, here, there)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_slice_is_short_whatever_is_in_a_page(rows: int) -> None:
    """Nothing is done between two slices for longer than a slice takes, also where one page is larger than a slice."""
    block = HeadBlock(8, rows, 128)
    src, dst = PageFormat((block,), 64, DType.BFLOAT16), PageFormat((block,), 64, DType.BFLOAT16, 2)
    route = plan_routes(src, dst)[0][1]
    pages = range(6)
    source, target = (
        torch.zeros(6 * src.page_bytes, dtype=torch.uint8),
        torch.zeros(6 * dst.page_bytes, dtype=torch.uint8),
    )
    source.random_(0, 255)
    moved = by_staging(route, source, PlacedPages(SRC, 0, pages), target, PlacedPages(DST, 0, pages))
    assert max(moved) <= SLICE_BYTES
    assert torch.equal(target.view(6, -1), source.view(6, 2, -1)[:, 1])


def test_nothing_is_done_before_it_is_asked_for() -> None:
    layout = PageFormat(KV, 16, DType.BFLOAT16)
    staged = StagedRoute.of(plan_routes(layout, layout)[0][0])
    source, buffer = random_arena(layout, 0), torch.zeros(layout.page_bytes, dtype=torch.uint8)
    slices = StagedCopies(CPU).gather(staged, source, PlacedPages(SRC, 0, (3,)), range(16), buffer)
    assert not buffer.any()
    next(slices)
    assert torch.equal(buffer, source[3 * layout.page_bytes : 4 * layout.page_bytes])


def test_the_buffer_has_the_narrower_dtype() -> None:
    wide, narrow = PageFormat(KV, 16, DType.BFLOAT16), PageFormat(KV, 64, DType.FP8_E4M3)
    for src, dst in ((wide, narrow), (narrow, wide)):
        staged = StagedRoute.of(plan_routes(src, dst)[0][0])
        assert staged.dtype is DType.FP8_E4M3
        assert (staged.granule, staged.num_bytes(64)) == (16, 8 * 4 * 2 * 64)
