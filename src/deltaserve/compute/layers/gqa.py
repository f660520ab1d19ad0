"""Grouped-query attention with rotary embedding, over whatever backend holds the KV."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.collective.collective import Collective
from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.layers import Projected, linear
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps
from deltaserve.compute.weights.weights import AttentionWeights
from deltaserve.model.model_spec import ModelSpec, QkNorm


def project(
    x: Tensor,  # [T, hidden]
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],  # cos, signed sin [T, 1, R]
    collective: Collective,
    ops: StepOps,
) -> Projected:
    """Queries, keys and values [T, Hkv, D]; q and k normalised and turned by their positions."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    num_gates = heads if spec.output_gate else 0
    rows = linear(x, weights.qkv, ops).view(x.shape[0], num_gates + heads + 2 * kv_heads, spec.head_dim)
    gate, qk, v = torch.split(rows, [num_gates, heads + kv_heads, kv_heads], 1)
    norm = None if weights.qk_norm is None else HeadNorm(weights.qk_norm, spec.norm_eps)
    if norm is not None and spec.qk_norm is not QkNorm.HEAD:
        wide = qk.to(norm.weight.dtype)
        qk, norm = (_normalised(wide, spec, collective) * norm.weight).to(x.dtype), None
    qk = ops.turned(qk, norm, rope)
    return Projected(qk[:, :heads], (qk[:, heads:], v), gate if num_gates else None)


def _normalised(qk: Tensor, spec: ModelSpec, collective: Collective) -> Tensor:
    """qk [T, Hq + Hkv, D], over all heads of queries and all of keys, still without the weights of the norm"""
    parts = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
    if collective.shard.size == 1:
        return torch.cat([functional.rms_norm(part, part.shape[1:], None, spec.norm_eps) for part in parts], 1)
    # Over the heads of all ranks. Each rank holds equally many, and each head is on equally many ranks:
    # the mean of the ranks' means is the mean of all heads.
    wide = [part.float() for part in parts]
    means = torch.stack([part.square().mean((1, 2)) for part in wide], -1)  # [T, 2]
    scales = (collective.all_reduce(means) / collective.shard.size + spec.norm_eps).rsqrt()[..., None, None]
    return torch.cat([part * scales[:, index] for index, part in enumerate(wide)], 1).to(qk.dtype)


def attend(
    projected: Projected, weights: AttentionWeights, spec: ModelSpec, ops: StepOps, attention: StepAttention, layer: int
) -> Tensor:
    """N tokens over the pages, after K and V of the layer were written. -> [N, hidden], a sum over these heads"""
    q, _, gate = projected
    out = attention.attend(layer, q, spec.softmax_scale, weights.sinks)  # [N, Hq, D]
    if gate is not None:
        out = out * sigmoid(gate)
    return linear(out.view(q.shape[0], spec.num_heads * spec.head_dim), weights.out, ops)
