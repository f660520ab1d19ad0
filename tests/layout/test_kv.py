"""Byte arithmetic of a page group."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.base.extents import Extent
from deltaserve.base.ids import RegionId
from deltaserve.layout.dtype import DType
from deltaserve.layout.kv import KvLayout, page_copies, page_spans
from deltaserve.layout.shard import Shard
from deltaserve.layout.spec import PageGroup

QWEN3_32B = PageGroup("full", num_layers=64, num_kv_heads=8, head_dim=128, dtype=DType.FP8_E4M3)
SMALL = KvLayout(PageGroup("full", num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32), page_size=4)
HERE, THERE = RegionId(1), RegionId(2)
page_lists = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


def test_a_head_of_a_large_model_is_one_mebibyte() -> None:
    layout = KvLayout(QWEN3_32B, page_size=64)
    assert layout.head_bytes == 1 << 20
    assert layout.page_bytes == 8 << 20
    assert KvLayout(QWEN3_32B, 64, Shard(1, 2)).page_bytes == 4 << 20
    assert KvLayout(QWEN3_32B, 64, Shard(3, 16)).page_bytes == 1 << 20


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(3, 4), Shard(5, 8)])
def test_bytes_are_those_of_the_shape(dtype: DType, planes: int, shard: Shard) -> None:
    group = PageGroup("g", num_layers=3, num_kv_heads=4, head_dim=8, dtype=dtype, planes=planes)
    layout = KvLayout(group, page_size=16, shard=shard)
    assert layout.page_bytes == math.prod(layout.page_shape) * dtype.itemsize
    assert layout.head_bytes == math.prod(layout.page_shape[1:]) * dtype.itemsize
    assert layout.arena_bytes(7) == 7 * layout.page_bytes


def test_pages_and_heads_are_contiguous_in_row_major_order() -> None:
    shape = (3, *SMALL.page_shape)  # [P, H, L, planes, S, D]
    for index in itertools.product(*(range(length) for length in shape)):
        element = 0
        for position, length in zip(index, shape, strict=True):
            element = element * length + position
        page, head = index[0], index[1]
        start = page * SMALL.page_bytes + head * SMALL.head_bytes
        assert start <= element * 4 < start + SMALL.head_bytes


def test_offsets_beyond_31_and_32_bits() -> None:
    layout = KvLayout(QWEN3_32B, page_size=64)
    for page in (255, 256, 257, 511, 512, 513, 100_000):
        span = layout.span(HERE, Extent(page, 3))
        assert (span.offset, span.num_bytes) == (page * (8 << 20), 24 << 20)
    assert layout.span(HERE, Extent(256, 1)).offset == 1 << 31
    assert layout.span(HERE, Extent(512, 1)).offset == 1 << 32


@given(page_lists)
def test_copies_move_each_page_to_its_place(pairs: list[tuple[int, int]]) -> None:
    src_pages, dst_pages = [src for src, _ in pairs], [dst for _, dst in pairs]
    copies = page_copies(SMALL, HERE, src_pages, THERE, dst_pages)
    moved = [
        (copy.src.offset + done, copy.dst.offset + done)
        for copy in copies
        for done in range(0, copy.src.num_bytes, SMALL.page_bytes)
    ]
    assert moved == [(src * SMALL.page_bytes, dst * SMALL.page_bytes) for src, dst in pairs]
    assert all(copy.src.region == HERE and copy.dst.region == THERE for copy in copies)


def test_consecutive_pages_are_one_descriptor() -> None:
    assert len(page_copies(SMALL, HERE, range(10, 20), THERE, range(30, 40))) == 1
    assert len(page_copies(SMALL, HERE, range(10, 20), THERE, [*range(30, 35), *range(50, 55)])) == 2
    assert page_copies(SMALL, HERE, [], THERE, []) == []


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 source pages for 1 destination"):
        page_copies(SMALL, HERE, [1, 2], THERE, [1])


def test_spans_of_pages() -> None:
    spans = page_spans(SMALL, HERE, [4, 5, 9])
    assert [(span.offset, span.num_bytes) for span in spans] == [
        (4 * SMALL.page_bytes, 2 * SMALL.page_bytes),
        (9 * SMALL.page_bytes, SMALL.page_bytes),
    ]
