"""What the configs of Qwen's hybrid models say in common."""

import re
from dataclasses import replace

from deltaserve.model.family import (
    DRAFT_PREFIX,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    Rename,
    decoder_spec,
    dense_mlp,
    gqa_spec,
    num_layers,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.delta_net import DeltaSpec
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.layers.moe import MoeSpec, RouterKind
from deltaserve.model.model_spec import DraftNames, ModelSpec
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
    gqa = gqa_spec(filled, QkNorm.HEAD)
    gqa = replace(gqa, rope=replace(gqa.rope, dim=rotary_dim(filled, gqa.head_dim)), output_gate=True)
    delta, mlp = _delta_rule(fields, grouped), dense_mlp(filled)
    layers = [LayerSpec(gqa if attends else delta, mlp) for attends in _attending(fields, num_layers(fields))]
    return replace(decoder_spec(filled, family, layers), zero_centred_norms=True)


def _with_defaults(fields: Fields) -> Fields:
    """The fields with some dense size, for configs whose layers all have experts."""
    filled = fields.where_silent(_DEFAULTS)
    if filled.has("intermediate_size"):
        return filled
    return filled.or_else({"intermediate_size": fields.integer("moe_intermediate_size", 1, 16 * MAX_HIDDEN)})


def _attending(fields: Fields, num_layers: int) -> list[bool]:
    """Whether a layer has attention; else it is recurrent."""
    kinds = {"full_attention": True, "linear_attention": False}
    names = fields.texts("layer_types")
    if not fields.has("layer_types"):
        every = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=_ATTENTION_EVERY)
        if every > num_layers:
            raise fields.error("full_attention_interval", f"at most the {num_layers} layers, so that one has attention")
        return [(layer + 1) % every == 0 for layer in range(num_layers)]
    if len(names) != num_layers or not set(names) <= kinds.keys():
        raise fields.error("layer_types", f"a list of {num_layers} of {', '.join(kinds)}")
    if "full_attention" not in names:
        raise fields.error("layer_types", "at least one full_attention")
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
