"""Multi-head latent attention, in the latents' space: what is kept per token is read as it is, once for all heads.

A head's score of a key is q . (K c) for its matrix K and the latent c: computed as (q K) . c, and likewise for values.
"""

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.layers.exact_rows import product_by_head
from deltaserve.compute.layers.layers import Projected, linear
from deltaserve.compute.layers.rope import halves_apart
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.weights import MlaWeights
from deltaserve.model.model_spec import ModelSpec

_NORM_EPS = 1e-6
"""Epsilon in the norms of compressed queries and of latents, whatever the config says of the other norms."""


def project_latents(
    x: Tensor,  # [T, hidden]
    weights: MlaWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],  # cos, signed sin [T, 1, R]
    ops: StepOps,
) -> Projected:
    """Queries [T, Hq, Rkv + R]; kept is [T, 1, Rkv + R]: the latent, and the part of all keys that turns."""
    assert spec.mla is not None
    still, turning, interleaved = spec.mla.still_dim, spec.mla.turning_dim, spec.mla.interleaved

    def turned(part: Tensor) -> Tensor:
        return ops.turned(halves_apart(part) if interleaved else part, None, rope)

    down = linear(x, weights.down, ops)
    latent, key = down[:, -spec.head_dim : -turning], down[:, None, -turning:]
    kept = torch.cat((ops.norm(latent, weights.kv_norm, _NORM_EPS)[:, None], turned(key)), -1)
    queries = down[:, : -spec.head_dim]
    if weights.q_norm is not None and weights.q_up is not None:
        queries = linear(ops.norm(queries, weights.q_norm, _NORM_EPS), weights.q_up, ops)
    q = queries.reshape(x.shape[0], spec.num_heads, still + turning)
    into_latents = product_by_head(q[..., :still], weights.keys)  # [T, Hq, Rkv]
    return Projected(torch.cat((into_latents, turned(q[..., still:])), -1), (kept,))


def attend_latents(
    q: Tensor, weights: MlaWeights, spec: ModelSpec, ops: StepOps, attention: StepAttention, layer: int
) -> Tensor:
    """q [N, Hq, Rkv + R] over the pages, after the latents of the layer were written.

    -> [N, hidden], a sum over these heads
    """
    latents = attention.attend(layer, q, spec.softmax_scale)  # [N, Hq, Rkv]
    out = product_by_head(latents, weights.values.transpose(1, 2))  # [N, Hq, V]
    return linear(out.flatten(1), weights.out, ops)
