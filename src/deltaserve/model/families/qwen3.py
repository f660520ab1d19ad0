"""Qwen3 dense: as Llama, with RMSNorm on each query and key head; head_dim is its own number."""

from deltaserve.model.family import COMMON_RENAMES, Family, GgufForm, refuse_sliding_window, uniform_spec
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import refuse_partial_rotary

_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32}
"""What transformers assumes where config.json is silent."""


def _build(fields: Fields) -> ModelSpec:
    fields = fields.where_silent(_DEFAULTS)
    refuse_sliding_window(fields)
    refuse_partial_rotary(fields)
    return uniform_spec(fields, "qwen3", QkNorm.HEAD)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _build, COMMON_RENAMES, gguf=GgufForm("qwen3"))
FAMILIES = (QWEN3,)
