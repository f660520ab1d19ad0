"""Where each layer of a model with windows keeps what it keeps."""

from dataclasses import replace

from deltaserve.core.layout.dtype import DType
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.model.model_spec import LayerSpec, ModelSpec, QkNorm, RopeKind, RopeSpec

LAYER = LayerSpec(RopeSpec(RopeKind.DEFAULT, 1e4, 8))
NEAR, FAR = (replace(LAYER, window_len=length) for length in (24, 512))


def _model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("m", DType.FLOAT32, 32, 16, layers, 4, 2, 8, 64, 1e-6, QkNorm.NONE, 128)


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
