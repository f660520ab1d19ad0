"""Attention on a CUDA device, by torch, Triton's kernels and FlashInfer's: the checks of tests/device, same numbers
expected.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.attention.attention_choice import make_attention
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from tests.compute.attention.attention_world import (
    Shape,
    World,
    check_against_plain,
    check_sharing_against_plain,
    check_sharing_keeps_bits,
)
from tests.compute.attention.test_triton_attention import check_fp8_codes, check_fp8_queries, check_groups_of_parts
from tests.compute.attention.triton_process import needs_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = (False, pytest.param(True, marks=needs_triton))
both = pytest.mark.parametrize("uses_triton", BACKENDS, ids=("torch", "triton"))
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(
    not HAS_FLASHINFER, reason="needs flashinfer: pip install 'deltaserve[flashinfer]'"
)

LENS, QUERIES = (200, 1, 77, 31, 129, 96, 64), (1, 1, 77, 5, 40, 16, 17)
DTYPES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.FP8_E4M3),
]


@both
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (16, 32), (64, 256)])
def test_mixed_batch(page_size: int, split_tokens: int, dtype: DType, kv_dtype: DType, uses_triton: bool) -> None:
    shape = Shape(page_size, split_tokens, dtype=dtype, kv_dtype=kv_dtype, device="cuda", uses_triton=uses_triton)
    check_against_plain(shape, LENS, QUERIES)


@both
@pytest.mark.parametrize(("kv_heads", "group_size", "head_dim"), [(1, 1, 8), (2, 3, 80), (1, 24, 64), (1, 1, 256)])
def test_head_shapes(kv_heads: int, group_size: int, head_dim: int, uses_triton: bool) -> None:
    shape = Shape(16, 64, 1, kv_heads, group_size, head_dim, device="cuda", uses_triton=uses_triton)
    check_against_plain(shape, LENS, QUERIES)


@both
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_latents(dtype: DType, kv_dtype: DType, uses_triton: bool) -> None:
    shape = Shape(16, 64, 1, 1, 16, 576, dtype, kv_dtype, "cuda", latent_dim=512, uses_triton=uses_triton)
    check_against_plain(shape, LENS, QUERIES)


@both
@pytest.mark.parametrize("window_len", [1, 24, 100, 1000])
def test_windows_and_sinks(window_len: int, uses_triton: bool) -> None:
    shape = Shape(num_layers=1, window_len=window_len, device="cuda", uses_triton=uses_triton)
    check_against_plain(shape, LENS, QUERIES)
    check_against_plain(shape, LENS, QUERIES, torch.tensor([-2.0, 0.5, 3.0, 30.0], device="cuda"))


@both
def test_real_head_sizes(uses_triton: bool) -> None:
    shape = Shape(64, 256, 1, 8, 8, 128, DType.BFLOAT16, device="cuda", uses_triton=uses_triton)
    check_against_plain(shape, (5000, 3000, 4097), (1, 700, 16))


@both
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("window_len", [None, 180])
def test_sharing_keeps_bits(dtype: DType, kv_dtype: DType, window_len: int | None, uses_triton: bool) -> None:
    shape = Shape(16, 64, 1, 2, 4, 64, dtype, kv_dtype, "cuda", window_len=window_len, uses_triton=uses_triton)
    lens = [260 + 3 * row for row in range(21)]
    check_sharing_keeps_bits(shape, lens, [0] + [256 - 64 * (row % 3) for row in range(1, 21)], [1] * 21)


@needs_triton
@pytest.mark.parametrize("has_e4m3", [False, True])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_fp8_codes(dtype: DType, has_e4m3: bool) -> None:
    """Converted by the card, and by arithmetic: every code, not a number too."""
    if has_e4m3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card knows no e4m3")
    check_fp8_codes(dtype, "cuda", has_e4m3)


@needs_triton
def test_queries_of_any_size_over_fp8() -> None:
    check_fp8_queries(Shape(dtype=DType.BFLOAT16, kv_dtype=DType.FP8_E4M3, device="cuda", uses_triton=True))


@needs_triton
def test_a_row_of_many_parts() -> None:
    check_groups_of_parts(Shape(4, 4, 1, device="cuda", uses_triton=True))


def make(choice: str, dtype: DType) -> str:
    pool = KvPool(CacheSpec(16, (PageGroup("kv", 1, 2, 64, dtype),)), (4,), torch.device("cuda"))
    return type(make_attention(choice, None, pool, PageTable(1, 2, 4), (8,))).__name__


@needs_triton
@pytest.mark.parametrize("dtype", list(DType))
def test_auto_is_triton(dtype: DType) -> None:
    """Its self-test passes for every type of pages."""
    assert make("auto", dtype) == "TritonAttention"


HALF = Shape(16, 64, 1, 2, 4, 128, DType.FLOAT16, DType.FLOAT16, "cuda", uses_flashinfer=True)
HALF_DTYPES = [
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.FP8_E4M3),
    (DType.FLOAT16, DType.FP8_E4M3),
]


@needs_flashinfer
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FP8_E4M3])
def test_flashinfer_by_name(dtype: DType) -> None:
    assert make("flashinfer", dtype) == "FlashInferAttention"


@needs_flashinfer
@pytest.mark.parametrize(("dtype", "kv_dtype"), HALF_DTYPES)
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (16, 32), (64, 256)])
def test_flashinfer_mixed_batch(page_size: int, split_tokens: int, dtype: DType, kv_dtype: DType) -> None:
    shape = replace(HALF, page_size=page_size, split_tokens=split_tokens, dtype=dtype, kv_dtype=kv_dtype)
    check_against_plain(replace(shape, num_layers=3), LENS, QUERIES)


@needs_flashinfer
@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"), [(1, 1, 64), (2, 3, 128), (1, 24, 64), (8, 8, 128), (1, 1, 256)]
)
def test_flashinfer_head_shapes(kv_heads: int, group_size: int, head_dim: int) -> None:
    check_against_plain(replace(HALF, kv_heads=kv_heads, group_size=group_size, head_dim=head_dim), LENS, QUERIES)


@needs_flashinfer
@pytest.mark.parametrize("window_len", [1, 24, 100, 1000])
def test_flashinfer_windows_and_sinks(window_len: int) -> None:
    shape = replace(HALF, group_size=2, window_len=window_len)
    check_against_plain(shape, LENS, QUERIES)
    check_against_plain(shape, LENS, QUERIES, torch.tensor([-2.0, 0.5, 3.0, 30.0], device="cuda"))


@needs_flashinfer
@pytest.mark.parametrize(("dtype", "kv_dtype"), HALF_DTYPES)
@pytest.mark.parametrize("window_len", [None, 180])
def test_flashinfer_shared_splits(dtype: DType, kv_dtype: DType, window_len: int | None) -> None:
    lens = [260 + 3 * row for row in range(21)]
    common = [0] + [256 - 64 * (row % 3) for row in range(1, 21)]
    shape = replace(HALF, dtype=dtype, kv_dtype=kv_dtype, window_len=window_len)
    check_sharing_against_plain(shape, lens, common, [1] * 21)


@needs_flashinfer
def test_flashinfer_steps_that_nobody_waits_for() -> None:
    """Plans are copied from one buffer of the host: none may be overwritten before the device has it."""
    world = World(replace(HALF, split_tokens=256), (5000, 3000, 4097))
    q_lens = (1, 700, 16)
    world.fill(q_lens)
    queries = world.queries(q_lens)
    batches = [Batch(queries[: 1 + number % 3], 256) for number in range(12)]
    rows = [world.random_q(batch.num_tokens) for batch in batches]
    got = [world.run(batch, 0, q) for batch, q in zip(batches, rows, strict=True)]
    for batch, q, out in zip(batches, rows, got, strict=True):
        torch.testing.assert_close(out.double(), world.expected(batch, 0, q), atol=2e-3, rtol=2e-3)
