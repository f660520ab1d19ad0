"""What the configs of Qwen's hybrid models say in common."""

import re
from dataclasses import replace

from deltaserve.model.family import DRAFT_PREFIX, MAX_EXPERTS, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, Rename, dense_spec
from deltaserve.model.fields import Fields
from deltaserve.model.model_spec import DeltaSpec, DraftNames, LayerSpec, Mixer, ModelSpec, MoeSpec, QkNorm, RouterKind
from deltaserve.model.rope_fields import rotary_dim

_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
"""What transformers assumes where config.json is silent."""
_ATTENTION_EVERY = 4
_MAX_KERNEL = 16
HYBRID_RENAMES = (
    Rename(re.compile(r"(?:model\.)?((?:mtp\.)?layers\.\d+\.mlp)\.shared_expert\.(.*)"), r"\1.shared_experts.\2"),
)


def hybrid_spec(fields: Fields, family: str, *, grouped: bool) -> ModelSpec:
    """Everything but experts. `grouped`: see DeltaSpec."""
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "true")
    filled = _with_defaults(fields)
    spec = dense_spec(filled, family, QkNorm.HEAD)
    rope = replace(spec.layers[0].rope, dim=rotary_dim(filled, spec.head_dim))
    return replace(
        spec,
        layers=tuple(LayerSpec(rope, mixer) for mixer in _mixers(fields, spec.num_layers)),
        zero_centred_norms=True,
        output_gate=True,
        delta=_delta_rule(fields, grouped),
    )


def _with_defaults(fields: Fields) -> Fields:
    """The fields with some dense size, for configs whose layers all have experts."""
    filled = fields.where_silent(_DEFAULTS)
    if filled.has("intermediate_size"):
        return filled
    return filled.or_else({"intermediate_size": fields.integer("moe_intermediate_size", 1, 16 * MAX_HIDDEN)})


def _mixers(fields: Fields, num_layers: int) -> list[Mixer]:
    kinds = {"full_attention": Mixer.ATTENTION, "linear_attention": Mixer.DELTA_RULE}
    names = fields.texts("layer_types")
    if not fields.has("layer_types"):
        every = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=_ATTENTION_EVERY)
        if every > num_layers:
            raise fields.error("full_attention_interval", f"at most the {num_layers} layers, so that one has attention")
        return [Mixer.DELTA_RULE if (layer + 1) % every else Mixer.ATTENTION for layer in range(num_layers)]
    if len(names) != num_layers or not set(names) <= kinds.keys():
        raise fields.error("layer_types", f"a list of {num_layers} of {', '.join(kinds)}")
    return [kinds[name] for name in names]


def _delta_rule(fields: Fields, grouped: bool) -> DeltaSpec:
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    return DeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_HEADS),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_HEADS),
        kernel_len=fields.integer("linear_conv_kernel_dim", 2, _MAX_KERNEL),
        grouped=grouped,
    )


def shared_expert_moe(fields: Fields, *, renormalise: bool) -> MoeSpec:
    """Softmax over experts, the best few; beside them one for every token, with a gate."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 renames it
    num_experts = fields.integer(name, 1, MAX_EXPERTS)
    return MoeSpec(
        router=RouterKind.SOFTMAX,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 16 * MAX_HIDDEN),
        renormalise=renormalise,
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 16 * MAX_HIDDEN),
        shared_gate=True,
    )


def hybrid_draft(spec: ModelSpec) -> DraftNames:
    names = ("layers.0", "fc", "pre_fc_norm_hidden", "norm", "pre_fc_norm_embedding")
    return DraftNames(*(f"{DRAFT_PREFIX}{name}" for name in names))
