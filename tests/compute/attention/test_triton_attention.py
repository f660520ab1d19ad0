"""Attention by Triton's kernels, run by its interpreter on the CPU: against plain softmax and the torch reference, and
its promise that sharing changes no bit. And that they can be compiled for GPUs, which no test here runs.

The interpreter takes milliseconds for what a GPU does in microseconds: worlds are tiny.
"""

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.core.layout.dtype import DType
from tests.cells import cells
from tests.compute.attention.attention_world import Shape, World, check_against_plain, check_sharing_keeps_bits
from tests.compute.attention.compiled_kernels import Target, compile_planning, compile_state_moves, compiled_sizes
from tests.compute.attention.triton_process import (
    KernelProcess,
    compiling_process,
    needs_triton,
    run_in,
)

pytestmark = needs_triton

KV_DTYPES = (
    (DType.FLOAT32, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT32, DType.FP8_E4M3),
    (DType.BFLOAT16, DType.FP8_E4M3),
    (DType.FLOAT32, DType.BFLOAT16),
    (DType.BFLOAT16, DType.FLOAT16),
)
LENS, QUERIES = (200, 1, 77, 31, 64), (1, 1, 20, 5, 17)
SINKS = torch.tensor([-2.0, 0.5, 3.0, 30.0])
ONE_LAYER = Shape(num_layers=1, uses_triton=True)


def check(process: KernelProcess, shape: Shape, sinks: torch.Tensor | None = None) -> None:
    run_in(process, check_against_plain, shape, LENS, QUERIES, sinks)


@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (16, 32), (64, 128)])
def test_mixed_batch_over_page_sizes(process: KernelProcess, page_size: int, split_tokens: int) -> None:
    shape = replace(ONE_LAYER, page_size=page_size, split_tokens=split_tokens)
    lens, q_lens = (LENS, QUERIES) if split_tokens > 1 else ((40, 1, 17), (1, 1, 17))
    run_in(process, check_against_plain, shape, lens, q_lens)


def test_layers_lie_one_behind_the_other(process: KernelProcess) -> None:
    check(process, replace(ONE_LAYER, num_layers=3, split_tokens=64))


@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"),
    [(1, 1, 8), (2, 2, 32), (1, 4, 64), (2, 3, 80), (1, 24, 16), (1, 7, 128), (1, 1, 256)],
)
def test_mixed_batch_over_head_shapes(process: KernelProcess, kv_heads: int, group_size: int, head_dim: int) -> None:
    shape = Shape(16, 64, 1, kv_heads, group_size, head_dim, uses_triton=True)
    check(process, shape)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
def test_mixed_batch_over_dtypes(process: KernelProcess, dtype: DType, kv_dtype: DType) -> None:
    check(process, Shape(16, 64, 1, 1, 2, 40, dtype=dtype, kv_dtype=kv_dtype, uses_triton=True))


@pytest.mark.parametrize(("head_dim", "latent_dim"), [(40, 32), (40, 24), (576, 512)])
def test_one_plane_that_serves_as_keys_and_values(process: KernelProcess, head_dim: int, latent_dim: int) -> None:
    shape = Shape(16, 64, 1, 1, 4, head_dim, latent_dim=latent_dim, uses_triton=True)
    run_in(process, check_against_plain, shape, (90, 31), (1, 20))


@pytest.mark.parametrize(
    ("window_len", "sinks"), [*((length, None) for length in (1, 5, 63, 100, 1000)), (63, SINKS), (100, SINKS)]
)
def test_windows_and_sinks(process: KernelProcess, window_len: int, sinks: torch.Tensor | None) -> None:
    check(process, replace(ONE_LAYER, window_len=window_len), sinks)
    check(process, replace(ONE_LAYER, page_size=1, split_tokens=20, window_len=window_len), sinks)


def test_sinks_where_everything_is_seen(process: KernelProcess) -> None:
    check(process, ONE_LAYER, SINKS)


def test_long_queries_in_pieces_of_several_splits(process: KernelProcess) -> None:
    shape = Shape(16, 32, 1, 1, 2, 16, uses_triton=True)
    run_in(process, check_against_plain, shape, (700, 300), (100, 200))
    run_in(process, check_against_plain, replace(shape, window_len=150), (700, 300), (100, 200))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window_len"),
    [*((*dtypes, None) for dtypes in KV_DTYPES), *((*dtypes, 100) for dtypes in (KV_DTYPES[0], KV_DTYPES[4]))],
)
def test_sharing_keeps_bits(process: KernelProcess, dtype: DType, kv_dtype: DType, window_len: int | None) -> None:
    """Bits are kept for rows whose windows begin in different splits, and for extends beside decoding rows."""
    shape = Shape(16, 64, 1, 1, 2, 32, dtype=dtype, kv_dtype=kv_dtype, window_len=window_len, uses_triton=True)
    lens, common, q_lens = (210, 193, 140, 222, 209, 201), (0, 192, 128, 192, 192, 192), (1, 1, 3, 1, 16, 1)
    run_in(process, check_sharing_keeps_bits, shape, lens, common, q_lens, SINKS[:2])


def test_readers_of_several_tiles_keep_bits(process: KernelProcess) -> None:
    """21 rows of 4 heads: more than a tile of 16."""
    shape = Shape(16, 64, 1, 1, 4, 16, uses_triton=True)
    lens = [140 + row % 5 for row in range(21)]
    run_in(process, check_sharing_keeps_bits, shape, lens, [0] + [128] * 20, [1] * 21)


def check_company(shape: Shape) -> None:
    world = World(shape, (200, 90, 77, 150))
    queries = world.queries((1, 5, 40, 30))
    world.fill((1, 5, 40, 30))
    q = world.random_q(76)
    together = world.run(Batch(queries, shape.split_tokens), 0, q)
    token = 0
    for query in queries:
        part = slice(token, token + query.q_len)
        alone = world.run(Batch((query,), shape.split_tokens), 0, q[part])
        assert torch.equal(alone, together[part]), query
        token += query.q_len


def test_company_changes_no_bit(process: KernelProcess) -> None:
    run_in(process, check_company, ONE_LAYER)


def check_groups_of_parts(shape: Shape) -> None:
    """More parts than are merged at once; company changes nothing of a row that has as many."""
    world = World(shape, (300, 140, 40))
    queries, q = world.queries((1, 1, 1)), world.random_q(3)
    world.fill((1, 1, 1))
    together = world.run(Batch(queries, shape.split_tokens), 0, q)
    torch.testing.assert_close(
        together.double(), world.expected(Batch(queries, shape.split_tokens), 0, q), atol=2e-5, rtol=2e-5
    )
    for row, query in enumerate(queries):
        alone = world.run(Batch((query,), shape.split_tokens), 0, q[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_row_of_many_parts(process: KernelProcess) -> None:
    run_in(process, check_groups_of_parts, replace(ONE_LAYER, page_size=4, split_tokens=4))


def check_nan_stays_with_its_row(shape: Shape) -> None:
    world = World(shape, (70, 70), (0, 64))
    world.fill((1, 1))
    batch = Batch(world.queries((1, 1)), shape.split_tokens)
    q = world.random_q(2)
    good = world.run(batch, 0, q)
    world.kv[1][0, :, 69] = float("nan")
    bad = world.run(batch, 0, q)
    assert torch.equal(bad[0], good[0])
    assert torch.isnan(bad[1]).all()


def test_nan_is_seen_and_stays_with_its_row(process: KernelProcess) -> None:
    run_in(process, check_nan_stays_with_its_row, ONE_LAYER)


def check_fp8_codes(dtype: DType = DType.FLOAT32, device: str = "cpu", has_e4m3: bool = False) -> None:
    """`has_e4m3`: whether codes are converted by the device, or by arithmetic."""
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
    shape = Shape(16, 16, 1, 1, 1, 16, dtype=dtype, kv_dtype=DType.FP8_E4M3, device=device, uses_triton=True)
    with patch.object(kernels, "has_e4m3", lambda _: has_e4m3):
        world = World(shape, (16,))
    arena = world.pool.page_arenas[0]
    start = int(world.tables.table(world.pool.cache.pool_of(arena.layout.group))[0, 0]) * arena.page_bytes
    codes, plane = torch.arange(256, dtype=torch.uint8), 16 * 16
    arena.bytes[start : start + plane] = 0  # keys
    step = world.backend.begin_step(Batch((Query(0, 0, 1),), 16))[0]
    for sixteen in codes.view(16, 16):
        arena.bytes[start + plane : start + plane + 16] = sixteen
        out = step.attend(0, torch.zeros(1, 1, 16, dtype=torch_dtype(dtype), device=device), 1.0)
        want = sixteen.view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(out[0, 0].float().cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_every_fp8_code_reads_as_torch_reads_it(process: KernelProcess) -> None:
    run_in(process, check_fp8_codes)


def check_fp8_queries(shape: Shape) -> None:
    """Codes are multiplied in float16: queries may be larger than that holds, or so small that it holds none."""
    world = World(shape, (150, 3))
    world.fill((1, 1))
    batch, q = Batch(world.queries((1, 1)), shape.split_tokens), world.random_q(2)
    for size in (2.0**-40, 2.0**40):
        scale = shape.head_dim**-0.5 / size
        world.run(batch, 0, q)
        got = world.backend.begin_step(batch)[0].attend(0, q * size, scale)
        torch.testing.assert_close(got.double(), world.expected(batch, 0, q), atol=3e-2, rtol=3e-2)


def test_queries_of_any_size_over_fp8(process: KernelProcess) -> None:
    run_in(process, check_fp8_queries, replace(ONE_LAYER, dtype=DType.BFLOAT16, kv_dtype=DType.FP8_E4M3))


def test_offsets_beyond_two_to_the_31(process: KernelProcess) -> None:
    """Elements, not only bytes: 2^31 fp8 values lie below the first page used."""
    page_bytes = 2 * 2 * 2 * 16 * 16  # layers, planes, heads, tokens, channels
    check(process, Shape(kv_dtype=DType.FP8_E4M3, first_page=2**31 // page_bytes + 5, uses_triton=True))


@pytest.mark.parametrize("seed", range(6))
def test_random_worlds(process: KernelProcess, seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 16, 64])
    dtype, kv_dtype = rng.choice(KV_DTYPES)
    shape = Shape(
        page_size,
        max(16, page_size * rng.choice([1, 2, 4])),
        1,
        rng.choice([1, 2]),
        rng.choice([1, 2, 3, 5]),
        rng.choice([16, 64, 96]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        window_len=rng.choice([None, None, 1, 40, 129]),
        uses_triton=True,
    )
    lens = [rng.choice([1, 2, 63, 64, 65, rng.randrange(1, 200)]) for _ in range(rng.randrange(1, 5))]
    q_lens = [rng.choice([1, min(length, 40), rng.randrange(1, length + 1)]) for length in lens]
    sinks = rng.choice([None, torch.randn(shape.num_heads)])
    run_in(process, check_against_plain, shape, lens, q_lens, sinks)


@pytest.fixture(scope="module")
def compiler() -> Iterator[KernelProcess]:
    yield from compiling_process()


@pytest.fixture(params=cells([(80,), (90,), (100,)], lambda capability: capability != 90))
def sizes(compiler: KernelProcess, request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """Bytes of shared memory of each kernel for small and for large tiles; compiled outside a test's time limit."""
    small = run_in(compiler, compiled_sizes, Target(request.param, 128, 128, 4))
    large = run_in(compiler, compiled_sizes, Target(request.param, 576, 512, 16))
    return small, large


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_copies_of_states_compile_for_gpus(compiler: KernelProcess, capability: int) -> None:
    run_in(compiler, compile_state_moves, capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_planning_compiles_for_gpus(compiler: KernelProcess, capability: int) -> None:
    run_in(compiler, compile_planning, capability)


def test_kernels_compile_for_gpus(sizes: tuple[list[int], list[int]]) -> None:
    """Ampere, Hopper and Blackwell; and their tiles fit in what a multiprocessor of the smallest (99 KiB) has.

    With 512 channels of values they need that of a data centre's GPU.
    """
    narrow, wide = sizes
    assert 0 < max(narrow) <= 99 << 10
    assert 0 < max(wide) <= 163 << 10
