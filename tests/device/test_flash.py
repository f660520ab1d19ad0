"""Pieces of attention with log-sum-exp: the CPU kernels and the way any other device takes."""

import pytest
import torch
from torch import Tensor

from deltaserve.device.flash import attend_causal, attend_generic, attend_piece, merge_two

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def tensors(length: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, length, 16, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, keys, 16, generator=generator).to(dtype).unbind(0)
    return q, k, v


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("score_bytes", [1, 6 * 4 * 50 * 7, 1 << 20])
def test_both_ways_agree(dtype: torch.dtype, score_bytes: int) -> None:
    q, k, v = tensors(50, 50, dtype)
    later = torch.ones(50, 50, dtype=torch.bool).triu(1)
    for fast, hidden in ((attend_piece(q, k, v, 0.25), None), (attend_causal(q, k, v, 0.25), later)):
        out, lse = attend_generic(q, k, v, 0.25, hidden, score_bytes)
        assert (out.shape, lse.shape) == ((2, 3, 50, 16), (2, 3, 50))
        assert fast[0].dtype == fast[1].dtype == out.dtype == lse.dtype == torch.float32
        torch.testing.assert_close(fast[0], out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(fast[1], lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_pieces_merge_to_the_whole() -> None:
    q, k, v = tensors(9, 40, torch.float32)
    whole, _ = attend_piece(q, k, v, 0.25)
    parts = attend_piece(q, k[:, :33], v[:, :33], 0.25), attend_piece(q, k[:, 33:], v[:, 33:], 0.25)
    torch.testing.assert_close(merge_two(*parts), whole)
