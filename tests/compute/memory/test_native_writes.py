"""Keys and values lie after a native write where torch puts them, whatever strides they come with."""

import pytest
import torch

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PageId
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import POOL, Shape, World

SIZES = Shape(16, 32, 2, kv_heads=3, head_dim=20, isa="generic")
LENS, Q_LENS = (50, 33, 7), (20, 1, 7)


@pytest.mark.parametrize("kv_dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FP8_E4M3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_writes_what_torch_writes(kv_dtype: DType, dtype: torch.dtype) -> None:
    shape = Shape(16, 32, 2, kv_heads=3, head_dim=20, kv_dtype=kv_dtype, isa="generic")
    native, plain = World(shape, LENS), World(shape, LENS)
    batch = Batch(native.queries(Q_LENS), 32)
    oracle = TorchAttention(plain.pool, plain.tables, (shape.num_heads,)).begin_step(batch)[0]
    rows = torch.randn(batch.num_tokens, 8, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = rows[:, 1:4], rows[:, 4:7]  # as one product makes them
    columns = values.transpose(1, 2).contiguous().transpose(1, 2)  # channels apart
    for layer, planes in enumerate(((keys, values), (keys.contiguous(), columns))):
        native.backend.begin_step(batch)[0].write_kv(layer, *planes)
        oracle.write_kv(layer, *planes)
    assert torch.equal(native.pool.page_arenas[0].bytes, plain.pool.page_arenas[0].bytes)


def test_a_place_outside_of_the_pages_is_refused() -> None:
    world = World(SIZES, LENS)
    world.tables.write(POOL, 1, 0, (PageId(10**6),))
    step = world.backend.begin_step(Batch(world.queries((20, 33, 7)), 32))[0]
    before = world.pool.page_arenas[0].bytes.clone()
    with pytest.raises(StateError, match="outside"):
        step.write_kv(0, *[torch.zeros(60, 3, 20)] * 2)
    assert torch.equal(world.pool.page_arenas[0].bytes, before)
