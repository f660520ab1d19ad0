"""The reference attention against plain softmax, and its promise: sharing never changes a bit."""

from dataclasses import replace

import pytest
import torch

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.attention.reference import kind, torch_attention
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import (
    TOLERANCE,
    Shape,
    World,
    check_against_plain,
    check_sharing_keeps_bits,
)

MIXED_LENS, MIXED_QUERIES = (200, 1, 77, 31, 129, 96, 64), (1, 1, 77, 5, 40, 16, 17)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (2, 2), (16, 32), (64, 64), (128, 256)])
def test_mixed_batch_over_page_sizes(page_size: int, split_tokens: int) -> None:
    check_against_plain(Shape(page_size, split_tokens), MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"), [(1, 1, 8), (4, 1, 16), (1, 8, 64), (2, 24, 16), (8, 2, 32)]
)
def test_mixed_batch_over_head_shapes(kv_heads: int, group_size: int, head_dim: int) -> None:
    shape = Shape(kv_heads=kv_heads, group_size=group_size, head_dim=head_dim)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


LATENT = Shape(kv_heads=1, group_size=8, head_dim=40, latent_dim=32)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FP8_E4M3])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 8), (16, 32), (64, 64)])
def test_one_plane_that_serves_as_keys_and_values(page_size: int, split_tokens: int, dtype: DType) -> None:
    shape = replace(LATENT, page_size=page_size, split_tokens=split_tokens, kv_dtype=dtype)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_sharing_a_latent_keeps_bits(dtype: DType) -> None:
    shape = Shape(16, 64, 1, 1, 16, 576, dtype=dtype, kv_dtype=dtype, latent_dim=512)
    lens = [260 + 3 * row for row in range(9)]
    check_sharing_keeps_bits(
        shape, lens, [0] + [256 - 64 * (row % 3) for row in range(1, 9)], [1, 1, 3, 1, 16, 1, 1, 1, 1]
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT16),
        (DType.FLOAT32, DType.FP8_E4M3),
        (DType.BFLOAT16, DType.FP8_E4M3),
        (DType.FLOAT32, DType.BFLOAT16),
    ],
)
def test_mixed_batch_over_dtypes(dtype: DType, kv_dtype: DType) -> None:
    check_against_plain(Shape(dtype=dtype, kv_dtype=kv_dtype), MIXED_LENS, MIXED_QUERIES)


def test_contexts_of_several_blocks() -> None:
    check_against_plain(Shape(64, 64, kv_heads=4, head_dim=64), (3000, 1500, 2900), (1, 1, 300))


def test_decode_of_many_rows_at_every_offset_in_a_split() -> None:
    check_against_plain(Shape(4, 8, num_layers=1), range(1, 40), [1] * 39)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 4), (16, 16), (16, 64)])
def test_sharing_keeps_bits(dtype: DType, page_size: int, split_tokens: int) -> None:
    shape = Shape(page_size, split_tokens, dtype=dtype, kv_dtype=dtype)
    lens = (210, 193, 140, 222, 209, 250, 201)
    common = (0, 192, 128, 192, 192, 64, 192)
    check_sharing_keeps_bits(shape, lens, common, (1, 1, 3, 1, 16, 1, 1))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (DType.FLOAT32, DType.FLOAT32),
        (DType.FLOAT32, DType.FP8_E4M3),
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT16),
    ],
)
@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"), [(1, 1, 64), (2, 4, 128), (1, 24, 32), (4, 2, 16), (4, 2, 64), (1, 7, 256)]
)
def test_sharing_by_more_rows_than_a_tile_keeps_bits(
    dtype: DType, kv_dtype: DType, kv_heads: int, group_size: int, head_dim: int
) -> None:
    shape = Shape(16, 64, 1, kv_heads, group_size, head_dim, dtype=dtype, kv_dtype=kv_dtype)
    rows = 21
    lens = [260 + 3 * row for row in range(rows)]
    check_sharing_keeps_bits(shape, lens, [0] + [256 - 64 * (row % 3) for row in range(1, rows)], [1] * rows)


def test_a_long_query_in_a_shared_run_reads_alone() -> None:
    shape = Shape()
    check_sharing_keeps_bits(shape, (210, 210, 230, 210), (0, 192, 192, 192), (1, 1, 38, 1))


def test_offsets_beyond_two_to_the_31() -> None:
    """Elements, not only bytes: 2^31 fp8 values lie below the first page used."""
    page_bytes = 2 * 2 * 2 * 16 * 16  # layers, planes, heads, tokens, channels
    shape = Shape(kv_dtype=DType.FP8_E4M3, first_page=2**31 // page_bytes + 5)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


def test_two_steps_at_once_do_not_disturb_each_other() -> None:
    """They share their scratch memory: as the page groups of one model do, and the last layer with the others."""
    lens, q_lens = (300, 90, 33, 210), (1, 5, 33, 1)
    world = World(Shape(), lens)
    world.fill(q_lens)
    queries = world.queries(q_lens)
    batch, fewer = Batch(queries, 32), Batch((queries[0], queries[3]), 32)
    q, few = world.random_q(batch.num_tokens), world.random_q(2)
    want, want_few = world.run(batch, 0, q), world.run(fewer, 0, few)
    first = world.backend.begin_step(batch)[0]
    second = world.backend.begin_step(fewer)[0]
    for _ in range(2):
        assert torch.equal(first.attend(0, q, 0.25), want)
        assert torch.equal(second.attend(0, few, 0.25), want_few)


def test_nan_in_one_row_stays_in_that_row() -> None:
    """A page freed by a failed request may hold NaN, and a failing request may sit in any batch."""
    world = World(Shape(), (100, 70), None)
    world.fill((1, 1))
    batch = Batch(world.queries((1, 1)), 32)
    q = world.random_q(2)
    good = world.run(batch, 0, q)
    world.kv[1][0, :, 69] = float("nan")
    bad = world.run(batch, 0, q)
    assert torch.equal(bad[0], good[0])
    assert torch.isnan(bad[1]).all()


def test_fp8_saturates() -> None:
    world = World(Shape(kv_dtype=DType.FP8_E4M3), (3,))
    batch = Batch(world.queries((3,)), 32)
    step = world.backend.begin_step(batch)[0]
    huge = torch.full((3, 2, 16), 1e6)
    step.write_kv(0, torch.zeros_like(huge), -huge)
    out = step.attend(0, world.random_q(3), 1.0)
    torch.testing.assert_close(out, torch.full_like(out, -448.0), atol=TOLERANCE[DType.FLOAT32], rtol=1e-6)


@pytest.mark.parametrize("positions", [1, 7, 64])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 13, 1 << 20])
@pytest.mark.parametrize("window_len", [None, 5, 90])
def test_any_size_of_blocks_and_tiles(
    monkeypatch: pytest.MonkeyPatch, positions: int, tile_bytes: int, window_len: int | None
) -> None:
    """Tiles of 64 keys up: several to a block, and blocks with and without a next one."""
    for module in (kind, torch_attention):
        monkeypatch.setattr(module, "BLOCK_LEN", positions)
        monkeypatch.setattr(module, "TILE_BYTES", {"cpu": tile_bytes})
    monkeypatch.setattr(kind, "MOST_KEYS", 64)
    sinks = torch.tensor([-2.0, 0.5, 3.0, 30.0, 1.0])
    check_against_plain(
        Shape(kv_heads=1, group_size=5, latent_dim=12, window_len=window_len), (200, 60), (20, 60), sinks
    )
    check_against_plain(Shape(kv_heads=5, window_len=window_len), (400, 60, 1, 350), (1, 60, 1, 337))


def test_memory_does_not_grow_with_the_context() -> None:
    kept = []
    for length in (3000, 24_000):
        world = World(Shape(16, 64, 1), [length])
        world.run(Batch(world.queries([1]), 64), 0, world.random_q(1))
        kept.append(world.backend.scratch_bytes)
    assert kept[0] >= kept[1] // 2
