"""Attention of a long query over one contiguous piece of KV, with the log-sum-exp needed to merge pieces."""

import torch
from torch import Tensor

_SCORE_BYTES = 256 << 20


def attend_piece(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All queries see all keys.

    q [Hkv, g, C, D], k, v [Hkv, N, D] of one dtype -> out [Hkv, g, C, D] float32, lse [Hkv, g, C] float32.
    """
    heads, group, length, dim = q.shape
    if q.device.type != "cpu":
        return attend_generic(q, k, v, scale)
    # GQA heads as query rows: each key is read once for all heads of its group.
    rows = q.reshape(1, heads, group * length, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, k[None], v[None], scale=scale)
    return out.float().view(heads, group, length, dim), lse.reshape(heads, group, length)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Query i sees keys 0 .. i; shapes as in `attend_piece`, N == C."""
    heads, group, length, dim = q.shape
    if q.device.type != "cpu":
        return attend_generic(q, k, v, scale, _causal_mask(length, q.device))
    rows = q.reshape(1, heads * group, length, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k[None], v[None], is_causal=True, scale=scale
    )
    return out.float().view(heads, group, length, dim), lse.reshape(heads, group, length)


def merge_two(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Two partial results (out [..., D], lse [...]) over disjoint keys -> out."""
    return torch.lerp(first[0], second[0], torch.sigmoid(second[1] - first[1])[..., None])


def _causal_mask(length: int, device: torch.device) -> Tensor:
    """[C, C] bool, True where the key is after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def attend_generic(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None, score_bytes: int = _SCORE_BYTES
) -> tuple[Tensor, Tensor]:
    """As `attend_piece` on any device, float32 inside; hidden [C, N]: key not seen. Queries go in blocks by size."""
    heads, group, length, _ = q.shape
    keys, values = k.float()[:, None], v.float()[:, None]  # [Hkv, 1, N, D]
    step = max(1, score_bytes // (4 * heads * group * k.shape[1]))
    outs, lses = [], []
    for start in range(0, length, step):
        scores = (q[:, :, start : start + step].float() * scale) @ keys.transpose(-1, -2)  # [Hkv, g, c, N]
        if hidden is not None:
            scores = scores.masked_fill(hidden[start : start + step], float("-inf"))
        outs.append(scores.softmax(-1) @ values)
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)
