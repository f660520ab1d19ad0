"""What makes two folders the same model."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deltaserve.core.errors import ConfigError
from deltaserve.model.fingerprint import model_fingerprint, tokenizer_fingerprint, tokenizer_hash
from deltaserve.model.formats.gguf_header import read_header
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS


@pytest.fixture
def folder(tiny_models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models / "llama_sharded", tmp_path / "model"))


def test_a_copy_has_the_same_fingerprint(tiny_models: Path, folder: Path) -> None:
    (folder / "README.md").write_text("not part of the model")
    assert model_fingerprint(folder) == model_fingerprint(tiny_models / "llama_sharded")
    assert tokenizer_hash(folder) == tokenizer_hash(tiny_models / "llama_sharded")


def test_models_differ_but_share_a_tokenizer(tiny_models: Path) -> None:
    names = ("llama", "llama_bf16", "qwen3", "qwen3_moe")
    assert len({model_fingerprint(tiny_models / name) for name in names}) == len(names)
    assert len({tokenizer_hash(tiny_models / name) for name in names}) == 1


def test_the_tokenizer_of_another_revision_is_the_same(tiny_models: Path) -> None:
    names = ("llama", "llama_bf16", "llama_sharded")
    assert len({tokenizer_fingerprint(tiny_models / name) for name in names}) == 1


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_the_text_that_a_front_must_share_counts(folder: Path, name: str) -> None:
    before = tokenizer_fingerprint(folder)
    path = folder / name
    path.write_text((path.read_text() if path.exists() else "") + " ")
    assert tokenizer_fingerprint(folder) != before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_tokens_that_end_an_answer_count(folder: Path, name: str) -> None:
    before, path = tokenizer_fingerprint(folder), folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {"eos_token_id": [7]}))
    assert tokenizer_fingerprint(folder) != before


def test_recommended_sampling_does_not_count(folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {"temperature": 0.25}))
    before = tokenizer_fingerprint(folder)
    path.write_text(json.dumps(values | {"temperature": 0.75}))
    assert tokenizer_fingerprint(folder) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_every_text_file_counts(folder: Path, name: str) -> None:
    before = model_fingerprint(folder)
    with (folder / name).open("a") as file:
        file.write(" ")
    assert model_fingerprint(folder) != before


def test_a_shard_header_counts(folder: Path) -> None:
    before = model_fingerprint(folder)
    shards = sorted(folder.glob("*.safetensors"))
    swapped = shards[0].read_bytes()
    shards[0].write_bytes(shards[1].read_bytes())
    shards[1].write_bytes(swapped)
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("which", [0, 7, -1])
def test_a_fine_tune_is_another_model(folder: Path, which: int) -> None:
    """Its files are alike in all but the values of, at the least, one matrix."""
    before = model_fingerprint(folder)
    shard = sorted(folder.glob("*.safetensors"))[which % 2]
    tensors = load_file(shard)
    name = sorted(name for name, tensor in tensors.items() if tensor.ndim > 1)[which]
    save_file({**tensors, name: tensors[name] * 1.01}, shard, {"format": "pt"})
    assert model_fingerprint(folder) != before
    save_file(tensors, shard, {"format": "pt"})
    assert model_fingerprint(folder) == before


def test_a_fine_tune_in_one_file_is_another_model(tmp_path: Path) -> None:
    path, _ = write_gguf(VARIANTS["llama"], tmp_path, Kind.Q8_0)
    before = model_fingerprint(path)
    content = bytearray(path.read_bytes())
    tensor = max(read_header(path).tensors, key=lambda tensor: tensor.num_bytes)
    middle = tensor.start + tensor.num_bytes // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    assert model_fingerprint(path) != before


@pytest.mark.parametrize("content", [b"", (1 << 40).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"])
def test_damaged_header(folder: Path, content: bytes) -> None:
    next(folder.glob("*.safetensors")).write_bytes(content)
    with pytest.raises(ConfigError, match="header"):
        model_fingerprint(folder)
