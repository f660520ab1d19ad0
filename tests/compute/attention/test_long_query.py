"""Extends cut into blocks of positions and of keys, with the results merged."""

import pytest
import torch

from deltaserve.compute.attention import scratch_limits
from deltaserve.compute.attention.reference import long_query
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import Shape, check_against_plain


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("positions", [7, 64, 1024])
@pytest.mark.parametrize("keys", [16, 50, 2048])
@pytest.mark.parametrize(("causal", "score_bytes"), [(1, 1), (19, 4 * 2 * 19 * 50), (128, 1 << 30)])
def test_any_block_size(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, positions: int, keys: int, causal: int, score_bytes: int
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(long_query, "CAUSAL_POSITIONS", causal)
    monkeypatch.setitem(scratch_limits.SCORE_BYTES, "cpu", score_bytes)
    monkeypatch.setattr(long_query, "MAX_POSITIONS", positions)
    monkeypatch.setattr(long_query, "MAX_KEYS", keys)
    check_against_plain(Shape(kv_heads=1, group_size=5, head_dim=24, latent_dim=16), (200, 60), (20, 60))
    check_against_plain(Shape(kv_heads=5, dtype=dtype, kv_dtype=dtype), (200, 60, 150), (20, 60, 137))
