"""DeepSeek V3: latent attention; first layers dense, then experts in groups beside a shared one."""

from dataclasses import replace

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    Family,
    decoder_spec,
    dense_mlp,
    gqa_spec,
    num_layers,
    refuse_sliding_window,
    with_experts,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import GqaSpec, QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.layers.mla import MlaSpec
from deltaserve.model.layers.moe import MoeSpec, RouterKind
from deltaserve.model.model_spec import DraftNames, ModelSpec
from deltaserve.model.rope_fields import refuse_partial_rotary, softmax_correction

_DEFAULTS = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
"""What transformers assumes where config.json is silent."""
_NONE = {"first_k_dense_replace": 0, "n_group": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0}
"""What null comes to, which says that there is none."""


def _build(fields: Fields) -> ModelSpec:
    fields = fields.where_silent(_DEFAULTS).or_else(_NONE)
    refuse_sliding_window(fields)
    refuse_partial_rotary(fields)
    for name, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(name, expected) != expected:
            raise fields.error(name, expected)
    fields.integer("moe_layer_freq", 1, 1, default=1)
    mla = _latent_attention(fields, gqa_spec(fields, QkNorm.NONE))
    spec = decoder_spec(fields, "deepseek_v3", [LayerSpec(mla, dense_mlp(fields))] * num_layers(fields))
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS)  # as transformers: of more than there are
    drafts = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    return replace(
        with_experts(spec, _experts(fields), range(first, spec.num_layers)),
        num_draft_layers=fields.integer(drafts, 0, MAX_LAYERS, default=1),
    )


def _latent_attention(fields: Fields, gqa: GqaSpec) -> MlaSpec:
    """`gqa`: what attention with heads of their own would be."""
    rope_dim = fields.integer("qk_rope_head_dim", 2, MAX_HEADS)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    still_dim = fields.integer("qk_nope_head_dim", 1, MAX_HEADS)
    q_rank = fields.integer("q_lora_rank", 1, MAX_HIDDEN) if fields.has("q_lora_rank") else None
    kv_rank = fields.integer("kv_lora_rank", 1, MAX_HIDDEN)
    if q_rank is None and gqa.bias:
        raise fields.error("attention_bias", "false where q_lora_rank is null")
    return MlaSpec(
        rope=replace(gqa.rope, dim=rope_dim),
        num_heads=gqa.num_heads,
        num_kv_heads=1,
        head_dim=kv_rank + rope_dim,
        bias=gqa.bias,
        scale=float((still_dim + rope_dim) ** -0.5) * softmax_correction(fields),
        q_rank=q_rank,
        kv_rank=kv_rank,
        still_dim=still_dim,
        value_dim=fields.integer("v_head_dim", 1, MAX_HEADS),
        interleaved=fields.flag("rope_interleave", True),
    )


def _experts(fields: Fields) -> MoeSpec:
    num_experts = fields.integer("n_routed_experts", 1, MAX_EXPERTS)
    num_groups = fields.integer("n_group", 1, num_experts)
    if num_experts % num_groups or (num_groups > 1 and num_experts == num_groups):
        raise fields.error("n_group", f"a divisor of n_routed_experts {num_experts} with two experts in a group")
    kept_groups = fields.integer("topk_group", 1, num_groups, default=num_groups)
    size = fields.integer("moe_intermediate_size", 1, 16 * MAX_HIDDEN)
    return MoeSpec(
        router=RouterKind.SIGMOID,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts // num_groups * kept_groups),
        intermediate_size=size,
        renormalise=fields.flag("norm_topk_prob", True),
        num_groups=num_groups,
        kept_groups=kept_groups,
        scale=fields.positive("routed_scaling_factor"),
        shared_size=size * fields.integer("n_shared_experts", 0, MAX_EXPERTS),
    )


def _draft_names(spec: ModelSpec) -> DraftNames:
    """The layer behind the last one. Files hold copies of embedding and output matrix with it, which are not used."""
    layer = f"layers.{spec.num_layers}"
    return DraftNames(layer, f"{layer}.eh_proj", f"{layer}.hnorm", f"{layer}.shared_head.norm", f"{layer}.enorm")


DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", _build, COMMON_RENAMES, _draft_names)
FAMILIES = (DEEPSEEK_V3,)
