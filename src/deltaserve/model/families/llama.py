"""Llama 2, 3.x: GQA, full RoPE, dense SwiGLU."""

from deltaserve.model.family import COMMON_RENAMES, Family, GgufForm, refuse_sliding_window, uniform_spec
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import refuse_partial_rotary


def _build(fields: Fields) -> ModelSpec:
    refuse_sliding_window(fields)
    refuse_partial_rotary(fields)
    return uniform_spec(fields, "llama", QkNorm.NONE)


LLAMA = Family("llama", "LlamaForCausalLM", _build, COMMON_RENAMES, gguf=GgufForm("llama", pairs_rows=True))
FAMILIES = (LLAMA,)
