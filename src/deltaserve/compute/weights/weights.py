"""Where weights live: fused tensors, and for every checkpoint name (canonical, see tensors.py) the part it fills."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.weights.block_matrix import BlockMatrix, Matrix, Stacked, empty_matrix
from deltaserve.core.layout.shard import Shard
from deltaserve.model.formats.block_forms import BlockForm
from deltaserve.model.model_spec import DeltaSpec, DraftSpec, Mixer, MlaSpec, ModelSpec, MoeSpec, QkNorm, RouterKind
from deltaserve.model.shard_rules import PaddedRows, Shape
from deltaserve.model.tensors import (
    CORRECTION,
    EMBEDDING,
    FUSED_EXPERTS,
    GUESSABLE,
    HEAD,
    NormNames,
    TensorPart,
    draft_parts,
    tensor_parts,
)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Sizes here are those of one rank."""

    weight: Matrix  # [out, in]
    bias: Tensor | None  # [out]; of a map whose results are added up over ranks: on the first of them


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]: queries, keys, values; before them Hq * D rows of gates, if there are any
    out: Linear  # [hidden, Hq * D]
    qk_norm: Tensor | None  # [Hq + Hkv, D], the two weights, repeated over heads where each is normalised alone
    sinks: Tensor | None = None  # [Hq] float32


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
class DeltaWeights:
    """C channels of the convolution: queries, keys, values."""

    inputs: Linear  # [C + Hv * V + 2 Hv, hidden]: channels, gates, beta, decay
    kernel: Tensor  # [C, 1, taps], the newest token last
    decay: Tensor  # [Hv] float32, log of the rate
    decay_bias: Tensor  # [Hv] float32
    norm: Tensor  # [V]
    out: Linear  # [hidden, Hv * V]


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: Linear  # [2 I, hidden]
    down: Linear  # [hidden, I]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Tensor  # [E, hidden], plain or packed; float32 where each score counts alone
    correction: Tensor | None  # [E] float32, added to the scores of the choice
    gate_up: tuple[Matrix, ...]  # of each expert held, plain or packed: [2 I, hidden]
    down: tuple[Matrix, ...]  # of each expert held: [hidden, I]
    shared: DenseWeights | None = None  # for every token
    shared_gate: Tensor | None = None  # [1, hidden]
    first_expert: int = 0  # of those held
    biases: "MoeBiases | None" = None


@dataclass(frozen=True, slots=True)
class MoeBiases:
    router: Tensor  # [E]
    gate_up: tuple[Tensor, ...]  # of each expert held: [2 I]
    down: tuple[Tensor, ...] | None  # of each expert held: [hidden]; of parts of experts: on the first rank


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    attention: AttentionWeights | MlaWeights | DeltaWeights
    mlp_norm: Tensor  # [hidden]
    mlp: DenseWeights | MoeWeights
    after_attention: Tensor | None = None  # [hidden], norm of what is added to the residual stream
    after_mlp: Tensor | None = None  # [hidden]


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Weights of a draft head; what is None here is the model's."""

    merge: Linear  # [hidden, 2 hidden] of embedding and hidden state, or [hidden, layers read * their size]
    embedding_norm: Tensor | None  # [hidden]; None: the layer's first norm
    hidden_norm: Tensor  # [hidden]
    layer: LayerWeights
    norm: Tensor  # [hidden]
    embedding: Tensor | None = None  # [V, hidden]
    lm_head: Matrix | None = None  # [tokens it chooses among, hidden]
    guessable: Tensor | None = None  # [the same] int64: how far behind its index each stands in the vocabulary


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Matrix  # [V, hidden]; the embedding itself when tied and not packed
    draft: DraftWeights | None = None


class CodeRows(NamedTuple):
    """Where a file's tensor goes that is kept as codes: rows of a matrix, from one on."""

    matrix: BlockMatrix
    first: int


@dataclass(slots=True)
class CodeTable:
    """Where tensors go that are kept as codes."""

    forms: Mapping[str, BlockForm] = field(default_factory=dict)
    """Form of each tensor that is kept as codes, by canonical name."""
    rounds_inputs: bool = False
    targets: dict[str, CodeRows] = field(default_factory=dict)

    def rows(self, shapes: Mapping[str, Shape]) -> BlockMatrix:
        """A matrix for tensors of one form, one after the other."""
        first = next(iter(shapes))
        shape = (sum(shape[0] for shape in shapes.values()), shapes[first][1])
        matrix, row = empty_matrix(self.forms[first], shape, self.rounds_inputs), 0
        for name, (count, _) in shapes.items():
            self.targets[name] = CodeRows(matrix, row)
            row += count
        return matrix


@dataclass(slots=True)
class TargetTable:
    """Allocates what a rank holds of the tensors that tensors.py lists, and names their parts."""

    parts: Mapping[str, TensorPart]
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    targets: dict[str, Tensor] = field(default_factory=dict)
    """A file's tensor is copied here, repeated over leading axes that only the target has."""
    codes: CodeTable = field(default_factory=CodeTable)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _padded(self, names: Iterable[str]) -> bool:
        """Whether rows are held that no file fills: they are zeros."""
        return self.shard.size > 1 and any(isinstance(self.parts[name].rule, PaddedRows) for name in names)

    def whole(self, name: str) -> Tensor:
        """A tensor of its own."""
        part = self.parts[name]
        dtype = torch.float32 if part.added else self.dtype
        target = torch.empty(part.shape_on(self.shard), dtype=dtype, device=self.device)
        if self._padded((name,)):
            target.zero_()
        self.targets[name] = target
        return target

    def transposed(self, name: str) -> Tensor:
        """A target as of `whole`, with the last two axes of the file's tensor exchanged."""
        *count, rows, cols = self.parts[name].shape_on(self.shard)
        target = self.empty(*count, cols, rows)
        self.targets[name] = target.transpose(-1, -2)
        return target

    def fused(self, prefix: str, *names: str) -> Linear:
        """Rows of several linear maps, one after the other; all have a bias, or none."""
        weight = self.matrix(*(f"{prefix}.{name}.weight" for name in names))
        bias = self.parts.get(f"{prefix}.{names[0]}.bias")
        has_bias = bias is not None and bool(bias.pieces(self.shard))
        return Linear(weight, self._rows(f"{prefix}.{name}.bias" for name in names) if has_bias else None)

    def matrix(self, *names: str) -> Matrix:
        """Rows of several matrices, one after the other: codes where they are to be kept, those of a kind together."""
        groups = [(form, list(of_form)) for form, of_form in groupby(names, self.codes.forms.get)]
        parts = [
            self._rows(of_form) if form is None else self.codes.rows(self._shapes(of_form)) for form, of_form in groups
        ]
        return parts[0] if len(parts) == 1 else Stacked(tuple(parts))

    def _shapes(self, names: Iterable[str]) -> dict[str, Shape]:
        return {name: self.parts[name].shape_on(self.shard) for name in names}

    def _rows(self, names: Iterable[str]) -> Tensor:
        shapes = self._shapes(names)
        first = next(iter(shapes.values()))
        target = self.empty(sum(shape[0] for shape in shapes.values()), *first[1:])
        if self._padded(shapes):
            target.zero_()
        row = 0
        for name, shape in shapes.items():
            self.targets[name] = target[row : row + shape[0]]
            row += shape[0]
        return target


def allocate(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = Shard(),
    codes: CodeTable | None = None,
) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Uninitialised weights of one rank of the model `spec`, and canonical name |-> where what is held of it goes.

    `codes`: what is to be kept as codes; it is told the same of that. A tied embedding has values, too.
    """
    table = TargetTable(tensor_parts(spec), shard, dtype, device, codes=codes or CodeTable())
    local = spec.local(shard)
    embedding = table.whole(EMBEDDING)
    layers = tuple(_layer(table, local, index, f"layers.{index}") for index in range(spec.num_layers))
    norm = table.whole("norm.weight")
    if not spec.tied_embeddings:
        head = table.matrix(HEAD)
    else:
        head = table.matrix(EMBEDDING) if EMBEDDING in table.codes.forms else embedding
    draft = None if local.draft is None or local.draft.folder is not None else _draft(table, local.draft)
    return DecoderWeights(embedding, layers, norm, head, draft), table.targets


def allocate_draft(
    draft: DraftSpec, dtype: torch.dtype, device: torch.device, shard: Shard = Shard()
) -> tuple[DraftWeights, dict[str, Tensor]]:
    """Allocate weights of a draft head that has a folder of its own."""
    table = TargetTable(draft_parts(draft), shard, dtype, device)
    return _draft(table, draft.local(shard)), table.targets


def _draft(table: TargetTable, draft: DraftSpec) -> DraftWeights:
    names = draft.names
    indexes = replace(table, dtype=torch.int64)
    return DraftWeights(
        merge=Linear(table.whole(f"{names.merge}.weight"), None),
        embedding_norm=None if names.embedding_norm is None else table.whole(f"{names.embedding_norm}.weight"),
        hidden_norm=table.whole(f"{names.hidden_norm}.weight"),
        layer=_layer(table, draft.layer, 0, names.layer),
        norm=table.whole(f"{names.norm}.weight"),
        embedding=table.whole(EMBEDDING) if draft.own_embedding else None,
        lm_head=None if draft.folder is None else table.whole(HEAD),
        guessable=None if draft.num_guessable is None else indexes.whole(GUESSABLE),
    )


def _layer(table: TargetTable, spec: ModelSpec, index: int, prefix: str) -> LayerWeights:
    norms = [None if name is None else table.whole(f"{prefix}.{name}") for name in NormNames.of(spec)]
    attention_norm, mlp_norm, after_attention, after_mlp = norms
    assert attention_norm is not None
    assert mlp_norm is not None
    attention: AttentionWeights | MlaWeights | DeltaWeights
    if spec.layers[index].mixer is Mixer.DELTA_RULE and spec.delta is not None:
        attention = _delta_rule(table, spec.delta, f"{prefix}.linear_attn")
    elif spec.mla is None:
        attention = _attention(table, spec, f"{prefix}.self_attn")
    else:
        attention = _latent_attention(table, spec.mla, f"{prefix}.self_attn")
    mlp: DenseWeights | MoeWeights
    if spec.moe is not None and spec.layers[index].has_experts:
        mlp = _experts(table, spec.moe, f"{prefix}.mlp")
    else:
        mlp = _dense(table, f"{prefix}.mlp")
    return LayerWeights(attention_norm, attention, mlp_norm, mlp, after_attention, after_mlp)


def _delta_rule(table: TargetTable, delta: DeltaSpec, prefix: str) -> DeltaWeights:
    inputs = ("in_proj_qkvz", "in_proj_ba") if delta.grouped else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    exact = replace(table, dtype=torch.float32)
    return DeltaWeights(
        inputs=table.fused(prefix, *inputs),
        kernel=table.whole(f"{prefix}.conv1d.weight"),
        decay=exact.whole(f"{prefix}.A_log"),
        decay_bias=exact.whole(f"{prefix}.dt_bias"),
        norm=table.whole(f"{prefix}.norm.weight"),
        out=table.fused(prefix, "out_proj"),
    )


def _attention(table: TargetTable, spec: ModelSpec, prefix: str) -> AttentionWeights:
    norm = None
    if spec.qk_norm is not QkNorm.NONE:
        dtype = torch.float32 if spec.zero_centred_norms else table.dtype
        norm = replace(table, dtype=dtype).empty(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        for name, part in (("q_norm", norm[: spec.num_heads]), ("k_norm", norm[spec.num_heads :])):
            table.targets[f"{prefix}.{name}.weight"] = part.view(-1) if spec.qk_norm is QkNorm.ALL else part
    return AttentionWeights(
        qkv=table.fused(prefix, "q_proj", "k_proj", "v_proj"),
        out=table.fused(prefix, "o_proj"),
        qk_norm=norm,
        sinks=replace(table, dtype=torch.float32).whole(f"{prefix}.sinks") if spec.sinks else None,
    )


def _latent_attention(table: TargetTable, mla: MlaSpec, prefix: str) -> MlaWeights:
    first, q_norm, q_up = "q_proj", None, None
    if mla.q_rank is not None:
        first = "q_a_proj"
        q_norm, q_up = table.whole(f"{prefix}.q_a_layernorm.weight"), table.fused(prefix, "q_b_proj")
    both = table.whole(f"{prefix}.kv_b_proj.weight").view(-1, mla.still_dim + mla.value_dim, mla.kv_rank)
    return MlaWeights(
        down=table.fused(prefix, first, "kv_a_proj_with_mqa"),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=table.whole(f"{prefix}.kv_a_layernorm.weight"),
        keys=both[:, : mla.still_dim],
        values=both[:, mla.still_dim :],
        out=table.fused(prefix, "o_proj"),
    )


def _dense(table: TargetTable, prefix: str) -> DenseWeights:
    return DenseWeights(gate_up=table.fused(prefix, "gate_proj", "up_proj"), down=table.fused(prefix, "down_proj"))


def _experts(table: TargetTable, moe: MoeSpec, prefix: str) -> MoeWeights:
    """Files hold experts one by one, or fused: both are taken."""
    if moe.clamped is not None:
        return _transposed_experts(table, moe, prefix)
    gate_up, down = (table.whole(f"{prefix}.experts.{name}") for name in FUSED_EXPERTS)
    size, num_held = down.shape[2], len(down)
    first = moe.placement.held(moe.num_experts, table.shard).start
    for index in range(num_held):
        name = f"{prefix}.experts.{first + index}"
        table.targets[f"{name}.gate_proj.weight"] = gate_up[index, :size]
        table.targets[f"{name}.up_proj.weight"] = gate_up[index, size:]
        table.targets[f"{name}.down_proj.weight"] = down[index]
    shared = _dense(table, f"{prefix}.shared_experts") if moe.shared_size else None
    gate = table.whole(f"{prefix}.shared_expert_gate.weight") if moe.shared_gate else None
    correction = None
    if moe.router is RouterKind.SIGMOID:
        # Scores near each other decide which experts are chosen: not in 16 bits.
        table = replace(table, dtype=torch.float32)
        correction = table.whole(f"{prefix}.{CORRECTION}")
    router = table.whole(f"{prefix}.gate.weight")
    return MoeWeights(router, correction, gate_up.unbind(), down.unbind(), shared, gate, first)


def _transposed_experts(table: TargetTable, moe: MoeSpec, prefix: str) -> MoeWeights:
    gate_up, down = (table.transposed(f"{prefix}.experts.{name}") for name in FUSED_EXPERTS)
    gate_up_bias, down_bias = (table.whole(f"{prefix}.experts.{name}_bias") for name in FUSED_EXPERTS)
    biases = MoeBiases(
        router=table.whole(f"{prefix}.gate.bias"),
        gate_up=gate_up_bias.unbind(),
        down=down_bias.unbind() if len(down_bias) else None,
    )
    first = moe.placement.held(moe.num_experts, table.shard).start
    router = table.whole(f"{prefix}.gate.weight")
    return MoeWeights(router, None, gate_up.unbind(), down.unbind(), first_expert=first, biases=biases)
