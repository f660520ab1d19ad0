"""Byte arithmetic of a page group."""

import itertools
import math

import pytest

from deltaserve.layout.dtype import DType
from deltaserve.layout.kv import KvLayout
from deltaserve.layout.shard import Shard
from deltaserve.layout.spec import PageGroup

QWEN3_32B = PageGroup("full", num_layers=64, num_kv_heads=8, head_dim=128, dtype=DType.FP8_E4M3)
SMALL = KvLayout(PageGroup("full", num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32), page_size=4)


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
