"""Grouped-query attention with rotary embedding, over whatever backend holds the KV."""

import torch.nn.functional as functional
from torch import Tensor

from deltaserve.device.attention import StepAttention
from deltaserve.models.layers import linear
from deltaserve.models.rope import rotate
from deltaserve.models.spec import ModelSpec
from deltaserve.models.weights import AttentionWeights


def gqa(
    x: Tensor,  # [T, hidden]
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],  # cos, signed sin [T, 1, D]
    attention: StepAttention,
    layer: int,  # within the page group
) -> Tensor:
    """Writes K and V of the T tokens, then attends over pages. -> [T, hidden]"""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    qkv = linear(x, weights.qkv).view(x.shape[0], heads + 2 * kv_heads, spec.head_dim)
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if weights.qk_norm is not None:
        qk = functional.rms_norm(qk, (spec.head_dim,), None, spec.norm_eps) * weights.qk_norm
    qk = rotate(qk, *rope)
    attention.write_kv(layer, qk[:, heads:], v)
    out = attention.attend(layer, qk[:, :heads], spec.softmax_scale)  # [T, Hq, D]
    return linear(out.view(x.shape[0], heads * spec.head_dim), weights.out)
