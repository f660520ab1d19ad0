"""What a family file provides, and the mapping most families share."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.model.fields import Fields
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.layers.gqa import GqaSpec, QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec, RopeKind, RopeSpec
from deltaserve.model.layers.moe import MoeSpec
from deltaserve.model.model_spec import DraftNames, ModelSpec
from deltaserve.model.rope_fields import rope_spec

MAX_LAYERS = 512
MAX_VOCAB = 2**22
MAX_HIDDEN = 2**17
MAX_HEADS = 2**12
MAX_EXPERTS = 2**12
MAX_POSITION = 2**26

DRAFT_PREFIX = "mtp."
"""Prefix of a draft head's tensors, where they are not those of a further layer."""
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}


@dataclass(frozen=True, slots=True)
class Rename:
    """Checkpoint names that match `pattern` (whole name) are known here as `name`; None: not needed, skipped."""

    pattern: re.Pattern[str]
    name: str | None


ZERO_CENTRED = "zero_centred_norms"
"""No field of Hugging Face's: how a GGUF file says that 1 was added to its norms."""


def no_more_fields(fields: Fields, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that most families have are all."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files hold a model of a family."""

    architecture: str
    """Value of general.architecture: keys begin with it."""
    keys: frozenset[str] = frozenset()
    """Keys below it that are read beside those of all families."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of a layer, as files name it |-> as Hugging Face's do, where they differ from most or have more."""
    fields: Callable[[Fields, Mapping[str, Any]], Mapping[str, Any]] = no_more_fields
    """Makes (keys below it, fields that all families have) into fields in place of those or beside them."""
    pairs_rows: bool = False
    """Whether the two channels of queries and keys that RoPE turns together lie side by side, not D/2 apart."""


@dataclass(frozen=True, slots=True)
class Family:
    """One line of the table of supported models."""

    model_type: str
    architecture: str
    """Class name in `architectures` of config.json."""
    build: Callable[[Fields], ModelSpec]
    renames: tuple[Rename, ...]
    """First match wins; a name without a match is taken as it is."""
    draft: Callable[[ModelSpec], DraftNames] | None = None
    """What files of the model call the head that drafts tokens (MTP), where the family has one."""
    gguf: GgufForm | None = None
    """Present where its GGUF files are read."""

    def canonical(self, name: str) -> str | None:
        """Our name of a checkpoint tensor, or None for one to skip."""
        for rename in self.renames:
            found = rename.pattern.fullmatch(name)
            if found:
                return None if rename.name is None else found.expand(rename.name)
        return name


COMMON_RENAMES = (
    Rename(re.compile(r".*rotary_emb\.inv_freq"), None),
    Rename(re.compile(r"model\.(.*)"), r"\1"),
)


def decoder_spec(fields: Fields, family: str, layers: Sequence[LayerSpec]) -> ModelSpec:
    """The model of these layers, with what most configs say of it beside them.

    Defaults here are Llama's, and what null means in any family; others are a family's own, for where a file is silent.
    """
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "silu")
    rope = next(layer.mixer.attention.rope for layer in layers if layer.mixer.attention is not None)
    return ModelSpec(
        family=family,
        dtype=_dtype(fields),
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=_hidden_size(fields),
        layers=tuple(layers),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_position=_context_len(rope, _max_position(fields)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def uniform_spec(fields: Fields, family: str, qk_norm: QkNorm) -> ModelSpec:
    """A Llama-like decoder: all layers equal, GQA, heads that turn whole, SwiGLU, RMSNorm."""
    return decoder_spec(fields, family, [LayerSpec(gqa_spec(fields, qk_norm), dense_mlp(fields))] * num_layers(fields))


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def gqa_spec(fields: Fields, qk_norm: QkNorm) -> GqaSpec:
    """Attention that sees everything, with heads that turn whole."""
    hidden = _hidden_size(fields)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = fields.integer("head_dim", 2, MAX_HEADS, default=max(2, hidden // heads))
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    refuse_foreign_fields(fields)
    return GqaSpec(
        rope=rope_spec(fields, _max_position(fields), head_dim),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bias=fields.flag("attention_bias", False),
        qk_norm=qk_norm,
    )


def dense_mlp(fields: Fields) -> DenseSpec:
    return DenseSpec(fields.integer("intermediate_size", 1, 16 * MAX_HIDDEN), fields.flag("mlp_bias", False))


def with_experts(spec: ModelSpec, moe: MoeSpec, layers: Collection[int]) -> ModelSpec:
    """`spec` with experts in these layers."""
    changed = (layer._replace(mlp=moe) if index in layers else layer for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(changed))


def _hidden_size(fields: Fields) -> int:
    return fields.integer("hidden_size", 1, MAX_HIDDEN)


def _max_position(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", 1, MAX_POSITION)


def windows(fields: Fields, num_layers: int, period: int) -> tuple[int | None, ...]:
    """Window of each layer, from `layer_types`; without those every `period`-th layer sees everything."""
    kinds = fields.texts("layer_types")
    if not kinds:
        kinds = tuple(_WINDOWED if (layer + 1) % period else _FULL for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {_WINDOWED, _FULL}:
        raise fields.error("layer_types", f"{num_layers} times {_WINDOWED} or {_FULL}")
    if _FULL not in kinds:
        raise fields.error("layer_types", f"at least one {_FULL}")
    if _WINDOWED not in kinds:
        return (None,) * num_layers
    window_len = fields.integer("sliding_window", 1, MAX_POSITION)
    return tuple(window_len if kind == _WINDOWED else None for kind in kinds)


def refuse_sliding_window(fields: Fields) -> None:
    """Refuse a window for a family whose layers all see everything. Qwen configs carry one that published models
    turn off."""
    if fields.flag("use_sliding_window", False):
        raise ConfigError(f"{fields.where}: use_sliding_window is true: windowed attention is not supported")
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and any(kind != _FULL for kind in kinds):
        raise fields.error("layer_types", f"{_FULL} alone for this family")


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "attention_multiplier": (),
    "qk_layernorm": (False,),
    "parallel_attn": (False,),
    "alibi": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "lm_head_multiplier": (1,),
    "key_multiplier": (1,),
    "mup_scale_emb": (1,),
    "scale_emb": (1,),
    "scale_depth": (1,),
}
"""Fields of other families that change what a model computes |-> values that do not, null apart."""


def refuse_foreign_fields(fields: Fields) -> None:
    """transformers ignores them for a class that does not have them; a file that has one was made for another."""
    for name, neutral in _NEUTRAL.items():
        if fields.has(name) and fields.values[name] not in neutral:
            raise fields.error(name, "null: it is not supported for this family" if not neutral else f"{neutral[0]}")
    ropeless = fields.values.get("no_rope_layers")
    if isinstance(ropeless, list) and any(flag != 1 for flag in ropeless):
        raise fields.error("no_rope_layers", "1 for every layer (a rotary embedding): others are not supported")


def _context_len(rope: RopeSpec, max_position: int) -> int:
    """Tokens that the config promises, as vLLM counts them: times the factor of linear and yarn, for the latter of
    the length it was first trained on. What the config names itself is never cut."""
    length = float(max_position)
    if rope.kind is RopeKind.LINEAR:
        length *= rope.factor
    if rope.kind is RopeKind.YARN:
        length = max(length, rope.original_max_position * rope.factor)
    return int(min(max(length, 1.0), MAX_POSITION))


def _dtype(fields: Fields) -> DType:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    found = fields.text(name, "float32")
    if found not in _DTYPES:
        raise fields.error(name, "one of " + ", ".join(_DTYPES))
    return _DTYPES[found]
