"""Qwen3.5, dense and with experts: layers as Qwen3-Next's. Of the published multimodal files the text part is served.

They name its tensors `model.language_model.` and its fields in `text_config`; files of the text-only classes have the
plain names.
"""

import re

from deltaserve.model.families.hybrid_fields import HYBRID_RENAMES, hybrid_draft, hybrid_spec, shared_expert_moe
from deltaserve.model.family import COMMON_RENAMES, Family, Rename, with_experts
from deltaserve.model.fields import Fields
from deltaserve.model.model_spec import ModelSpec

_TEXT = r"model\.language_model\."
_WRAPPER_RENAMES = (
    Rename(re.compile(r"model\.visual\..*"), None),
    Rename(re.compile(_TEXT + r"(layers\.\d+\.mlp)\.shared_expert\.(.*)"), r"\1.shared_experts.\2"),
    Rename(re.compile(_TEXT + r"(.*)"), r"\1"),
    *HYBRID_RENAMES,
    *COMMON_RENAMES,
)
_TEXT_RENAMES = (*HYBRID_RENAMES, *COMMON_RENAMES)
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
"""Fields that the wrapper may have in place of its text part, or beside it."""


def _text_fields(fields: Fields) -> Fields:
    text = fields.table("text_config")
    if not text.values:
        raise fields.error("text_config", "the fields of the language model")
    outer = {name: fields.values[name] for name in _OF_THE_WHOLE if fields.has(name)}
    own = {name: value for name, value in text.values.items() if value is not None}
    tied = {"tie_word_embeddings": fields.flag("tie_word_embeddings", False)}
    return Fields({**outer, **own, **tied}, text.where)


def _dense(fields: Fields) -> ModelSpec:
    fields = fields.where_silent({"num_key_value_heads": 4})  # as transformers
    return hybrid_spec(fields, "qwen3_5", grouped=False)


def _with_experts(fields: Fields) -> ModelSpec:
    fields = fields.where_silent({"num_key_value_heads": 2})
    spec = hybrid_spec(fields, "qwen3_5_moe", grouped=False)
    return with_experts(spec, shared_expert_moe(fields, renormalise=True), range(spec.num_layers))


QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    lambda fields: _dense(_text_fields(fields)),
    _WRAPPER_RENAMES,
    hybrid_draft,
)
QWEN3_5_TEXT = Family("qwen3_5_text", "Qwen3_5ForCausalLM", _dense, _TEXT_RENAMES, hybrid_draft)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    lambda fields: _with_experts(_text_fields(fields)),
    _WRAPPER_RENAMES,
    hybrid_draft,
)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _with_experts, _TEXT_RENAMES, hybrid_draft)
FAMILIES = (QWEN3_5, QWEN3_5_TEXT, QWEN3_5_MOE, QWEN3_5_MOE_TEXT)
