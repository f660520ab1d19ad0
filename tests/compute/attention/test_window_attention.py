"""Attention over windows against plain softmax: what lies before a window is gone, and is never read."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
