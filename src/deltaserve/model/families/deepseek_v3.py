"""DeepSeek V3: latent attention; first layers dense, then experts in groups beside a shared one."""

from dataclasses import replace

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    Family,
    dense_spec,
    refuse_sliding_window,
    with_experts,
    with_rotary_dim,
)
from deltaserve.model.fields import Fields
from deltaserve.model.model_spec import DraftNames, MlaSpec, ModelSpec, MoeSpec, QkNorm, RouterKind
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
    spec = dense_spec(fields, "deepseek_v3", QkNorm.NONE)
    rope_dim = fields.integer("qk_rope_head_dim", 2, MAX_HEADS)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    mla = _latent_attention(fields, rope_dim)
    if mla.q_rank is None and spec.attention_bias:
        raise fields.error("attention_bias", "false where q_lora_rank is null")
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS)  # as transformers: of more than there are
    spec = with_experts(with_rotary_dim(spec, rope_dim), _experts(fields), range(first, spec.num_layers))
    drafts = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=mla.kv_rank + rope_dim,
        mla=mla,
        num_draft_layers=fields.integer(drafts, 0, MAX_LAYERS, default=1),
    )


def _latent_attention(fields: Fields, rope_dim: int) -> MlaSpec:
    still_dim = fields.integer("qk_nope_head_dim", 1, MAX_HEADS)
    return MlaSpec(
        q_rank=fields.integer("q_lora_rank", 1, MAX_HIDDEN) if fields.has("q_lora_rank") else None,
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_HIDDEN),
        still_dim=still_dim,
        turning_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 1, MAX_HEADS),
        softmax_scale=float((still_dim + rope_dim) ** -0.5) * softmax_correction(fields),
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
