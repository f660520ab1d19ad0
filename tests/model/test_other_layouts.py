"""Folders as they are published that are no model folder: the refusal says what they are, and the way out."""

from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.model.files import weight_files
from deltaserve.model.json_object import read_json, read_json_if_there


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "it is a LoRA adapter: merge it"),
        (("blobs/x", "refs/main", "snapshots/abc/config.json"), "name the one below its snapshots/"),
        (("params.json", "consolidated.safetensors"), "in its maker's own layout"),
        (("model_index.json",), "a diffusers pipeline"),
        (("onnx.onnx",), "an ONNX export"),
        (("Q4_K_M/m.gguf", "Q8_0/m.gguf"), "name one of the files"),
        (("one/config.json", "two/config.json"), "name one of them"),
    ],
)
def test_a_folder_without_a_config_says_what_it_is(tmp_path: Path, names: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_json(folder_of(tmp_path, *names) / "config.json")
    assert str(refused.value).startswith("config.json: not found in the model folder; it is ")
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("model-00001-of-00002.safetensors",), "shards without model.safetensors.index.json"),
        (("model.fp16.safetensors",), "a variant of the weights"),
        (("adapter_config.json", "adapter_model.safetensors"), "a LoRA adapter"),
    ],
)
def test_a_folder_without_weights_says_what_it_is(tmp_path: Path, names: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        weight_files(folder_of(tmp_path, "config.json", *names))


def test_a_folder_with_nothing_known_says_no_more(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_json(tmp_path / "config.json")
    assert str(refused.value) == "config.json: not found in the model folder"


def test_whole_weights_beside_an_index_of_shards_that_are_gone(tmp_path: Path) -> None:
    """Left over from before the shards were merged: transformers takes the whole file, too."""
    folder = folder_of(tmp_path, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert weight_files(folder) == ([folder / "model.safetensors"], {})
    (folder / "model-00001-of-00001.safetensors").write_text("")
    assert weight_files(folder)[1] == {"a": "model-00001-of-00001.safetensors"}


def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "llama"}')
    fields = read_json_if_there(tmp_path / "config.json")
    assert fields is not None and fields.values == {"model_type": "llama"}
