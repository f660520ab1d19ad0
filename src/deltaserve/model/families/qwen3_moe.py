"""Qwen3 MoE: attention of Qwen3; softmax router over experts, top-k."""

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    MAX_HIDDEN,
    Family,
    refuse_sliding_window,
    uniform_spec,
    with_experts,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.moe import MoeSpec, RouterKind
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import refuse_partial_rotary

_DEFAULTS = {"num_key_value_heads": 4}
"""What transformers assumes where config.json is silent."""


def _build(fields: Fields) -> ModelSpec:
    fields = fields.where_silent(_DEFAULTS)
    refuse_sliding_window(fields)
    refuse_partial_rotary(fields)
    spec = uniform_spec(fields, "qwen3_moe", QkNorm.HEAD)
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 renames it
    num_experts = fields.integer(name, 1, MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1, spec.num_layers, default=1)
    dense = set(fields.integers("mlp_only_layers"))
    moe = MoeSpec(
        router=RouterKind.SOFTMAX,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 16 * MAX_HIDDEN),
        renormalise=fields.flag("norm_topk_prob", False),
    )
    return with_experts(spec, moe, [i for i in range(spec.num_layers) if i not in dense and (i + 1) % step == 0])


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _build, COMMON_RENAMES)
FAMILIES = (QWEN3_MOE,)
