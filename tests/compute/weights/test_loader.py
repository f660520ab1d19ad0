"""Weights by name: every tensor exactly once, and the one line a bad folder gets."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.compute.layers.gqa import AttentionWeights
from deltaserve.compute.layers.mla import MlaWeights
from deltaserve.compute.layers.moe import MoeWeights
from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.weights import DecoderWeights
from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.files import INDEX_NAME, SINGLE_NAME
from tests.compute.weights.plain_matrix import plain

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(folder, load_spec(folder), dtype, CPU)


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look into the matrices; packed ones are opaque."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


@pytest.fixture
def folder(tiny_models: Path, tmp_path: Path) -> Path:
    """A model folder to damage: one layer of `llama`."""
    return _copy(tiny_models / "llama", tmp_path / "llama", num_layers=1)


def _copy(source: Path, target: Path, num_layers: int) -> Path:
    target.mkdir()
    values = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (target / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / SINGLE_NAME)
    keep = {k: v for k, v in tensors.items() if ".layers." not in k or int(k.split(".")[2]) < num_layers}
    save_file(keep, target / SINGLE_NAME)
    return target


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def _index(folder: Path, mapping: dict[str, Any]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": mapping}))


def _two_shards(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / SINGLE_NAME)
    (folder / SINGLE_NAME).unlink()
    names = sorted(tensors)
    mapping: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"m-{index}.safetensors")
        mapping |= dict.fromkeys(part, f"m-{index}.safetensors")
    _index(folder, mapping)
    return mapping


def _refused(folder: Path, *texts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    for text in texts:
        assert text in message
    assert "\n" not in message
    assert str(folder) not in message


def test_fused_parts_are_where_they_belong(tiny_models: Path) -> None:
    weights, raw = load(tiny_models / "llama"), load_file(tiny_models / "llama" / SINGLE_NAME)
    layer, prefix = weights.layers[1], "model.layers.1."
    parts = [raw[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert isinstance(layer.attention, AttentionWeights)
    assert torch.equal(plain(layer.attention.qkv.weight), torch.cat(parts))
    assert torch.equal(weights.embedding, raw["model.embed_tokens.weight"])
    assert torch.equal(plain(weights.lm_head), raw["lm_head.weight"])


def test_keys_and_values_are_made_from_the_latent_by_parts_of_one_matrix(tiny_models: Path) -> None:
    folder = tiny_models / "deepseek_v3"
    attention, raw = load(folder).layers[0].attention, load_file(folder / SINGLE_NAME)
    assert isinstance(attention, MlaWeights)
    heads = raw["model.layers.0.self_attn.kv_b_proj.weight"].view(8, 16 + 12, 32)
    assert torch.equal(attention.keys, heads[:, :16])
    assert torch.equal(attention.values, heads[:, 16:])


def test_layers_that_draft_tokens_are_named_and_not_used(
    tiny_models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_models / "deepseek_v3", tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_mtp_layers", "num_nextn_predict_layers"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    _edit(folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(64)}))
    load(folder)
    assert "1 tensors of the files are not used: model.layers.3.enorm.weight" in caplog.text
    _edit(folder, lambda tensors: tensors.update({"model.layers.4.enorm.weight": torch.ones(64)}))
    _refused(folder, "model.layers.4.enorm.weight is not a tensor of this model")


def test_tied_embeddings_are_one_tensor(tiny_models: Path) -> None:
    weights = load(tiny_models / "qwen3")
    assert weights.lm_head is weights.embedding


def test_the_head_of_a_tied_file_is_used_where_it_differs(
    tiny_models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copy(tiny_models / "qwen3", tmp_path / "q", num_layers=1)
    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(272, 64)}))
    assert torch.equal(plain(load(folder).lm_head), torch.ones(272, 64))
    assert "lm_head.weight differs from the embedding and is used" in caplog.text


def test_the_head_of_a_tied_file_that_is_the_embedding_is_kept_once(
    tiny_models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copy(tiny_models / "qwen3", tmp_path / "q", num_layers=1)
    _edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights = load(folder)
    assert weights.lm_head is weights.embedding
    assert not caplog.records


def test_fused_and_single_experts_load_alike(tiny_models: Path) -> None:
    single, fused = load(tiny_models / "qwen3_moe").layers[0].mlp, load(tiny_models / "qwen3_moe_fused").layers[0].mlp
    assert isinstance(single, MoeWeights)
    assert isinstance(fused, MoeWeights)
    assert all(map(torch.equal, map(plain, single.gate_up), map(plain, fused.gate_up)))
    assert all(map(torch.equal, map(plain, single.down), map(plain, fused.down)))


def test_shards_load_as_one_file(tiny_models: Path) -> None:
    whole, shards = load(tiny_models / "llama"), load(tiny_models / "llama_sharded")
    assert torch.equal(whole.layers[2].mlp_norm, shards.layers[2].mlp_norm)
    assert torch.equal(plain(whole.lm_head), plain(shards.lm_head))


def test_weights_are_cast(tiny_models: Path) -> None:
    assert load(tiny_models / "llama", torch.bfloat16).embedding.dtype == torch.bfloat16


def test_unused_tensors_are_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(10)]
    _edit(folder, lambda t: t.update({name: torch.ones(8) for name in names}))
    load(folder)
    (record,) = caplog.records
    assert f"10 tensors of the files are not used: {names[0]}, " in record.message
    assert record.message.endswith(" and 2 more")


def test_other_formats_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    load(folder)


def test_missing_tensor(folder: Path) -> None:
    _edit(folder, lambda t: t.pop("model.norm.weight"))
    _refused(folder, "1 tensors are missing, first norm.weight")


def test_unknown_tensor(folder: Path) -> None:
    _edit(folder, lambda t: t.update({"model.layers.1.input_layernorm.weight": torch.ones(64)}))
    _refused(folder, SINGLE_NAME, "model.layers.1.input_layernorm.weight is not a tensor of this model")


def test_wrong_shape(folder: Path) -> None:
    _edit(folder, lambda t: t.update({"lm_head.weight": torch.ones(64)}))
    _refused(folder, SINGLE_NAME, "lm_head.weight has shape [64], expected [272, 64]")


def test_wrong_dtype(folder: Path) -> None:
    _edit(folder, lambda t: t.update({"lm_head.weight": torch.ones(272, 64, dtype=torch.int8)}))
    _refused(folder, "lm_head.weight has dtype I8, expected one of F32, F16, BF16")


def test_expert_given_twice(tiny_models: Path, tmp_path: Path) -> None:
    folder = _copy(tiny_models / "qwen3_moe", tmp_path / "moe", num_layers=1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    _edit(folder, lambda t: t.update({name: torch.ones(8, 64, 64)}))
    _refused(folder, "is given twice")


def test_tensor_in_a_shard_the_index_does_not_name(folder: Path) -> None:
    mapping = _two_shards(folder)
    mapping["lm_head.weight"], mapping["model.norm.weight"] = "m-1.safetensors", "m-0.safetensors"
    _index(folder, mapping)
    _refused(folder, "but the index says")


def test_missing_shard(folder: Path) -> None:
    _two_shards(folder)
    (folder / "m-1.safetensors").unlink()
    _refused(folder, "m-1.safetensors: not found in the model folder")


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/x.safetensors", "a/b.safetensors", "m.bin", "", 3, None])
def test_index_that_leads_elsewhere(folder: Path, name: object) -> None:
    _index(folder, {"lm_head.weight": name})
    _refused(folder, INDEX_NAME, "is not a plain .safetensors file name")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_empty_index(folder: Path, content: str) -> None:
    (folder / INDEX_NAME).write_text(content)
    _refused(folder, "weight_map is missing or empty")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "x.pkl", "model.pt"])
def test_only_unsafe_weights(folder: Path, name: str) -> None:
    (folder / SINGLE_NAME).rename(folder / name)
    _refused(folder, name, "only safetensors and GGUF weights are loaded")


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    _refused(folder, "model.safetensors: not found in the model folder")


def _header(entries: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{" * 100,
        struct.pack("<Q", 4) + b"{{{{",
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 32),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, b"\0" * 24),
        _header({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 16]}}, b"\0" * 16),
        _header({"a": {"dtype": "F77", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16),
        _header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, b"\0" * 16),
        _header({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}}, b"\0" * 16),
        _header(
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            b"\0" * 24,
        ),
    ],
)
def test_damaged_files(folder: Path, content: bytes) -> None:
    (folder / SINGLE_NAME).write_bytes(content)
    _refused(folder, SINGLE_NAME, "not a valid safetensors file")


def test_truncated_file(folder: Path) -> None:
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[:-100])
    _refused(folder, SINGLE_NAME, "not a valid safetensors file")
