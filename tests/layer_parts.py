"""Parts of a spec's layers, where a test knows of which kind they are."""

from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.layers.gqa import GqaSpec
from deltaserve.model.layers.layer_spec import RopeSpec
from deltaserve.model.layers.mla import MlaSpec
from deltaserve.model.layers.moe import MoeSpec
from deltaserve.model.model_spec import ModelSpec


def gqa_of(spec: ModelSpec) -> GqaSpec:
    assert isinstance(spec.attention, GqaSpec)
    return spec.attention


def mla_of(spec: ModelSpec) -> MlaSpec:
    assert isinstance(spec.attention, MlaSpec)
    return spec.attention


def dense_of(spec: ModelSpec) -> DenseSpec:
    """The first that is dense."""
    return next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, DenseSpec))


def moe_of(spec: ModelSpec) -> MoeSpec:
    """The first that has experts."""
    return next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec))


def have_experts(spec: ModelSpec) -> list[bool]:
    """Whether a layer has experts, for all."""
    return [layer.mlp.expert_count > 0 for layer in spec.layers]


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The window of each layer, all of which have attention."""
    attention = [layer.mixer.attention for layer in spec.layers]
    return [one.window_len for one in attention if one is not None]


def ropes_of(spec: ModelSpec) -> list[RopeSpec]:
    """The rotary embedding of each layer that has attention."""
    attention = [layer.mixer.attention for layer in spec.layers]
    return [one.rope for one in attention if one is not None]
