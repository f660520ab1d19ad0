"""gpt-oss: every second layer sees a window, attention sinks, experts with biases and a clamped SwiGLU."""

import re
from dataclasses import replace

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    Family,
    Rename,
    dense_spec,
    windows,
    with_experts,
)
from deltaserve.model.fields import Fields
from deltaserve.model.model_spec import ClampedGlu, ModelSpec, MoeSpec, QkNorm, RouterKind
from deltaserve.model.rope_fields import refuse_partial_rotary

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}
_DEFAULTS = {"attention_bias": True, "sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
_PERIOD = 2
_RENAMES = (Rename(re.compile(r"model\.(layers\.\d+\.mlp)\.router\.(weight|bias)"), r"\1.gate.\2"),)


def _build(fields: Fields) -> ModelSpec:
    refuse_partial_rotary(fields)
    spec = dense_spec(_with_defaults(fields), "gpt_oss", QkNorm.NONE)
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    moe = MoeSpec(
        router=RouterKind.SOFTMAX,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=spec.intermediate_size,
        renormalise=True,  # over all, then over the chosen: what softmax over the chosen alone gives
        clamped=ClampedGlu(fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)),
    )
    lengths = windows(_with_defaults(fields), spec.num_layers, _PERIOD)
    layers = (replace(layer, window_len=length) for layer, length in zip(spec.layers, lengths, strict=True))
    return replace(with_experts(replace(spec, layers=tuple(layers)), moe, range(spec.num_layers)), sinks=True)


def _with_defaults(fields: Fields) -> Fields:
    """What transformers assumes where config.json is silent."""
    defaults = {**_DEFAULTS, "rope_theta": _YARN["rope_theta"]}
    if fields.has("torch_dtype"):
        defaults.pop("dtype")
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        defaults["rope_parameters"] = _YARN
    return fields.or_else(defaults)


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _build, (*_RENAMES, *COMMON_RENAMES))
FAMILIES = (GPT_OSS,)
