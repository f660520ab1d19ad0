"""Windows: never longer than asked, nothing lost, nothing twice, order kept."""

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.transfer.gate import cut_windows
from deltaserve.core.extents import Copy, Span, merge_copies
from deltaserve.core.ids import RegionId

LOCAL, REMOTE = RegionId(0), RegionId(1)


def copies_of(lengths: list[int]) -> list[Copy]:
    """Scattered copies of these lengths: source and destination run differently."""
    out, src, dst = [], 0, 10_000
    for length in lengths:
        out.append(Copy(Span(LOCAL, src, length), Span(REMOTE, dst, length)))
        src, dst = src + length + 3, dst - length - 5
    return out


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 60))
def test_windows_hold_every_byte_once_in_order(lengths: list[int], window_bytes: int) -> None:
    copies = copies_of(lengths)
    windows = cut_windows(copies, window_bytes)
    sizes = [sum(c.src.num_bytes for c in window) for window in windows]
    assert all(0 < size <= window_bytes for size in sizes)
    assert all(size == window_bytes for size in sizes[:-1])
    flat = [copy for window in windows for copy in window]
    assert all(c.src.num_bytes == c.dst.num_bytes > 0 for c in flat)
    assert merge_copies(flat) == copies


def test_no_copies_make_no_windows() -> None:
    assert not cut_windows([], 100)
