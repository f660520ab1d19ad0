"""Where weights live: fused tensors, and for every checkpoint name (canonical, see tensors.py) the part it fills."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltaserve.models.model_spec import MlaSpec, ModelSpec, MoeSpec, QkNorm, RouterKind
from deltaserve.models.tensors import CORRECTION


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b"""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]: queries, keys, values
    out: Linear  # [hidden, Hq * D]
    qk_norm: Tensor | None  # [Hq + Hkv, D], the two weights, repeated over heads where each is normalised alone


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """N channels of a head do not turn, R do; its values have V."""

    down: Linear  # [Rq + Rkv + R, hidden]: compressed queries (or, without q_up, Hq * (N + R) rows of queries), latent
    q_norm: Tensor | None  # [Rq]
    q_up: Linear | None  # [Hq * (N + R), Rq]
    kv_norm: Tensor  # [Rkv]
    keys: Tensor  # [Hq, N, Rkv]
    values: Tensor  # [Hq, V, Rkv]
    out: Linear  # [hidden, Hq * V]


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: Linear  # [2 I, hidden]
    down: Linear  # [hidden, I]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Tensor  # [E, hidden], float32 where each score counts alone
    correction: Tensor | None  # [E] float32, added to the scores of the choice
    gate_up: tuple[Tensor, ...]  # of each expert, plain or packed: [2 I, hidden]
    down: tuple[Tensor, ...]  # of each expert: [hidden, I]
    shared: DenseWeights | None = None  # for every token


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    attention: AttentionWeights | MlaWeights
    mlp_norm: Tensor  # [hidden]
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [V, hidden]; the embedding itself when tied and not packed


@dataclass(slots=True)
class TargetTable:
    """Allocates fused tensors and names their parts."""

    dtype: torch.dtype
    device: torch.device
    targets: dict[str, Tensor] = field(default_factory=dict)
    """A file's tensor is copied here, repeated over leading axes that only the target has."""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own."""
        target = self.empty(*shape)
        self.targets[name] = target
        return target

    def fused(self, prefix: str, parts: tuple[tuple[str, int], ...], in_size: int, bias: bool) -> Linear:
        """Rows of several linear maps, one after the other."""
        total = sum(size for _, size in parts)
        weight, biases = self.empty(total, in_size), self.empty(total) if bias else None
        row = 0
        for name, size in parts:
            self.targets[f"{prefix}.{name}.weight"] = weight[row : row + size]
            if biases is not None:
                self.targets[f"{prefix}.{name}.bias"] = biases[row : row + size]
            row += size
        return Linear(weight, biases)


def allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Uninitialised weights of `spec`, and canonical name |-> where that tensor goes."""
    table = TargetTable(dtype, device)
    embedding = table.whole("embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    layers = tuple(_layer(table, spec, index) for index in range(spec.num_layers))
    norm = table.whole("norm.weight", (spec.hidden_size,))
    head = embedding
    if not spec.tied_embeddings:
        head = table.whole("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    return DecoderWeights(embedding, layers, norm, head), table.targets


def _layer(table: TargetTable, spec: ModelSpec, index: int) -> LayerWeights:
    prefix, hidden = f"layers.{index}", (spec.hidden_size,)
    moe = spec.moe
    return LayerWeights(
        attention_norm=table.whole(f"{prefix}.input_layernorm.weight", hidden),
        attention=_attention(table, spec, f"{prefix}.self_attn")
        if spec.mla is None
        else _latent_attention(table, spec, spec.mla, f"{prefix}.self_attn"),
        mlp_norm=table.whole(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=_experts(table, spec, moe, f"{prefix}.mlp")
        if moe is not None and spec.is_moe(index)
        else _dense(table, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, f"{prefix}.mlp"),
    )


def _attention(table: TargetTable, spec: ModelSpec, prefix: str) -> AttentionWeights:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    norm = None
    if spec.qk_norm is not QkNorm.NONE:
        norm = table.empty(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        for name, part in (("q_norm", norm[: spec.num_heads]), ("k_norm", norm[spec.num_heads :])):
            table.targets[f"{prefix}.{name}.weight"] = part.view(-1) if spec.qk_norm is QkNorm.ALL else part
    return AttentionWeights(
        qkv=table.fused(prefix, parts, spec.hidden_size, spec.attention_bias),
        out=table.fused(prefix, (("o_proj", spec.hidden_size),), q_size, spec.attention_bias),
        qk_norm=norm,
    )


def _latent_attention(table: TargetTable, spec: ModelSpec, mla: MlaSpec, prefix: str) -> MlaWeights:
    heads, hidden = spec.num_heads, spec.hidden_size
    q_size = heads * (mla.still_dim + spec.rope.dim)
    first, q_norm, q_up = ("q_proj", q_size), None, None
    if mla.q_rank is not None:
        first = ("q_a_proj", mla.q_rank)
        q_norm = table.whole(f"{prefix}.q_a_layernorm.weight", (mla.q_rank,))
        q_up = table.fused(prefix, (("q_b_proj", q_size),), mla.q_rank, bias=False)
    latent = ("kv_a_proj_with_mqa", mla.kv_rank + spec.rope.dim)
    keys_values = table.empty(heads, mla.still_dim + mla.value_dim, mla.kv_rank)
    table.targets[f"{prefix}.kv_b_proj.weight"] = keys_values.view(-1, mla.kv_rank)
    return MlaWeights(
        down=table.fused(prefix, (first, latent), hidden, spec.attention_bias),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=table.whole(f"{prefix}.kv_a_layernorm.weight", (mla.kv_rank,)),
        keys=keys_values[:, : mla.still_dim],
        values=keys_values[:, mla.still_dim :],
        out=table.fused(prefix, (("o_proj", hidden),), heads * mla.value_dim, spec.attention_bias),
    )


def _dense(table: TargetTable, hidden: int, size: int, bias: bool, prefix: str) -> DenseWeights:
    return DenseWeights(
        gate_up=table.fused(prefix, (("gate_proj", size), ("up_proj", size)), hidden, bias),
        down=table.fused(prefix, (("down_proj", hidden),), size, bias),
    )


def _experts(table: TargetTable, spec: ModelSpec, moe: MoeSpec, prefix: str) -> MoeWeights:
    """Files hold experts one by one, or fused as `experts.gate_up_proj` and `experts.down_proj`: both are taken."""
    size, hidden = moe.intermediate_size, spec.hidden_size
    gate_up = table.empty(moe.num_experts, 2 * size, hidden)
    down = table.empty(moe.num_experts, hidden, size)
    for expert in range(moe.num_experts):
        name = f"{prefix}.experts.{expert}"
        table.targets[f"{name}.gate_proj.weight"] = gate_up[expert, :size]
        table.targets[f"{name}.up_proj.weight"] = gate_up[expert, size:]
        table.targets[f"{name}.down_proj.weight"] = down[expert]
    table.targets[f"{prefix}.experts.gate_up_proj"] = gate_up
    table.targets[f"{prefix}.experts.down_proj"] = down
    shared = None
    if moe.shared_size:
        shared = _dense(table, hidden, moe.shared_size, False, f"{prefix}.shared_experts")
    router, correction = f"{prefix}.gate.weight", None
    if moe.router is RouterKind.SIGMOID:
        # Scores near each other decide which experts are chosen: not in 16 bits.
        table = replace(table, dtype=torch.float32)
        correction = table.whole(f"{prefix}.{CORRECTION}", (moe.num_experts,))
    gate = table.whole(router, (moe.num_experts, hidden))
    return MoeWeights(gate, correction, gate_up.unbind(), down.unbind(), shared)
