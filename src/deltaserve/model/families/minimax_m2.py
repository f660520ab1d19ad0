"""MiniMax-M2: norm over all query heads and all key heads, a part of each head turns, sigmoid router."""

import re
from dataclasses import replace

from deltaserve.model.family import (
    COMMON_RENAMES,
    MAX_EXPERTS,
    MAX_LAYERS,
    Family,
    Rename,
    decoder_spec,
    dense_mlp,
    gqa_spec,
    num_layers,
    refuse_sliding_window,
)
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.layers.moe import MoeSpec, RouterKind
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import rotary_dim

_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6}
"""What transformers assumes where config.json is silent."""
_LAYER = r"model\.(layers\.\d+)\.block_sparse_moe\."
_RENAMES = tuple(
    Rename(re.compile(_LAYER + pattern), r"\1.mlp." + name)
    for pattern, name in (
        (r"(experts\.\d+)\.w1\.weight", r"\2.gate_proj.weight"),
        (r"(experts\.\d+)\.w3\.weight", r"\2.up_proj.weight"),
        (r"(experts\.\d+)\.w2\.weight", r"\2.down_proj.weight"),
        (r"e_score_correction_bias", "gate.e_score_correction_bias"),
        (r"(.*)", r"\2"),
    )
)


def _build(fields: Fields) -> ModelSpec:
    fields = fields.where_silent(_DEFAULTS)
    _refuse_variants(fields)
    refuse_sliding_window(fields)
    gqa = gqa_spec(fields, QkNorm.ALL)
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    moe = MoeSpec(
        router=RouterKind.SIGMOID,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=dense_mlp(fields).inner,
        renormalise=True,
    )
    layer = LayerSpec(replace(gqa, rope=replace(gqa.rope, dim=rotary_dim(fields, gqa.head_dim))), moe)
    spec = decoder_spec(fields, "minimax_m2", [layer] * num_layers(fields))
    return replace(spec, num_draft_layers=fields.integer("num_mtp_modules", 0, MAX_LAYERS, default=0))


def _refuse_variants(fields: Fields) -> None:
    """The published files name choices that transformers does not have, either."""
    for name, expected in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if fields.text(name, expected) != expected:
            raise fields.error(name, expected)
    for name in ("use_qk_norm", "use_routing_bias"):
        if not fields.flag(name, True):
            raise fields.error(name, "true")
    fields.integer("shared_intermediate_size", 0, 0, default=0)
    if set(fields.integers("attn_type_list")) > {1}:
        raise fields.error("attn_type_list", "1 for every layer: others (linear attention) are not supported")


MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2ForCausalLM", _build, (*_RENAMES, *COMMON_RENAMES))
FAMILIES = (MINIMAX_M2,)
