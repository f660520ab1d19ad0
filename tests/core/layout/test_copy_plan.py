"""Plans for every pair of rank counts, against numpy slices: each byte of a reader once, from a rank that has it."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.extents import Copy
from deltaserve.core.ids import RegionId
from deltaserve.core.layout.copy_plan import (
    PageFormat,
    PlacedPages,
    Route,
    plan_cache,
    plan_routes,
    token_overlaps,
)
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout
from deltaserve.core.layout.shard import Shard, holders
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup
from deltaserve.core.lifetime import Lifetime, Retention
from tests.sim.mutants import Mutant
from tests.sim.mutation import mutated_module

SIZES = (1, 2, 4, 8, 16)
PAIRS = list(itertools.product(SIZES, SIZES))
LAYOUTS = {
    "kv, 2 heads": (HeadBlock(2, 4, 3),),
    "kv, 8 heads": (HeadBlock(8, 4, 2),),
    "latent of all heads": (HeadBlock(1, 2, 9),),
    "conv state, 4 k and 8 v heads": (HeadBlock(4, 1, 3), HeadBlock(4, 1, 3), HeadBlock(8, 1, 5)),
    "recurrent state, 8 v heads": (HeadBlock(8, 1, 6),),
}
HERE, THERE = RegionId(1), RegionId(2)
NUM_PAGES = 12
UNWRITTEN = 255

Plan = tuple[tuple[Route, ...], ...]
Values = npt.NDArray[np.generic]
Arena = npt.NDArray[np.generic]


def values_of(blocks: Sequence[HeadBlock], num_tokens: int) -> list[Values]:
    """Values of each block [heads, rows, tokens, width]: no two elements of a block's head and row are equal mod
    251."""
    start = 0
    out: list[Values] = []
    for heads, rows, width in blocks:
        count = heads * rows * num_tokens * width
        out.append((np.arange(start, start + count) % 251).reshape(heads, rows, num_tokens, width))
        start += count
    return out


def arena_of(values: Sequence[Values], layout: PageFormat, rank: int, placed: PlacedPages, dtype: str) -> Arena:
    """[pages, elements] of a rank: what numpy slices put there, UNWRITTEN elsewhere."""
    pages = []
    for index in range(placed.first, placed.first + len(placed.pages)):
        tokens = slice(index * layout.page_size, (index + 1) * layout.page_size)
        parts = [block[slice(*Shard(rank, layout.num_ranks).heads(len(block))), :, tokens].ravel() for block in values]
        pages.append(np.concatenate(parts))
    arena = np.full((NUM_PAGES, len(pages[0]) if pages else layout.page_bytes), UNWRITTEN, dtype)
    if pages:
        arena[list(placed.pages)] = np.stack(pages)
    return arena


def move(copies: Sequence[Copy], src: Arena, dst: Arena, times: npt.NDArray[np.int64]) -> None:
    source, target = src.reshape(-1).view(np.uint8), dst.reshape(-1).view(np.uint8)
    for here, there in copies:
        assert (here.region, there.region) == (HERE, THERE)
        assert here.offset + here.num_bytes <= source.size and there.offset + there.num_bytes <= target.size
        where = slice(there.offset, there.offset + there.num_bytes)
        target[where] = source[here.offset : here.offset + here.num_bytes]
        times[where] += 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_writers", "num_readers"), PAIRS)
def test_every_byte_of_a_reader_comes_once_from_a_rank_that_has_it(
    name: str, num_writers: int, num_readers: int
) -> None:
    check_bytes_of_every_reader(LAYOUTS[name], num_writers, num_readers, plan_routes)


def check_bytes_of_every_reader(
    blocks: Sequence[HeadBlock], num_writers: int, num_readers: int, plan: Callable[[PageFormat, PageFormat], Plan]
) -> None:
    page_size = 2
    src = PageFormat(tuple(blocks), page_size, DType.FP8_E4M3, num_writers)
    dst = PageFormat(tuple(blocks), page_size, DType.FP8_E4M3, num_readers)
    values = values_of(blocks, 4 * page_size)
    here, there = PlacedPages(HERE, 0, (3, 4, 9, 0)), PlacedPages(THERE, 0, (5, 6, 7, 2))
    sources = [arena_of(values, src, rank, here, "uint8") for rank in range(num_writers)]
    routes = plan(src, dst)
    for reader in range(num_readers):
        wanted = arena_of(values, dst, reader, there, "uint8")
        got, times = np.full_like(wanted, UNWRITTEN), np.zeros(wanted.size, np.int64)
        for writer in range(num_writers):
            move(routes[writer][reader].copies(here, there), sources[writer], got, times)
        assert (got == wanted).all()
        assert (times.reshape(wanted.shape)[list(there.pages)] == 1).all()
        assert times.sum() == len(there.pages) * dst.page_bytes


CUT_CONTIGUOUSLY = Mutant(
    "conv_state_cut_contiguously",
    "T3",
    "deltaserve.core.layout.copy_plan",
    "        src_offset = src.block_start(index) + (head - theirs) * src_head\n"
    "        dst_offset = dst.block_start(index) + (head - first) * dst_head\n",
    "        dst_offset = dst.block_start(index) + (head - first) * dst_head\n"
    "        src_offset = (reader * dst.page_bytes + dst_offset) % src.page_bytes\n",
)
"""A rank's share of a page as one range of it: right where a page is one block of heads."""


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_state_of_several_blocks_that_is_cut_as_one_range_is_found(num_writers: int, num_readers: int) -> None:
    plan = vars(mutated_module(CUT_CONTIGUOUSLY))["plan_routes"]
    check_bytes_of_every_reader(LAYOUTS["kv, 8 heads"], num_writers, num_readers, plan)
    with pytest.raises(AssertionError):
        check_bytes_of_every_reader(LAYOUTS["conv state, 4 k and 8 v heads"], num_writers, num_readers, plan)


@given(st.data(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(PAIRS))
def test_page_sizes_may_differ(data: st.DataObject, name: str, ranks: tuple[int, int]) -> None:
    blocks = LAYOUTS[name]
    sizes = data.draw(st.tuples(st.sampled_from((1, 2, 4, 6)), st.sampled_from((1, 2, 4, 6))))
    src = PageFormat(blocks, sizes[0], DType.FP8_E4M3, ranks[0])
    dst = PageFormat(blocks, sizes[1], DType.FP8_E4M3, ranks[1])
    pages = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=6)
    here = PlacedPages(HERE, data.draw(st.integers(0, 3)), data.draw(pages))
    there = PlacedPages(THERE, data.draw(st.integers(0, 3)), data.draw(pages))
    if sizes[0] == sizes[1]:
        there = PlacedPages(THERE, here.first, data.draw(st.permutations(range(NUM_PAGES)))[: len(here.pages)])
    values = values_of(blocks, 60)
    reader = data.draw(st.integers(0, ranks[1] - 1))
    got = np.full((NUM_PAGES, dst.page_bytes), UNWRITTEN, np.uint8)
    times = np.zeros(got.size, np.int64)
    for writer, row in enumerate(plan_routes(src, dst)):
        move(row[reader].copies(here, there), arena_of(values, src, writer, here, "uint8"), got, times)
    in_both = range(
        max(here.first * sizes[0], there.first * sizes[1]),
        min((here.first + len(here.pages)) * sizes[0], (there.first + len(there.pages)) * sizes[1]),
    )
    wanted = arena_of(values, dst, reader, there, "uint8")
    assert (got.ravel()[times > 0] == wanted.ravel()[times > 0]).all()
    assert times.max(initial=0) <= 1
    assert times.sum() == len(in_both) * dst.page_bytes // dst.page_size


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 8)])
def test_another_dtype_is_for_staging_alone(num_writers: int, num_readers: int) -> None:
    """No write converts; the runs of elements that a gather and a scatter go by are planned all the same."""
    blocks = LAYOUTS["kv, 2 heads"]
    src = PageFormat(blocks, 4, DType.FLOAT32, num_writers)
    dst = PageFormat(blocks, 2, DType.FLOAT16, num_readers)
    values = values_of(blocks, 8)
    here, there = PlacedPages(HERE, 0, (3, 1)), PlacedPages(THERE, 1, (5, 6, 2))
    routes = plan_routes(src, dst)
    for reader in range(num_readers):
        wanted = arena_of(values, dst, reader, there, "float16")
        got = np.full_like(wanted, UNWRITTEN)
        for writer in range(num_writers):
            route = routes[writer][reader]
            assert route.needs_staging
            with pytest.raises(ValueError, match="float32 to float16"):
                route.copies(here, there)
            source = arena_of(values, src, writer, here, "float32").ravel()
            for start, target, count in route.element_copies(here, there):
                got.reshape(-1)[target // 2 : target // 2 + count] = source[start // 4 : start // 4 + count]
        assert (got == wanted).all()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_writers", "num_readers"), PAIRS)
def test_every_head_has_one_writer_and_replicas_share_the_work(name: str, num_writers: int, num_readers: int) -> None:
    for block in LAYOUTS[name]:
        src, dst = (PageFormat((block,), 2, DType.FP8_E4M3, size) for size in (num_writers, num_readers))
        routes = plan_routes(src, dst)
        heads_sent = [sum(run.num_heads for route in row for run in route.heads) for row in routes]
        wanted = [
            end - first for first, end in (Shard(r, num_readers).heads(block.num_heads) for r in range(num_readers))
        ]
        assert sum(heads_sent) == sum(wanted)
        if num_readers >= num_writers:
            assert len(set(heads_sent)) == 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_equal_sizes_pair_rank_with_rank_and_move_whole_pages(name: str, size: int) -> None:
    layout = PageFormat(LAYOUTS[name], 4, DType.BFLOAT16, size)
    for writer, row in enumerate(plan_routes(layout, layout)):
        assert [route.reader for route in row if not route.has_nothing] == [writer]
        assert row[writer].is_whole
        assert [route.is_whole for route in row].count(True) == 1


def test_a_latent_comes_from_the_writers_in_turn() -> None:
    src, dst = (PageFormat((HeadBlock(1, 4, 8),), 4, DType.BFLOAT16, size) for size in (4, 8))
    senders = [[w for w, row in enumerate(plan_routes(src, dst)) if row[r].heads] for r in range(8)]
    assert senders == [[0], [1], [2], [3], [0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("num_heads", "size"),
    [(heads, size) for heads in (1, 2, 4, 6, 8) for size in (*SIZES, 3, 12) if Shard(0, size).fits(heads)],
)
def test_holders_are_the_ranks_that_hold_a_head(num_heads: int, size: int) -> None:
    for head in range(num_heads):
        ranks = [rank for rank in range(size) if head in range(*Shard(rank, size).heads(num_heads))]
        assert list(holders(num_heads, head, size)) == ranks


# ---------------------------------------------------------------- descriptors

KV = (HeadBlock(8, 4, 2),)


def route_of(num_writers: int, num_readers: int, writer: int, reader: int, page_size: int = 4) -> Route:
    src, dst = (PageFormat(KV, page_size, DType.FLOAT32, size) for size in (num_writers, num_readers))
    return plan_routes(src, dst)[writer][reader]


def test_equal_shards_merge_what_is_consecutive_on_both_sides() -> None:
    route = route_of(2, 2, 1, 1)
    size = route.src_page_bytes
    copies = route.copies(PlacedPages(HERE, 7, range(10, 20)), PlacedPages(THERE, 7, [*range(30, 35), *range(50, 55)]))
    assert [(src.offset // size, dst.offset // size, src.num_bytes // size) for src, dst in copies] == [
        (10, 30, 5),
        (15, 50, 5),
    ]
    assert route.copies(PlacedPages(HERE, 7, []), PlacedPages(THERE, 7, [])) == []


def test_unequal_shards_take_one_descriptor_for_each_page_and_run_of_heads() -> None:
    here, there = PlacedPages(HERE, 0, range(10)), PlacedPages(THERE, 0, range(20, 30))
    for num_writers, num_readers, writer, reader in ((1, 2, 0, 1), (2, 1, 1, 0), (4, 2, 3, 1)):
        route = route_of(num_writers, num_readers, writer, reader)
        copies = route.copies(here, there)
        assert len(copies) == 10
        assert {src.num_bytes for src, _ in copies} == {min(route.src_page_bytes, route.dst_page_bytes)}
    assert route_of(2, 4, 0, 3).copies(here, there) == []


def test_the_blocks_of_a_state_are_descriptors_of_their_own() -> None:
    blocks = LAYOUTS["conv state, 4 k and 8 v heads"]
    src, dst = (PageFormat(blocks, 1, DType.FLOAT32, size) for size in (1, 2))
    copies = plan_routes(src, dst)[0][1].copies(PlacedPages(HERE, 4, [2]), PlacedPages(THERE, 4, [6]))
    assert [copy.src.num_bytes for copy in copies] == [2 * 12, 2 * 12, 4 * 20]


def test_offsets_beyond_32_bits() -> None:
    group = PageGroup("full", num_layers=64, num_kv_heads=8, head_dim=128, dtype=DType.FP8_E4M3)
    src, dst = (PageFormat.of_group(group, 64, size) for size in (1, 2))
    (copy,) = plan_routes(src, dst)[0][1].copies(PlacedPages(HERE, 0, [1024]), PlacedPages(THERE, 0, [2048]))
    assert (copy.src.offset, copy.dst.offset, copy.src.num_bytes) == ((8 << 30) + (4 << 20), 8 << 30, 4 << 20)

    whole = plan_routes(src, src)[0][0]
    (copy,) = whole.copies(PlacedPages(HERE, 0, [255, 256, 257]), PlacedPages(THERE, 0, [511, 512, 513]))
    assert (copy.src.offset, copy.dst.offset, copy.src.num_bytes) == (255 << 23, 511 << 23, 3 << 23)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_page_is_as_long_as_the_arenas_page(dtype: DType, num_ranks: int) -> None:
    group = PageGroup("g", num_layers=3, num_kv_heads=4, head_dim=8, dtype=dtype)
    for rank in range(num_ranks):
        arena = KvLayout(group, 16, Shard(rank, num_ranks))
        assert PageFormat.of_group(group, 16, num_ranks).page_bytes == arena.page_bytes


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_whole_pages_go_each_to_its_place(pairs: list[tuple[int, int]]) -> None:
    route = route_of(1, 1, 0, 0)
    size = route.src_page_bytes
    here, there = PlacedPages(HERE, 3, [s for s, _ in pairs]), PlacedPages(THERE, 3, [d for _, d in pairs])
    moved = [
        (copy.src.offset + done, copy.dst.offset + done)
        for copy in route.copies(here, there)
        for done in range(0, copy.src.num_bytes, size)
    ]
    assert moved == [(src * size, dst * size) for src, dst in pairs]


def test_lists_that_do_not_match_are_refused() -> None:
    route = route_of(1, 1, 0, 0)
    with pytest.raises(ValueError, match="2 source pages from 0 for 1 from 0"):
        route.copies(PlacedPages(HERE, 0, [1, 2]), PlacedPages(THERE, 0, [1]))
    with pytest.raises(ValueError, match="for 1 from 1"):
        route.copies(PlacedPages(HERE, 0, [1]), PlacedPages(THERE, 1, [1]))


def test_tokens_are_cut_at_the_page_boundaries_of_either_side() -> None:
    here, there = PlacedPages(HERE, 1, (7, 8)), PlacedPages(THERE, 0, (4, 5))  # tokens [4, 12) and [0, 12)
    assert [tuple(overlap) for overlap in token_overlaps(here, 4, there, 6)] == [
        (7, 0, 4, 4, 2),
        (7, 2, 5, 0, 2),
        (8, 0, 5, 2, 4),
    ]
    assert list(token_overlaps(here, 4, PlacedPages(THERE, 2, (4,)), 6)) == []


# ---------------------------------------------------------------- a model's groups

FULL = PageGroup("full", num_layers=2, num_kv_heads=4, head_dim=8, dtype=DType.BFLOAT16)
LATENT = PageGroup("latent", 2, 1, 8, DType.BFLOAT16, Retention(Lifetime.FULL), planes=1)


def test_expected_writers_are_counted_over_all_groups() -> None:
    both = CacheSpec(16, (FULL, LATENT))
    plan = plan_cache(both, 4, both, 2)
    assert [plan.writers_of(reader) for reader in range(2)] == [(0, 1), (1, 2, 3)]
    assert [plan.readers_of(writer) for writer in range(4)] == [(0,), (0, 1), (1,), (1,)]
    latent = plan_cache(CacheSpec(16, (LATENT,)), 4, CacheSpec(16, (LATENT,)), 2)
    assert [latent.writers_of(reader) for reader in range(2)] == [(0,), (1,)]
    assert latent.readers_of(3) == ()


@pytest.mark.parametrize(("num_writers", "num_readers"), PAIRS)
def test_no_pair_of_ranks_is_left_out(num_writers: int, num_readers: int) -> None:
    spec = CacheSpec(16, (FULL,))
    plan = plan_cache(spec, num_writers, spec, num_readers)
    for writer, reader in itertools.product(range(num_writers), range(num_readers)):
        route = plan.route("full", writer, reader)
        assert (route.writer, route.reader) == (writer, reader)
        assert route.has_nothing == (reader not in plan.readers_of(writer)) == (writer not in plan.writers_of(reader))
    assert all(plan.writers_of(reader) for reader in range(num_readers))


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 1), (2, 1), (1, 2)])
def test_what_one_side_keeps_for_guesses_does_not_move(num_writers: int, num_readers: int) -> None:
    draft = PageGroup("draft", 1, 2, 8, DType.FLOAT32, is_for_guesses=True)
    plain, drafting = CacheSpec(16, (FULL,)), CacheSpec(16, (FULL, draft))
    for src, dst in ((plain, drafting), (drafting, plain)):
        plan = plan_cache(src, num_writers, dst, num_readers)
        for writer, reader in itertools.product(range(num_writers), range(num_readers)):
            route = plan.route("draft", writer, reader)
            assert route.has_nothing
            assert not route.is_recut
            assert route.src_slices == route.dst_slices == ()
        assert plan.pairs == plan_cache(plain, num_writers, plain, num_readers).pairs
    assert not plan_cache(drafting, 1, drafting, 1).route("draft", 0, 0).has_nothing
    with pytest.raises(ValueError, match="different page groups"):
        plan_cache(plain, 1, CacheSpec(16, (FULL, PageGroup("more", 1, 2, 8, DType.FLOAT32))), 1)


def test_what_may_differ_and_what_may_not() -> None:
    ours = CacheSpec(16, (FULL,))
    fp8 = PageGroup("full", 2, 4, 8, DType.FP8_E4M3)
    assert not plan_cache(ours, 1, CacheSpec(64, (FULL,)), 2).route("full", 0, 0).needs_staging
    assert plan_cache(ours, 1, CacheSpec(16, (fp8,)), 2).route("full", 0, 0).needs_staging
    with pytest.raises(ValueError, match="different page groups"):
        plan_cache(ours, 1, CacheSpec(16, (LATENT,)), 1)
    with pytest.raises(ValueError, match="over 3 ranks"):
        plan_cache(ours, 3, ours, 1)
    with pytest.raises(ValueError, match="different blocks"):
        plan_routes(PageFormat(KV, 4, DType.BFLOAT16), PageFormat((HeadBlock(4, 4, 2),), 4, DType.BFLOAT16))
