"""Grouped-query attention with rotary embedding, over whatever backend holds the KV."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.collective.collective import Collective
from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.layer_kind import LayerStep
from deltaserve.compute.layers.paged import PagedMixer, Projected
from deltaserve.compute.layers.step_ops import HeadNorm
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.gqa import GqaSpec, QkNorm


@dataclass(frozen=True, slots=True)
class AttentionWeights(PagedMixer):
    """Heads of one rank."""

    spec: GqaSpec
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]: queries, keys, values; before them Hq * D rows of gates, if there are any
    out: Linear  # [hidden, Hq * D]
    qk_norm: Tensor | None  # [Hq + Hkv, D], the two weights, repeated over heads where each is normalised alone
    sinks: Tensor | None = None  # [Hq] float32

    def packed(self, rules: CodeRules) -> "AttentionWeights":
        return replace(self, qkv=self.qkv.packed(rules), out=self.out.packed(rules))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], step: LayerStep) -> Projected:
        """Queries, keys and values [T, Hkv, D]; q and k normalised and turned by their positions."""
        spec, heads, kv_heads = self.spec, self.spec.num_heads, self.spec.num_kv_heads
        num_gates = heads if spec.output_gate else 0
        rows = self.qkv.product(x, step.ops).view(x.shape[0], num_gates + heads + 2 * kv_heads, spec.head_dim)
        gate, qk, v = torch.split(rows, [num_gates, heads + kv_heads, kv_heads], 1)
        norm = None if self.qk_norm is None else HeadNorm(self.qk_norm, step.norm_eps)
        if norm is not None and spec.qk_norm is not QkNorm.HEAD:
            wide = qk.to(norm.weight.dtype)
            qk, norm = (_normalised(wide, heads, step.norm_eps, step.collective) * norm.weight).to(x.dtype), None
        qk = step.ops.turned(qk, norm, rope)
        return Projected(qk[:, :heads], (qk[:, heads:], v), gate if num_gates else None)

    def attend(self, q: Tensor, attention: StepAttention, layer: int) -> Tensor:
        return attention.attend(layer, q, self.spec.softmax_scale, self.sinks)

    @property
    def attended_shape(self) -> tuple[int, int]:
        return self.spec.num_heads, self.spec.head_dim

    def output(self, attended: Tensor, gate: Tensor | None, step: LayerStep) -> Tensor:
        if gate is not None:
            attended = attended * sigmoid(gate)
        return self.out.product(attended.flatten(1), step.ops)


def _normalised(qk: Tensor, num_heads: int, eps: float, collective: Collective) -> Tensor:
    """qk [T, Hq + Hkv, D], over all heads of queries and all of keys, still without the weights of the norm"""
    parts = qk[:, :num_heads], qk[:, num_heads:]
    if collective.shard.size == 1:
        return torch.cat([functional.rms_norm(part, part.shape[1:], None, eps) for part in parts], 1)
    # Over the heads of all ranks. Each rank holds equally many, and each head is on equally many ranks:
    # the mean of the ranks' means is the mean of all heads.
    wide = [part.float() for part in parts]
    means = torch.stack([part.square().mean((1, 2)) for part in wide], -1)  # [T, 2]
    scales = (collective.all_reduce(means) / collective.shard.size + eps).rsqrt()[..., None, None]
    return torch.cat([part * scales[:, index] for index, part in enumerate(wide)], 1).to(qk.dtype)


def allocate(table: TargetTable, spec: GqaSpec, prefix: str) -> AttentionWeights:
    prefix, norm = f"{prefix}.self_attn", None
    if spec.qk_norm is not QkNorm.NONE:
        is_added = bool(table.parts[f"{prefix}.q_norm.weight"].added)
        norm = (table.exact if is_added else table).empty(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        for name, part in (("q_norm", norm[: spec.num_heads]), ("k_norm", norm[spec.num_heads :])):
            table.targets[f"{prefix}.{name}.weight"] = part.view(-1) if spec.qk_norm is QkNorm.ALL else part
    return AttentionWeights(
        spec,
        qkv=table.fused(prefix, "q_proj", "k_proj", "v_proj"),
        out=table.fused(prefix, "o_proj"),
        qk_norm=norm,
        sinks=table.exact.whole(f"{prefix}.sinks") if spec.sinks else None,
    )
