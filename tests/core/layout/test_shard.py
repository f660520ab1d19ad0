"""Which heads a rank holds, for every pair of sizes, and that any pair can be served by intersection."""

import itertools

import pytest

from deltaserve.core.layout.shard import Shard

HEADS = (1, 2, 4, 6, 8, 12, 32, 40)
SIZES = (1, 2, 3, 4, 8, 16)
FITTING = [(heads, size) for heads, size in itertools.product(HEADS, SIZES) if Shard(0, size).fits(heads)]


def held(num_heads: int, rank: int, size: int) -> list[int]:
    return list(range(*Shard(rank, size).heads(num_heads)))


@pytest.mark.parametrize(("num_heads", "size"), FITTING)
def test_ranks_cover_all_heads_evenly_and_in_order(num_heads: int, size: int) -> None:
    parts = [held(num_heads, rank, size) for rank in range(size)]
    copies = max(1, size // num_heads)
    assert sorted(head for part in parts for head in part) == sorted(list(range(num_heads)) * copies)
    assert {len(part) for part in parts} == {max(1, num_heads // size)}
    assert parts == sorted(parts)


@pytest.mark.parametrize(
    ("num_heads", "src_size", "dst_size"),
    [(heads, src, dst) for heads, src in FITTING for other, dst in FITTING if other == heads],
)
def test_each_head_is_found_on_a_writer(num_heads: int, src_size: int, dst_size: int) -> None:
    """A reader's heads, cut by the writers' ranges, come each from exactly one writer and land in order."""
    for rank in range(dst_size):
        wanted = held(num_heads, rank, dst_size)
        writers = [next(w for w in range(src_size) if head in held(num_heads, w, src_size)) for head in wanted]
        assert writers == sorted(writers)
        received = [
            head for writer in dict.fromkeys(writers) for head in held(num_heads, writer, src_size) if head in wanted
        ]
        assert received == wanted


def test_more_ranks_than_heads_divide_and_never_take_the_rest() -> None:
    assert [held(2, rank, 8) for rank in range(8)] == [[0]] * 4 + [[1]] * 4


def test_what_does_not_fit_is_known() -> None:
    assert not Shard(0, 4).fits(6)
    assert not Shard(0, 3).fits(8)
    assert Shard(0, 3).fits(6)
    assert Shard(0, 8).fits(2)


def test_one_rank_holds_everything() -> None:
    assert Shard().heads(40) == (0, 40)
