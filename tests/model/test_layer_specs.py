"""Where each layer of a model with windows keeps what it keeps."""

from dataclasses import replace

from deltaserve.core.layout.dtype import DType
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.layers.gqa import GqaSpec
from deltaserve.model.layers.layer_spec import LayerSpec, RopeKind, RopeSpec
from deltaserve.model.model_spec import ModelSpec

ATTENTION = GqaSpec(rope=RopeSpec(RopeKind.DEFAULT, 1e4, 8), num_heads=4, num_kv_heads=2, head_dim=8)
LAYER, NEAR, FAR = (LayerSpec(replace(ATTENTION, window_len=length), DenseSpec(64)) for length in (None, 24, 512))


def _model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        family="m",
        dtype=DType.FLOAT32,
        vocab_size=32,
        hidden_size=16,
        layers=layers,
        norm_eps=1e-6,
        max_position=128,
    )


def test_one_page_group_per_window_length_and_one_of_the_layers_that_see_everything() -> None:
    groups = _model(FAR, NEAR, LAYER, NEAR, LAYER, NEAR).cache_spec(16, DType.FP8_E4M3).groups
    assert [(group.name, group.num_layers, group.retention) for group in groups] == [
        ("kv", 2, KEEP_ALL),
        ("window-24", 3, Retention(Lifetime.WINDOW, 24)),
        ("window-512", 1, Retention(Lifetime.WINDOW, 512)),
    ]


def test_a_layers_place_counts_within_its_group() -> None:
    spec = _model(FAR, NEAR, LAYER, NEAR, LAYER, NEAR)
    assert [spec.place(layer) for layer in range(6)] == [(2, 0), (1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]


def test_a_model_without_windows_has_one_group() -> None:
    spec = _model(LAYER, LAYER)
    assert [spec.place(layer) for layer in range(2)] == [(0, 0), (0, 1)]
    assert len(spec.cache_spec(16, DType.FLOAT32).groups) == 1
