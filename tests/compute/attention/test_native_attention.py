"""Attention by the native library on every instruction set of this machine: against plain softmax, and its promise that
neither sharing nor company nor threads change a bit.
"""

import random
from dataclasses import replace

import pytest
import torch

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.native.native_attention import NativeAttention
from deltaserve.core.layout.dtype import DType
from deltaserve.core.rounding import Rounding
from tests.compute.attention.attention_world import Shape, World, check_against_plain, check_sharing_keeps_bits
from tests.compute.native.native_build import EMULATED_AMX, native_context, sets_with_own

KV_DTYPES = (
    (DType.FLOAT32, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT32, DType.FP8_E4M3),
    (DType.BFLOAT16, DType.FP8_E4M3),
    (DType.FLOAT32, DType.BFLOAT16),
)
MIXED_LENS, MIXED_QUERIES = (200, 1, 77, 31, 129, 96, 64), (1, 1, 77, 5, 40, 16, 17)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=sets_with_own("attention_kernel"))
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (2, 2), (16, 32), (64, 64), (128, 256)])
def test_mixed_batch_over_page_sizes(isa: str, page_size: int, split_tokens: int) -> None:
    check_against_plain(Shape(page_size, split_tokens, isa=isa), MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"),
    [(1, 1, 8), (4, 1, 16), (1, 8, 64), (2, 24, 16), (8, 2, 32), (2, 3, 80), (1, 2, 96), (1, 7, 128), (1, 1, 256)],
)
def test_mixed_batch_over_head_shapes(isa: str, kv_heads: int, group_size: int, head_dim: int) -> None:
    shape = Shape(kv_heads=kv_heads, group_size=group_size, head_dim=head_dim, isa=isa)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 64])
def test_mixed_batch_over_dtypes(isa: str, dtype: DType, kv_dtype: DType, head_dim: int) -> None:
    check_against_plain(Shape(dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, isa=isa), MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
@pytest.mark.parametrize(("head_dim", "latent_dim"), [(40, 32), (40, 24), (576, 512)])
def test_one_plane_that_serves_as_keys_and_values(
    isa: str, dtype: DType, kv_dtype: DType, head_dim: int, latent_dim: int
) -> None:
    shape = Shape(16, 64, 1, 1, 16, head_dim, dtype=dtype, kv_dtype=kv_dtype, latent_dim=latent_dim, isa=isa)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


@pytest.mark.parametrize("window_len", [1, 2, 5, 16, 24, 63, 64, 100, 1000])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (16, 32), (64, 64)])
def test_windows_and_sinks(isa: str, page_size: int, split_tokens: int, window_len: int) -> None:
    shape = Shape(page_size, split_tokens, 1, window_len=window_len, isa=isa)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES, torch.tensor([-2.0, 0.5, 3.0, 30.0]))


@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (2, 2), (16, 32), (64, 128)])
@pytest.mark.parametrize("window_len", [None, 1, 24, 100])
@pytest.mark.parametrize(("head_dim", "latent_dim"), [(32, None), (64, 48), (128, None)])
@pytest.mark.parametrize("isa", ["avx512_bf16", "amx_bf16", EMULATED_AMX])
def test_pairs_of_bfloat16(
    isa: str, page_size: int, split_tokens: int, window_len: int | None, head_dim: int, latent_dim: int | None
) -> None:
    """Tile registers take keys as they lie where pages are evenly spaced."""
    shape = Shape(page_size, split_tokens, 1, 1 if latent_dim else 2, 3, head_dim, DType.BFLOAT16, DType.BFLOAT16)
    shape = replace(shape, window_len=window_len, latent_dim=latent_dim, isa=isa)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


def test_long_queries(isa: str) -> None:
    bfloat16 = Shape(64, 256, 1, 2, 4, 64, DType.BFLOAT16, DType.BFLOAT16, isa=isa)
    check_against_plain(bfloat16, (1500, 900), (700, 900))
    check_against_plain(Shape(64, 256, 1, 2, 4, 64, isa=isa), (1500, 900), (700, 900))
    check_against_plain(Shape(16, 64, 1, 1, 2, 8, window_len=600, isa=isa), (1500, 2400), (1500, 300))


@pytest.mark.parametrize(("kv_heads", "group_size", "head_dim"), [(1, 1, 64), (1, 2, 64), (1, 7, 32), (1, 2, 256)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_queries_that_fill_a_part_of_their_last_tile(
    isa: str, kv_heads: int, group_size: int, head_dim: int, num_threads: int
) -> None:
    """A task has up to 15 rows more than its most, and tile registers take them as a whole tile."""
    dtypes = (DType.BFLOAT16, DType.BFLOAT16)
    shape = Shape(64, 256, 1, kv_heads, group_size, head_dim, *dtypes, isa=isa, num_threads=num_threads)
    for q_len in (*range(1, 280, 13), 129, 130, 135, 191, 249, 254, 255, 257, 263, 271):
        check_against_plain(shape, (q_len,), (q_len,))


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"), [(1, 1, 64), (2, 4, 128), (1, 24, 32), (4, 2, 16), (1, 7, 80)]
)
def test_sharing_keeps_bits(
    isa: str, dtype: DType, kv_dtype: DType, kv_heads: int, group_size: int, head_dim: int
) -> None:
    shape = Shape(16, 64, 1, kv_heads, group_size, head_dim, dtype=dtype, kv_dtype=kv_dtype, isa=isa)
    lens, common = (210, 193, 140, 222, 209, 250, 201), (0, 192, 128, 192, 192, 64, 192)
    check_sharing_keeps_bits(shape, lens, common, (1, 1, 3, 1, 16, 1, 1))


@pytest.mark.parametrize("window_len", [20, 64, 100, 180, 240])
def test_sharing_within_windows_keeps_bits(isa: str, window_len: int) -> None:
    shape = Shape(16, 16, 1, window_len=window_len, isa=isa)
    lens, common = (210, 193, 140, 222, 209, 250, 201), (0, 192, 128, 192, 192, 64, 192)
    check_sharing_keeps_bits(shape, lens, common, (1, 1, 3, 1, 16, 1, 1), torch.tensor([0.5, -1.0, 2.0, 0.0]))


def test_sharing_a_latent_keeps_bits(isa: str) -> None:
    shape = Shape(16, 64, 1, 1, 16, 576, latent_dim=512, isa=isa)
    lens = [260 + 3 * row for row in range(5)]
    check_sharing_keeps_bits(shape, lens, [0, 256, 192, 128, 256], [1, 1, 3, 1, 16])


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_and_company_change_no_bit(isa: str, num_threads: int) -> None:
    """A long row is cut among threads; alone or in a batch, its bits are the same."""
    lens, q_lens = (3000, 200, 77, 129), (1, 1, 77, 16)
    alone = World(Shape(16, 32, 1, isa=isa), lens)
    many = World(replace(alone.shape, num_threads=num_threads), lens)
    for world in (alone, many):
        world.fill(q_lens)
    batch = Batch(alone.queries(q_lens), 32)
    q = alone.random_q(batch.num_tokens)
    want = alone.run(batch, 0, q)
    assert torch.equal(many.run(batch, 0, q), want)
    start = 0
    for query in batch.queries:
        rows = slice(start, start + query.q_len)
        assert torch.equal(alone.run(Batch((query,), 32), 0, q[rows]), want[rows])
        start += query.q_len


@pytest.mark.parametrize("q_len", [17, 22, 43, 86, 100])
def test_rows_cut_among_threads_keep_their_bits(isa: str, q_len: int) -> None:
    """Few heads: rows are cut, into as many parts as threads want, but no part has few of them."""
    shape = Shape(16, 32, 1, kv_heads=1, group_size=3, isa=isa)
    worlds = [World(replace(shape, num_threads=num_threads), (600,)) for num_threads in (1, 2, 5, 16)]
    for world in worlds:
        world.fill((q_len,))
    batch = Batch(worlds[0].queries((q_len,)), 32)
    q = worlds[0].random_q(batch.num_tokens)
    want = worlds[0].run(batch, 0, q)
    assert all(torch.equal(world.run(batch, 0, q), want) for world in worlds[1:])


def test_another_number_of_threads_in_each_step_changes_no_bit(isa: str) -> None:
    """Those that were left out of steps take part again; some steps are too short for more than one."""
    lens, q_lens = (3000, 200, 77), (1, 1, 77)
    worlds = [World(Shape(16, 32, 1, isa=isa), lens) for _ in range(2)]
    for world in worlds:
        world.fill(q_lens)
    alone, many = worlds
    context = native_context(isa, 5)
    many.backend = NativeAttention(many.pool, many.tables, (many.shape.num_heads,), context)
    batch = Batch(alone.queries(q_lens), 32)
    short = Batch(alone.queries(q_lens)[1:2], 32)
    q = alone.random_q(batch.num_tokens)
    want, want_short = alone.run(batch, 0, q), alone.run(short, 0, q[:1])
    for num_threads in (5, 1, 2, 5, 3, 1, 4, 9, 5):
        context.use_threads(num_threads)
        assert torch.equal(many.run(short, 0, q[:1]), want_short)
        assert torch.equal(many.run(batch, 0, q), want)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
@pytest.mark.parametrize(("group_size", "head_dim"), [(2, 16), (4, 64), (1, 40), (7, 96)])
@pytest.mark.parametrize(("q_len", "rounding"), [(16, Rounding.OF_QUERY), (60, Rounding.OF_POSITION)])
def test_a_position_has_the_same_bits_in_a_chunk_and_by_itself(
    isa: str, dtype: DType, kv_dtype: DType, group_size: int, head_dim: int, q_len: int, rounding: Rounding
) -> None:
    shape = Shape(16, 32, 1, group_size=group_size, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, isa=isa)
    world = World(replace(shape, rounding=rounding), (120,))
    world.fill((q_len,))
    batch = Batch(world.queries((q_len,)), 32)
    q = world.random_q(q_len)
    want = world.run(batch, 0, q)
    for offset in (0, 13, q_len - 1):
        got = world.run(Batch((Query(0, 120 - q_len + offset, 1),), 32), 0, q[offset : offset + 1])
        assert torch.equal(got[0], want[offset])


def test_nan_in_one_row_stays_in_that_row(isa: str) -> None:
    world = World(Shape(isa=isa), (100, 70), None)
    world.fill((1, 1))
    batch = Batch(world.queries((1, 1)), 32)
    q = world.random_q(2)
    good = world.run(batch, 0, q)
    world.kv[1][0, :, 69] = float("nan")
    bad = world.run(batch, 0, q)
    assert torch.equal(bad[0], good[0])
    assert torch.isnan(bad[1]).all()


def test_offsets_beyond_two_to_the_31(isa: str) -> None:
    """Elements, not only bytes: 2^31 fp8 values lie below the first page used."""
    page_bytes = 2 * 2 * 2 * 16 * 16  # layers, planes, heads, tokens, channels
    shape = Shape(kv_dtype=DType.FP8_E4M3, first_page=2**31 // page_bytes + 5, isa=isa)
    check_against_plain(shape, MIXED_LENS, MIXED_QUERIES)


def test_every_fp8_code_reads_as_torch_reads_it(isa: str) -> None:
    world = World(Shape(16, 16, 1, 1, 1, 16, kv_dtype=DType.FP8_E4M3, isa=isa), (16,))
    arena = world.pool.page_arenas[0]
    start = int(world.tables.table(world.pool.cache.pool_of(arena.layout.group))[0, 0]) * arena.page_bytes
    codes = torch.arange(256, dtype=torch.uint8)
    plane = 16 * 16
    arena.bytes[start : start + plane] = 0  # keys: all weights are equal where one key is seen
    arena.bytes[start + plane : start + 2 * plane] = codes
    step = world.backend.begin_step(Batch((Query(0, 0, 1),), 16))[0]
    values = codes.view(torch.float8_e4m3fn).float().view(16, 16)
    first = step.attend(0, torch.zeros(1, 1, 16), 1.0)
    torch.testing.assert_close(first[0, 0], values[0], rtol=0, atol=0, equal_nan=True)
    for position in range(1, 16):
        arena.bytes[start + plane : start + plane + 16] = codes[16 * position : 16 * position + 16]
        out = step.attend(0, torch.zeros(1, 1, 16), 1.0)
        torch.testing.assert_close(out[0, 0], values[position], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_worlds(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16, 32, 64, 128])
    dtype, kv_dtype = rng.choice(KV_DTYPES)
    shape = Shape(
        page_size,
        page_size * rng.choice([1, 2, 4]),
        1,
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3, 5, 8]),
        rng.choice([64, 80, 96, 128]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        window_len=rng.choice([None, None, 1, 40, 129]),
        isa=isa,
        num_threads=rng.choice([1, 2, 3]),
    )
    lens = [rng.choice([1, 2, 63, 64, 65, rng.randrange(1, 400)]) for _ in range(rng.randrange(1, 9))]
    q_lens = [rng.choice([1, length, rng.randrange(1, length + 1)]) for length in lens]
    sinks = rng.choice([None, torch.randn(shape.num_heads)])
    check_against_plain(shape, lens, q_lens, sinks)
