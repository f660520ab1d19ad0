"""Llama 2, 3.x: GQA, full RoPE, dense SwiGLU."""

from deltaserve.models.family import COMMON_RENAMES, Family, dense_spec
from deltaserve.models.fields import Fields
from deltaserve.models.model_spec import ModelSpec, QkNorm


def _build(fields: Fields) -> ModelSpec:
    return dense_spec(fields, "llama", QkNorm.NONE)


LLAMA = Family("llama", "LlamaForCausalLM", _build, COMMON_RENAMES)
