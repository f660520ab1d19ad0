"""Multi-head latent attention, in the latents' space: what is kept per token is read as it is, once for all heads.

A head's score of a key is q . (K c) for its matrix K and the latent c: computed as (q K) . c, and likewise for values.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.layers.exact_rows import product_by_head
from deltaserve.compute.layers.layer_kind import LayerStep
from deltaserve.compute.layers.paged import PagedMixer, Projected
from deltaserve.compute.layers.rope import halves_apart
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.mla import MlaSpec

_NORM_EPS = 1e-6
"""Epsilon in the norms of compressed queries and of latents, whatever the config says of the other norms."""


@dataclass(frozen=True, slots=True)
class MlaWeights(PagedMixer):
    """N channels of a head do not turn, R do; its values have V."""

    spec: MlaSpec
    down: Linear  # [Rq + Rkv + R, hidden]: compressed queries (or, without q_up, Hq * (N + R) rows of queries), latent
    q_norm: Tensor | None  # [Rq]
    q_up: Linear | None  # [Hq * (N + R), Rq]
    kv_norm: Tensor  # [Rkv]
    keys: Tensor  # [Hq, N, Rkv]
    values: Tensor  # [Hq, V, Rkv]
    out: Linear  # [hidden, Hq * V]

    def packed(self, rules: CodeRules) -> "MlaWeights":
        q_up = self.q_up and self.q_up.packed(rules)
        return replace(self, down=self.down.packed(rules), q_up=q_up, out=self.out.packed(rules))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], step: LayerStep) -> Projected:
        """Queries [T, Hq, Rkv + R]; kept is [T, 1, Rkv + R]: the latent, and the part of all keys that turns."""
        spec, ops, still = self.spec, step.ops, self.spec.still_dim

        def turned(part: Tensor) -> Tensor:
            return ops.turned(halves_apart(part) if spec.interleaved else part, None, rope)

        down = self.down.product(x, ops)
        latent, key = down[:, -spec.head_dim : -spec.turning_dim], down[:, None, -spec.turning_dim :]
        kept = torch.cat((ops.norm(latent, self.kv_norm, _NORM_EPS)[:, None], turned(key)), -1)
        queries = down[:, : -spec.head_dim]
        if self.q_norm is not None and self.q_up is not None:
            queries = self.q_up.product(ops.norm(queries, self.q_norm, _NORM_EPS), ops)
        q = queries.reshape(x.shape[0], spec.num_heads, still + spec.turning_dim)
        into_latents = product_by_head(q[..., :still], self.keys)  # [T, Hq, Rkv]
        return Projected(torch.cat((into_latents, turned(q[..., still:])), -1), (kept,))

    def attend(self, q: Tensor, attention: StepAttention, layer: int) -> Tensor:
        return attention.attend(layer, q, self.spec.softmax_scale)

    @property
    def attended_shape(self) -> tuple[int, int]:
        return self.spec.num_heads, self.spec.kv_rank

    def output(self, attended: Tensor, gate: Tensor | None, step: LayerStep) -> Tensor:
        """attended [N, Hq, Rkv]: latents"""
        out = product_by_head(attended, self.values.transpose(1, 2))  # [N, Hq, V]
        return self.out.product(out.flatten(1), step.ops)


def allocate(table: TargetTable, spec: MlaSpec, prefix: str) -> MlaWeights:
    prefix = f"{prefix}.self_attn"
    first, q_norm, q_up = "q_proj", None, None
    if spec.q_rank is not None:
        first = "q_a_proj"
        q_norm, q_up = table.whole(f"{prefix}.q_a_layernorm.weight"), table.fused(prefix, "q_b_proj")
    both = table.whole(f"{prefix}.kv_b_proj.weight").view(-1, spec.still_dim + spec.value_dim, spec.kv_rank)
    return MlaWeights(
        spec,
        down=table.fused(prefix, first, "kv_a_proj_with_mqa"),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=table.whole(f"{prefix}.kv_a_layernorm.weight"),
        keys=both[:, : spec.still_dim],
        values=both[:, spec.still_dim :],
        out=table.fused(prefix, "o_proj"),
    )
