"""The reference attention on a CUDA device: the checks of tests/device, same numbers expected."""

import pytest
import torch

from deltaserve.layout.dtype import DType
from tests.device.attention_world import Shape, check_against_plain, check_sharing_keeps_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENS, QUERIES = (200, 1, 77, 31, 129, 96, 64), (1, 1, 77, 5, 40, 16, 17)
DTYPES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.FP8_E4M3),
]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (16, 32), (64, 256)])
def test_mixed_batch(page_size: int, split_tokens: int, dtype: DType, kv_dtype: DType) -> None:
    check_against_plain(Shape(page_size, split_tokens, dtype=dtype, kv_dtype=kv_dtype, device="cuda"), LENS, QUERIES)


def test_real_head_sizes() -> None:
    shape = Shape(64, 256, 1, kv_heads=8, group_size=8, head_dim=128, dtype=DType.BFLOAT16, device="cuda")
    check_against_plain(shape, (5000, 3000, 4097), (1, 700, 16))


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_sharing_keeps_bits(dtype: DType, kv_dtype: DType) -> None:
    shape = Shape(16, 64, 1, 2, 4, 64, dtype=dtype, kv_dtype=kv_dtype, device="cuda")
    lens = [260 + 3 * row for row in range(21)]
    check_sharing_keeps_bits(shape, lens, [0] + [256 - 64 * (row % 3) for row in range(1, 21)], [1] * 21)
