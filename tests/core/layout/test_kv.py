"""Byte arithmetic of a page group."""

import itertools
import math

import pytest

from deltaserve.core.layout.copy_plan import PageFormat
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout, StateLayout, pool_page_bytes
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup, StateGroup
from deltaserve.core.lifetime import KEEP_ALL, KEEP_LAST

QWEN3_32B = PageGroup("full", num_layers=64, num_kv_heads=8, head_dim=128, dtype=DType.FP8_E4M3)
SMALL = KvLayout(PageGroup("full", num_layers=2, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32), page_size=4)


def test_a_head_of_a_large_model_is_one_mebibyte() -> None:
    layout = KvLayout(QWEN3_32B, page_size=64)
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


def test_pages_and_heads_are_contiguous_in_row_major_order() -> None:
    shape = (3, *SMALL.page_shape)  # [P, H, L, planes, S, D]
    for index in itertools.product(*(range(length) for length in shape)):
        element = 0
        for position, length in zip(index, shape, strict=True):
            element = element * length + position
        page, head = index[0], index[1]
        head_bytes = SMALL.page_bytes // SMALL.num_heads
        start = page * SMALL.page_bytes + head * head_bytes
        assert start <= element * 4 < start + head_bytes


# ---------------------------------------------------------------- states

KEY, VALUE = HeadBlock(16, 36 * 3, 128), HeadBlock(32, 36 * 3, 128)
CONV = StateGroup("conv", 36, (KEY, KEY, VALUE), DType.BFLOAT16)
SSM = StateGroup("ssm", 36, (HeadBlock(32, 36, 128 * 128),), DType.FLOAT32)


def test_one_state_of_qwen3_next() -> None:
    cache = CacheSpec(64, (PageGroup("kv", 12, 2, 256, DType.BFLOAT16), CONV, SSM))
    assert cache.pools == (KEEP_ALL, KEEP_LAST)
    assert pool_page_bytes(cache) == (24 * 1024 * 64, 36 * (48 * 1024 + (2 << 20)))
    assert pool_page_bytes(cache, Shard(1, 2)) == (12 * 1024 * 64, 18 * (48 * 1024 + (2 << 20)))


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(3, 4), Shard(31, 32)])
@pytest.mark.parametrize("group", [CONV, SSM])
def test_blocks_of_a_slot_follow_each_other(group: StateGroup, shard: Shard) -> None:
    layout = StateLayout(group, shard)
    as_planned = PageFormat.of_group(group, 64, shard.size)
    end = 0
    for index, block in enumerate(layout.blocks):
        assert block.start == end
        assert block.start * group.dtype.itemsize == as_planned.block_start(index)
        assert (block.num_layers, block.num_rows) == (36, 3 if group is CONV else 1)
        end += block.size
    assert end * group.dtype.itemsize == layout.page_bytes == as_planned.page_bytes
