"""gpt-oss: every second layer sees a window, attention sinks, experts with biases and a clamped SwiGLU."""

import re
from dataclasses import replace

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    Family,
    Rename,
    decoder_spec,
    dense_mlp,
    gqa_spec,
    num_layers,
    windows,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.layers.moe import ClampedGlu, MoeSpec, RouterKind
from deltaserve.model.model_spec import ModelSpec
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
    filled = _with_defaults(fields)
    gqa = replace(gqa_spec(filled, QkNorm.NONE), sinks=True)
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    moe = MoeSpec(
        router=RouterKind.SOFTMAX,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=dense_mlp(fields).inner,
        renormalise=True,  # over all, then over the chosen: what softmax over the chosen alone gives
        clamped=ClampedGlu(fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)),
    )
    lengths = windows(filled, num_layers(fields), _PERIOD)
    return decoder_spec(filled, "gpt_oss", [LayerSpec(replace(gqa, window_len=length), moe) for length in lengths])


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
