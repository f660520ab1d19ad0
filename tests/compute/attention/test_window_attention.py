"""Attention over windows against plain softmax: what lies before a window is gone, and is never read."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.compute.attention.attention import Query
from deltaserve.compute.attention.query_cut import cut_query
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import Shape, check_against_plain, check_sharing_keeps_bits

MIXED_LENS, MIXED_QUERIES = (200, 1, 77, 31, 129, 96, 64), (1, 1, 77, 5, 40, 16, 17)
WINDOWS = (1, 2, 5, 16, 24, 63, 64, 100, 1000)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("window_len", WINDOWS)
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (16, 32), (64, 64)])
def test_mixed_batch_over_windows(page_size: int, split_tokens: int, window_len: int) -> None:
    check_against_plain(Shape(page_size, split_tokens, 1, window_len=window_len), MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize("window_len", [3, 40])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FP8_E4M3])
def test_windows_over_pages_of_fewer_bits(dtype: DType, window_len: int) -> None:
    check_against_plain(Shape(kv_dtype=dtype, window_len=window_len), MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize("window_len", [5, 64, 600, 2500])
def test_long_queries_of_several_blocks(window_len: int) -> None:
    """Longer than a block of positions, over more keys than are read at once."""
    check_against_plain(Shape(16, 64, 1, 1, 2, 8, window_len=window_len), (1500, 3300, 2400), (1500, 1030, 300))


@pytest.mark.parametrize("window_len", [None, 1, 24, 100])
def test_sinks_join_the_denominator(window_len: int | None) -> None:
    sinks = torch.tensor([-2.0, 0.5, 3.0, 30.0])
    check_against_plain(Shape(num_layers=1, window_len=window_len), MIXED_LENS, MIXED_QUERIES, sinks)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("window_len", [20, 64, 100, 180, 240])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (16, 16), (16, 64)])
def test_sharing_within_windows_keeps_bits(page_size: int, split_tokens: int, window_len: int, dtype: DType) -> None:
    """Windows of rows of different lengths begin in different splits of what they share."""
    shape = Shape(page_size, split_tokens, 1, dtype=dtype, kv_dtype=dtype, window_len=window_len)
    lens, common = (210, 193, 140, 222, 209, 250, 201), (0, 192, 128, 192, 192, 64, 192)
    check_sharing_keeps_bits(shape, lens, common, (1, 1, 3, 1, 16, 1, 1))
    check_sharing_keeps_bits(shape, lens, common, (1, 1, 3, 1, 16, 1, 1), torch.tensor([0.5, -1.0, 2.0, 0.0]))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(1, 1), (1, 16), (2, 8), (16, 16), (16, 64), (64, 128)]))
def test_any_batch_of_any_chunks(seed: int, sizes: tuple[int, int]) -> None:
    draw = random.Random(seed)
    shape = Shape(*sizes, 1, window_len=draw.choice([draw.randint(1, 20), draw.randint(1, 200)]))
    lens = [draw.choice([draw.randint(1, 20), draw.randint(1, 300)]) for _ in range(draw.randint(1, 6))]
    q_lens = [draw.choice([1, min(length, draw.randint(1, 16)), draw.randint(1, length)]) for length in lens]
    sinks = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(seed)) if seed % 2 else None
    check_against_plain(replace(shape, kv_dtype=draw.choice([DType.FLOAT32, DType.FP8_E4M3])), lens, q_lens, sinks)


@given(st.integers(0, 500), st.integers(1, 16), st.sampled_from([1, 4, 16, 64]), st.integers(1, 400))
def test_a_cut_covers_what_is_seen_and_every_position_sees_part_of_each_edge(
    q_start: int, q_len: int, split_tokens: int, window_len: int
) -> None:
    cut = cut_query(Query(0, q_start, q_len), split_tokens, window_len)
    *head, tail = cut.edges
    pieces = [(edge.start, edge.end) for edge in head]
    pieces += [(split * split_tokens, (split + 1) * split_tokens) for split in cut.splits]
    pieces.append((tail.start, tail.end))
    assert pieces[0][0] <= max(0, q_start - window_len + 1) < pieces[0][1]
    assert all(end == start for (_, end), (start, _) in pairwise(pieces))
    assert tail.end == q_start + q_len
    assert [edge.part for edge in head] + [*cut.splits, tail.part] == list(
        range(cut.first_part, cut.first_part + cut.num_parts)
    )
    for position in range(q_start, q_start + q_len):
        seen = range(max(0, position - window_len + 1), position + 1)
        assert all(split * split_tokens in seen for split in cut.splits)
        assert all(edge.start <= seen[-1] and edge.end > seen[0] for edge in cut.edges)
