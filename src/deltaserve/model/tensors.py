"""Which tensors a checkpoint must hold, by name and shape, and whether its files do. No torch: the launcher asks too.

Canonical names are those of the Llama files without the leading `model.`; a family's rename table leads there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.shard import Shard
from deltaserve.model.family import DRAFT_PREFIX, Family
from deltaserve.model.model_spec import (
    DeltaSpec,
    DraftSpec,
    HeadForm,
    Mixer,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterKind,
)
from deltaserve.model.shard_rules import (
    REPLICATED,
    ByExperts,
    ByHeads,
    Divided,
    FirstRank,
    HeadRows,
    OneOf,
    PaddedRows,
    Shape,
    ShardRule,
    TensorPiece,
)
from deltaserve.model.source import TensorHeader

FLOAT_DTYPES = ("F32", "F16", "BF16")
INDEX_DTYPES = ("I64", "I32")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
GUESSABLE = "d2t"
"""Tensor of offsets: for each token that a draft head chooses among, how far behind its own index it stands in the
model's vocabulary."""
_CENTRED = re.compile(r"((mtp\.)?norm|mtp\.pre_fc_norm_\w+|.*layernorm|.*\.[qk]_norm)\.weight")
"""Norms whose weights may be stored less 1."""
FUSED_EXPERTS = ("gate_up_proj", "down_proj")
"""What files call the experts' matrices where each is one tensor of all experts."""
CORRECTION = "gate.e_score_correction_bias"
"""Name of the router's correction in a layer of experts."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a checkpoint."""

    shape: Shape
    covers: tuple[str, ...]
    """Parts it fills: itself, or for a tensor that fuses several (experts), all of those."""
    rule: ShardRule = REPLICATED
    """What of it a rank holds."""
    added: float = 0.0
    """Number added to its values when they are loaded: in float32, and kept so."""
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """Types that files may have it in."""

    def shape_on(self, shard: Shard) -> Shape:
        return self.rule.shape(self.shape, shard)

    def pieces(self, shard: Shard) -> tuple[TensorPiece, ...]:
        """What a rank reads of it; empty where it holds nothing."""
        return self.rule.pieces(self.shape, shard)


_Entry = tuple[Shape, ShardRule]
GATE_BEFORE_QUERY = (1, 0)
"""A file's head has its query, then its gate; here all gates come first, so that queries and keys lie together."""


class NormNames(NamedTuple):
    """Names of a layer's norms; None: it has no such norm."""

    before_attention: str
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None

    @classmethod
    def of(cls, spec: ModelSpec) -> "NormNames":
        first, second = "input_layernorm.weight", "post_attention_layernorm.weight"
        if not spec.post_norms:
            return cls(first, second)
        return cls(first, "pre_feedforward_layernorm.weight", second, "post_feedforward_layernorm.weight")


def tensor_parts(spec: ModelSpec) -> dict[str, TensorPart]:
    """Canonical name |-> tensor, for everything a checkpoint of `spec` may hold."""
    table: _Entry = (spec.vocab_size, spec.hidden_size), PaddedRows()
    norm: _Entry = (spec.hidden_size,), REPLICATED
    entries = {EMBEDDING: table, "norm.weight": norm}
    if not spec.tied_embeddings:
        entries[HEAD] = table
    parts = _centred(spec, _parts(entries))
    for layer in range(spec.num_layers):
        parts |= _layer_parts(spec, layer, f"layers.{layer}")
    if spec.draft is not None and spec.draft.folder is None:
        parts |= draft_parts(spec.draft)
    return parts


def draft_parts(draft: DraftSpec) -> dict[str, TensorPart]:
    """Parts that a draft head has of its own."""
    names, layer = draft.names, draft.layer
    hidden, num_guessable = layer.hidden_size, draft.num_guessable or layer.vocab_size
    num_merged = 2 * hidden if draft.form is HeadForm.MERGED else len(draft.read_layers) * draft.read_size
    norms = (names.hidden_norm, names.norm, names.embedding_norm)
    entries: dict[str, _Entry] = {f"{name}.weight": ((hidden,), REPLICATED) for name in norms if name is not None}
    entries[f"{names.merge}.weight"] = (hidden, num_merged), REPLICATED
    if draft.own_embedding:
        entries[EMBEDDING] = (layer.vocab_size, hidden), PaddedRows()
    if draft.folder is not None:
        entries[HEAD] = (num_guessable, hidden), PaddedRows()
    parts = _centred(layer, _parts(entries)) | _layer_parts(layer, 0, names.layer)
    if draft.num_guessable is not None:
        parts[GUESSABLE] = TensorPart((num_guessable,), (GUESSABLE,), dtypes=INDEX_DTYPES)
    return parts


def _layer_parts(spec: ModelSpec, layer: int, prefix: str) -> dict[str, TensorPart]:
    norm: _Entry = (spec.hidden_size,), REPLICATED
    entries = {f"{prefix}.{name}": norm for name in NormNames.of(spec) if name is not None}
    if spec.layers[layer].mixer is Mixer.DELTA_RULE and spec.delta is not None:
        entries |= _named(f"{prefix}.linear_attn", _delta_rule(spec.hidden_size, spec.delta))
    else:
        entries |= _named(f"{prefix}.self_attn", _attention(spec))
    if spec.moe is not None and spec.layers[layer].has_experts:
        return _centred(spec, _parts(entries)) | _experts(spec.hidden_size, spec.moe, f"{prefix}.mlp")
    return _centred(spec, _parts(entries | _named(f"{prefix}.mlp", _dense(spec))))


def _centred(spec: ModelSpec, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
    """The parts with what files leave out of the weights of norms."""
    if not spec.zero_centred_norms:
        return parts
    return {name: replace(part, added=float(bool(_CENTRED.fullmatch(name)))) for name, part in parts.items()}


def _named(prefix: str, entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


def _parts(entries: Mapping[str, _Entry]) -> dict[str, TensorPart]:
    return {name: TensorPart(shape, (name,), rule) for name, (shape, rule) in entries.items()}


def _attention(spec: ModelSpec) -> dict[str, _Entry]:
    if spec.mla is not None:
        return _latent_attention(spec, spec.mla)
    q_size, kv_size, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    num_inputs = spec.attention_inputs * hidden
    heads, kv_heads = Divided(spec.num_heads), Divided(spec.num_kv_heads)
    queries: _Entry = (q_size, num_inputs), heads
    if spec.output_gate:
        rows = HeadRows(spec.num_heads, spec.head_dim)
        queries = (2 * q_size, num_inputs), ByHeads((rows, rows), spec.num_heads, GATE_BEFORE_QUERY)
    entries: dict[str, _Entry] = {
        "q_proj.weight": queries,
        "k_proj.weight": ((kv_size, num_inputs), kv_heads),
        "v_proj.weight": ((kv_size, num_inputs), kv_heads),
        "o_proj.weight": ((hidden, q_size), Divided(spec.num_heads, axis=1)),
    }
    if spec.attention_bias:
        entries |= _biases(entries)
    if spec.sinks:
        entries["sinks"] = (spec.num_heads,), heads
    if spec.qk_norm is QkNorm.HEAD:
        entries |= {f"{name}_norm.weight": ((spec.head_dim,), REPLICATED) for name in "qk"}
    if spec.qk_norm is QkNorm.ALL:
        entries |= {"q_norm.weight": ((q_size,), heads), "k_norm.weight": ((kv_size,), kv_heads)}
    return entries


def _delta_rule(hidden: int, delta: DeltaSpec) -> dict[str, _Entry]:
    """Files have the inputs grouped by key head in two tensors, or in four that are not grouped."""
    keys, values = HeadRows(delta.num_key_heads, delta.key_dim), HeadRows(delta.num_value_heads, delta.value_dim)
    one = HeadRows(delta.num_value_heads, 1)
    kinds = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,), "in_proj_b": (one,), "in_proj_a": (one,)}
    if delta.grouped:
        kinds = {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (one, one)}
    num_groups = delta.num_key_heads if delta.grouped else 1
    entries: dict[str, _Entry] = {
        f"{name}.weight": ((sum(kind.num_heads * kind.rows for kind in of_map), hidden), ByHeads(of_map, num_groups))
        for name, of_map in kinds.items()
    }
    heads, size = Divided(delta.num_value_heads), delta.num_value_heads * delta.value_dim
    return entries | {
        "conv1d.weight": ((sum(delta.channels), 1, delta.kernel_len), ByHeads((keys, keys, values))),
        "A_log": ((delta.num_value_heads,), heads),
        "dt_bias": ((delta.num_value_heads,), heads),
        "norm.weight": ((delta.value_dim,), REPLICATED),
        "out_proj.weight": ((hidden, size), Divided(delta.num_value_heads, axis=1)),
    }


def _latent_attention(spec: ModelSpec, mla: MlaSpec) -> dict[str, _Entry]:
    """What makes latents and compressed queries is on every rank; what goes from there to heads is divided."""
    heads, hidden = Divided(spec.num_heads), spec.hidden_size
    q_size = spec.num_heads * (mla.still_dim + mla.turning_dim)
    kv_size, out_size = spec.num_heads * (mla.still_dim + mla.value_dim), spec.num_heads * mla.value_dim
    biased: dict[str, _Entry] = {
        "kv_a_proj_with_mqa.weight": ((mla.kv_rank + mla.turning_dim, hidden), REPLICATED),
        "o_proj.weight": ((hidden, out_size), Divided(spec.num_heads, axis=1)),
    }
    plain: dict[str, _Entry] = {
        "kv_b_proj.weight": ((kv_size, mla.kv_rank), heads),
        "kv_a_layernorm.weight": ((mla.kv_rank,), REPLICATED),
    }
    if mla.q_rank is None:
        plain["q_proj.weight"] = (q_size, hidden), heads
    else:
        biased["q_a_proj.weight"] = (mla.q_rank, hidden), REPLICATED
        plain["q_b_proj.weight"] = (q_size, mla.q_rank), heads
        plain["q_a_layernorm.weight"] = (mla.q_rank,), REPLICATED
    return biased | plain | (_biases(biased) if spec.attention_bias else {})


def _biases(weights: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Biases of these linear maps: divided as the rows of the matrix are, held once where its columns are divided."""
    return {
        name.replace("weight", "bias"): (
            shape[:1],
            FirstRank() if isinstance(rule, Divided) and rule.axis == 1 else rule,
        )
        for name, (shape, rule) in weights.items()
    }


def _dense(spec: ModelSpec) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {**_gated(spec.hidden_size, spec.intermediate_size)}
    return entries | _biases(entries) if spec.mlp_bias else entries


def _gated(hidden: int, inner: int) -> dict[str, tuple[Shape, Divided]]:
    return {
        "gate_proj.weight": ((inner, hidden), Divided(inner)),
        "up_proj.weight": ((inner, hidden), Divided(inner)),
        "down_proj.weight": ((hidden, inner), Divided(inner, axis=1)),
    }


def _experts(hidden: int, moe: MoeSpec, prefix: str) -> dict[str, TensorPart]:
    """Files hold experts one by one, or fused as `experts.gate_up_proj` and `experts.down_proj`: both are taken."""
    count, inner = moe.num_experts, moe.intermediate_size
    router: dict[str, _Entry] = {f"{prefix}.gate.weight": ((count, hidden), REPLICATED)}
    if moe.router is RouterKind.SIGMOID:
        router[f"{prefix}.{CORRECTION}"] = (count,), REPLICATED
    if moe.clamped is not None:
        return _parts(router | _transposed_experts(hidden, moe, prefix))
    if moe.shared_size:
        router |= {f"{prefix}.shared_experts.{name}": e for name, e in _gated(hidden, moe.shared_size).items()}
    if moe.shared_gate:
        router[f"{prefix}.shared_expert_gate.weight"] = (1, hidden), REPLICATED
    parts = _parts(router)
    names: dict[str, list[str]] = {name: [] for name in FUSED_EXPERTS}
    for expert in range(count):
        for name, (shape, rule) in _gated(hidden, inner).items():
            full = f"{prefix}.experts.{expert}.{name}"
            parts[full] = TensorPart(shape, (full,), ByExperts(count, moe.placement, OneOf(expert, count), rule))
            names["down_proj" if name.startswith("down") else "gate_up_proj"].append(full)
    fused = {
        "gate_up_proj": ((count, 2 * inner, hidden), Divided(inner, axis=1, num_blocks=2)),
        "down_proj": ((count, hidden, inner), Divided(inner, axis=2)),
    }
    for name, (shape, rule) in fused.items():
        parts[f"{prefix}.experts.{name}"] = TensorPart(
            shape, tuple(names[name]), ByExperts(count, moe.placement, Divided(count), rule)
        )
    return parts


def _transposed_experts(hidden: int, moe: MoeSpec, prefix: str) -> dict[str, _Entry]:
    """Fused, [in, out] of each expert; gate and up projection of a channel side by side."""
    count, inner = moe.num_experts, moe.intermediate_size

    def by(part: Divided | FirstRank) -> ByExperts:
        return ByExperts(count, moe.placement, Divided(count), part)

    return {
        f"{prefix}.gate.bias": ((count,), REPLICATED),
        f"{prefix}.experts.gate_up_proj": ((count, hidden, 2 * inner), by(Divided(inner, axis=2))),
        f"{prefix}.experts.gate_up_proj_bias": ((count, 2 * inner), by(Divided(inner, axis=1))),
        f"{prefix}.experts.down_proj": ((count, inner, hidden), by(Divided(inner, axis=1))),
        f"{prefix}.experts.down_proj_bias": ((count, hidden), by(FirstRank())),
    }


@dataclass(slots=True)
class Inventory:
    """Books which tensors were found. Each is found once; none is missing."""

    family: Family
    parts: Mapping[str, TensorPart]
    index: Mapping[str, str]
    """Tensor |-> file, as the folder's index says; empty without one."""
    num_values: int = 0
    """Elements of all tensors taken."""
    may_be_unused: tuple[str, ...] = ()
    """What the names of tensors begin with that files may hold beside `parts`."""
    unused: list[str] = field(default_factory=list)
    """Tensors of the files that the model does not need."""
    _found: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, family: Family, spec: ModelSpec, index: Mapping[str, str]) -> "Inventory":
        """Nothing found yet. `spec` is `as_stored`."""
        drafts = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
        unused = (DRAFT_PREFIX, *(f"layers.{layer}." for layer in drafts))
        return cls(family, tensor_parts(spec), index, may_be_unused=unused)

    def take(self, header: TensorHeader) -> str | None:
        """The canonical name of a file's tensor, None for one to skip. Raises ConfigError naming file and tensor."""
        shown = f"{header.file}: {header.name[:80]}"
        told = self.index.get(header.name, "nothing")
        if self.index and told != header.file:
            raise ConfigError(f"{shown} is in this file, but the index says {told[:80]}")
        canonical = self.family.canonical(header.name)
        part = None if canonical is None else self.parts.get(canonical)
        if canonical is None or (part is None and canonical.startswith(self.may_be_unused)):
            self.unused.append(header.name)
            return None
        if part is None:
            raise ConfigError(f"{shown} is not a tensor of this model")
        if header.dtype not in part.dtypes:
            raise ConfigError(f"{shown} has dtype {header.dtype}, expected one of {', '.join(part.dtypes)}")
        if not self._found.isdisjoint(part.covers):
            raise ConfigError(f"{shown} is given twice")
        if header.shape != part.shape:
            raise ConfigError(f"{shown} has shape {list(header.shape)}, expected {list(part.shape)}")
        self._found.update(part.covers)
        self.num_values += prod(header.shape)
        return canonical

    def check_complete(self) -> None:
        """Raises ConfigError unless everything was found."""
        missing = sorted({name for part in self.parts.values() for name in part.covers} - self._found)
        if missing:
            raise ConfigError(f"weights: {len(missing)} tensors are missing, first {missing[0]}")


def as_stored(spec: ModelSpec, family: Family, headers: Iterable[TensorHeader]) -> ModelSpec:
    """`spec`, untied where the files hold an output matrix of their own: it may differ from the embedding.

    transformers uses it then, whatever `tie_word_embeddings` says.
    """
    if not spec.tied_embeddings:
        return spec
    has_head = any(family.canonical(header.name) == HEAD for header in headers)
    return replace(spec, tied_embeddings=not has_head)


def check_weights(headers: Iterable[TensorHeader], inventory: Inventory) -> None:
    """Against what the model needs; no weight is read. Raises ConfigError."""
    for header in headers:
        inventory.take(header)
    inventory.check_complete()
