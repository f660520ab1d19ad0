"""Weight files are checked without reading a weight: what loading would refuse is said before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from deltaserve.compute.weights.weights import allocate
from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.families.llama import LLAMA
from deltaserve.model.formats.safetensors_folder import SafetensorsFolder
from deltaserve.model.known_families import family_named
from deltaserve.model.tensor_part import TensorPart
from deltaserve.model.tensors import Inventory, check_weights, tensor_parts
from tests.fixtures.tiny_models import VARIANTS

Damage = Callable[[dict[str, dict[str, object]]], None]


def check(path: Path) -> None:
    parts = {"a": TensorPart((4, 8), ("a",)), "b": TensorPart((16,), ("b",))}
    check_weights(SafetensorsFolder(path.parent).headers(), Inventory(LLAMA, parts, {}))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((4, 8), np.float32), "b": np.zeros(16, np.float32)}, path)
    return path


def rewrite(path: Path, damage: Damage) -> None:
    """The same data under a header that was changed."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    damage(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_good_checkpoint_passes_and_every_tensor_has_its_place(tiny_models: Path, variant: str) -> None:
    """The list that is checked without torch is the list that loading fills."""
    folder = tiny_models / variant
    spec, source = load_spec(folder), SafetensorsFolder(folder)
    check_weights(source.headers(), Inventory.of(family_named(spec.family), spec, source.index))
    parts, (_, targets) = tensor_parts(spec), allocate(spec, torch.float32, torch.device("meta"))
    assert parts.keys() == targets.keys()
    for name, part in parts.items():
        assert tuple(targets[name].shape)[-len(part.shape) :] == part.shape, name


def test_a_good_file_passes(weights: Path) -> None:
    check(weights)


@pytest.mark.parametrize("length", [-1, -100], ids=["byte", "more"])
def test_a_truncated_file_is_refused(weights: Path, length: int) -> None:
    weights.write_bytes(weights.read_bytes()[:length])
    refused(weights)


def test_bytes_behind_the_last_tensor_are_refused(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes() + b"x")
    refused(weights)


@pytest.mark.parametrize(
    "damage",
    [
        lambda h: h["a"].update(data_offsets=[0, 1 << 60]),
        lambda h: h["a"].update(data_offsets=[-4, 124]),
        lambda h: h["a"].update(dtype="F13"),
        lambda h: h["a"].update(shape=[1]),
        lambda h: h.pop("a"),
        lambda h: h.update(c=h["a"]),
    ],
    ids=["past the end", "negative", "type", "shape", "gap", "overlap"],
)
def test_a_header_that_lies_is_refused(weights: Path, damage: Damage) -> None:
    rewrite(weights, damage)
    refused(weights)


def refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.safetensors: not a valid safetensors file \(") as caught:
        check(path)
    assert "\n" not in str(caught.value)
