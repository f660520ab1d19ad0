"""Extends cut into blocks of positions and heads, whatever memory their scores may take."""

import pytest
import torch

from deltaserve.device import long_query
from deltaserve.layout.dtype import DType
from tests.device.attention_world import Shape, check_against_plain


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("positions", [1, 7, 128])
@pytest.mark.parametrize("score_bytes", [1, 4 * 2 * 200 * 5, 4 * 2 * 200 * 28, 1 << 30])
def test_any_block_size(monkeypatch: pytest.MonkeyPatch, dtype: DType, positions: int, score_bytes: int) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(long_query, "_MAX_POSITIONS", positions)
    monkeypatch.setattr(long_query, "_CPU_SCORE_BYTES", score_bytes)
    check_against_plain(Shape(kv_heads=5, dtype=dtype, kv_dtype=dtype), (200, 60, 150), (20, 60, 137))
