"""Attention on a CUDA device, by torch and by Triton's kernels: the checks of tests/device, same numbers expected."""

import pytest
import torch

from deltaserve.device.attention_choice import make_attention
from deltaserve.device.kv_pool import KvPool
from deltaserve.device.page_table import PageTable
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import CacheSpec, PageGroup
from tests.device.attention_world import Shape, check_against_plain, check_sharing_keeps_bits
from tests.device.triton_process import needs_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = (False, pytest.param(True, marks=needs_triton))
both = pytest.mark.parametrize("uses_triton", BACKENDS, ids=("torch", "triton"))

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
@pytest.mark.parametrize("dtype", list(DType))
def test_auto_is_triton(dtype: DType) -> None:
    """Its self-test passes for every type of pages."""
    pool = KvPool(CacheSpec(16, (PageGroup("kv", 1, 2, 64, dtype),)), (4,), torch.device("cuda"))
    backend = make_attention("auto", None, pool, PageTable(1, 2, 4), (8,))
    assert type(backend).__name__ == "TritonAttention"
