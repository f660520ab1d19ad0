"""Gemma 3, text only: most layers see a window, with a rotary embedding of their own; norms before and after."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITION,
    ZERO_CENTRED,
    Family,
    GgufForm,
    Rename,
    decoder_spec,
    dense_mlp,
    gqa_spec,
    num_layers,
    windows,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import Activation, LayerSpec, RopeSpec
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import rope_spec

_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
"""What transformers assumes where config.json is silent: those of the larger models name little."""
_PERIOD = 6
"""Every sixth layer sees everything."""
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4


def _build(fields: Fields) -> ModelSpec:
    fields = fields.or_else(_DEFAULTS)
    _refuse_variants(fields)
    count, max_position = num_layers(fields), fields.integer("max_position_embeddings", 1, MAX_POSITION)
    gqa, mlp = gqa_spec(fields, QkNorm.HEAD), replace(dense_mlp(fields), activation=Activation.GELU_TANH)
    far, near = _ropes(fields, max_position, gqa.head_dim)
    lengths = windows(fields, count, fields.integer("sliding_window_pattern", 1, MAX_LAYERS, default=_PERIOD))
    gqa = replace(gqa, scale=float(fields.integer("query_pre_attn_scalar", 1, MAX_HEADS) ** -0.5))
    mixers = (replace(gqa, rope=far if length is None else near, window_len=length) for length in lengths)
    spec = decoder_spec(fields, "gemma3_text", [LayerSpec(mixer, mlp) for mixer in mixers])
    return replace(
        spec,
        embedding_scale=float(spec.hidden_size**0.5),
        zero_centred_norms=fields.flag(ZERO_CENTRED, True),
        post_norms=True,
        max_position=max_position,  # scaling is counted in it
    )


def _refuse_variants(fields: Fields) -> None:
    if fields.text("hidden_activation") != "gelu_pytorch_tanh":
        raise fields.error("hidden_activation", "gelu_pytorch_tanh")
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.has(name):
            raise fields.error(name, "null")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")


def _ropes(fields: Fields, max_position: int, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary embedding of layers that see everything, and of those with a window."""
    if fields.has("rope_parameters"):
        both = fields.table("rope_parameters")
        tables = [both.table(f"{kind}_attention") for kind in ("full", "sliding")]
        found = zip(tables, (_GLOBAL_THETA, _LOCAL_THETA), strict=True)
        far, near = (table.or_else({"rope_theta": theta}).values for table, theta in found)
    else:
        far = {"rope_theta": fields.positive("rope_theta", _GLOBAL_THETA), **fields.table("rope_scaling").values}
        near = {"rope_theta": fields.positive("rope_local_base_freq", _LOCAL_THETA)}
    specs = (
        rope_spec(Fields({"rope_parameters": values}, fields.where), max_position, head_dim) for values in (far, near)
    )
    return next(specs), next(specs)


def _build_wrapped(fields: Fields) -> ModelSpec:
    """The multimodal files: the text model's fields are a table, some stand beside it."""
    beside = {name: fields.values[name] for name in ("dtype", "torch_dtype", "eos_token_id") if fields.has(name)}
    return _build(fields.table("text_config").or_else(beside))


_WRAPPED_RENAMES = (
    Rename(re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*"), None),
    Rename(re.compile(r"language_model\.model\.(.*)"), r"\1"),
    Rename(re.compile(r"model\.language_model\.(.*)"), r"\1"),
    Rename(re.compile(r"language_model\.(lm_head\..*)"), r"\1"),
)

_GGUF_27B_LAYERS = 62
"""Layers of the one size whose softmax is scaled by another number than the heads' size; no key says so."""


def _gguf_fields(fields: Fields, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that only this architecture has: no key says which layers see everything, nor that the others' rotary
    embedding is never scaled. Its files hold norms with 1 added."""
    num_layers, head_dim = values["num_hidden_layers"], values["head_dim"]
    if num_layers == _GGUF_27B_LAYERS:
        head_dim = values["hidden_size"] // values["num_attention_heads"]
    kinds = ("sliding_attention" if (layer + 1) % _PERIOD else "full_attention" for layer in range(num_layers))
    local_theta = fields.positive("rope.freq_base_swa", _LOCAL_THETA)
    return {
        "layer_types": list(kinds),
        "sliding_window": fields.integer("attention.sliding_window", 1, MAX_POSITION),
        "query_pre_attn_scalar": head_dim,
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        ZERO_CENTRED: False,
    }


_GGUF = GgufForm(
    "gemma3",
    frozenset({"attention.sliding_window", "rope.freq_base_swa"}),
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    _gguf_fields,
)

GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _build, COMMON_RENAMES, gguf=_GGUF)
GEMMA3_WRAPPED = Family(
    "gemma3", "Gemma3ForConditionalGeneration", _build_wrapped, (*_WRAPPED_RENAMES, *COMMON_RENAMES)
)
FAMILIES = (GEMMA3, GEMMA3_WRAPPED)
