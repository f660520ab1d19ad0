"""Runs of pages and merged copies: fewer pieces, the same bytes."""

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.extents import Copy, Span, merge_copies
from deltaserve.core.ids import RegionId

HERE, THERE = RegionId(1), RegionId(2)


def copy(src: int, dst: int, num_bytes: int, src_region: RegionId = HERE, dst_region: RegionId = THERE) -> Copy:
    return Copy(Span(src_region, src, num_bytes), Span(dst_region, dst, num_bytes))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_merged_copies_move_the_same_bytes_in_order(pairs: list[tuple[int, int]]) -> None:
    copies = [copy(src * 16, dst * 16, 16) for src, dst in pairs]
    merged = merge_copies(copies)
    assert [byte for item in merged for byte in moved(item)] == [byte for item in copies for byte in moved(item)]
    assert len(merged) <= len(copies)


def moved(item: Copy) -> list[tuple[int, int]]:
    assert item.src.num_bytes == item.dst.num_bytes
    return [(item.src.offset + i, item.dst.offset + i) for i in range(item.src.num_bytes)]


def test_only_neighbours_on_both_sides_join() -> None:
    assert merge_copies([copy(0, 64, 8), copy(8, 72, 8), copy(16, 80, 8)]) == [copy(0, 64, 24)]
    assert len(merge_copies([copy(0, 64, 8), copy(8, 80, 8)])) == 2
    assert len(merge_copies([copy(0, 64, 8), copy(16, 72, 8)])) == 2
    assert len(merge_copies([copy(0, 64, 8), copy(8, 72, 8, src_region=RegionId(9))])) == 2
    assert len(merge_copies([copy(0, 64, 8), copy(8, 72, 8, dst_region=RegionId(9))])) == 2
    assert merge_copies([]) == []
