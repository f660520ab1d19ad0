"""Kinds of layers by name: each has its file here, and one of the same name in model/layers."""

from importlib import import_module

from deltaserve.compute.layers.layer_kind import MixerWeights, MlpWeights
from deltaserve.compute.weights.targets import TargetTable
from deltaserve.core.branches import LAYERS
from deltaserve.model.layers.layer_spec import MixerSpec, MlpSpec


def allocate_mixer(table: TargetTable, spec: MixerSpec, prefix: str) -> MixerWeights:
    """Uninitialised weights of what `spec` says of one rank; `prefix`: of its layer's names."""
    weights: MixerWeights = import_module(LAYERS[spec.kind].module).allocate(table, spec, prefix)
    return weights


def allocate_mlp(table: TargetTable, spec: MlpSpec, prefix: str) -> MlpWeights:
    """Uninitialised weights of what `spec` says of one rank; `prefix`: of its layer's names."""
    weights: MlpWeights = import_module(LAYERS[spec.kind].module).allocate(table, spec, prefix)
    return weights
