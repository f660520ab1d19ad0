"""Qwen3-Next: three recurrent layers and one of attention in turn; experts beside a shared one that has a gate."""

from deltaserve.model.families.hybrid_fields import HYBRID_RENAMES, hybrid_draft, hybrid_spec, shared_expert_moe
from deltaserve.model.family import COMMON_RENAMES, Family, with_experts
from deltaserve.model.fields import Fields
from deltaserve.model.model_spec import ModelSpec

_DEFAULTS = {"num_key_value_heads": 2, "intermediate_size": 5632}
"""What transformers assumes where config.json is silent."""


def _build(fields: Fields) -> ModelSpec:
    fields = fields.where_silent(_DEFAULTS)
    spec = hybrid_spec(fields, "qwen3_next", grouped=True)
    step = fields.integer("decoder_sparse_step", 1, spec.num_layers, default=1)
    dense = set(fields.integers("mlp_only_layers"))
    moe = shared_expert_moe(fields, renormalise=fields.flag("norm_topk_prob", True))
    return with_experts(spec, moe, [i for i in range(spec.num_layers) if i not in dense and (i + 1) % step == 0])


QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _build, (*HYBRID_RENAMES, *COMMON_RENAMES), hybrid_draft)
FAMILIES = (QWEN3_NEXT,)
