"""Quantised folders: dequantised to the bit, computed like what they are worth, and refused by name where unknown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.quantised_arrays import arrays, dequantise
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.formats.quantised_folder import QuantisedFolder
from deltaserve.model.formats.quantised_schemes import Fp8Blocks
from deltaserve.model.known_families import family_named
from deltaserve.model.open_source import open_source
from deltaserve.model.tensors import Inventory, check_weights
from tests.compute.executor.world import Driver, RankDriver, check_generation
from tests.fixtures.tiny_models import VARIANTS
from tests.fixtures.tiny_quantised import (
    COMPRESSED,
    quantise_blocks,
    set_quantisation,
    write_compressed,
    write_fp8_blocks,
    write_mxfp4,
)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Blocks that fit no matrix evenly; (quantised, its values)."""
    return write_fp8_blocks(VARIANTS["qwen3"], tmp_path_factory.mktemp("blocks"), (24, 40))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "minimax_m2", "deepseek_v3", "qwen3_next", "qwen3_5_moe"])
def test_generation(tmp_path: Path, name: str) -> None:
    """transformers computes with the values; blocks as large as published ones, and parts of them."""
    folder, plain = write_fp8_blocks(VARIANTS[name], tmp_path, (128, 128))
    check_generation(Driver(folder, dtype=DType.FLOAT32), plain)


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, form: str) -> None:
    folders = write_compressed(VARIANTS["llama"], tmp_path, COMPRESSED[form])
    check_bits(*folders)
    check_generation(Driver(folders[0], dtype=DType.FLOAT32), folders[1])


def test_experts_of_four_bits(tmp_path: Path) -> None:
    """Dequantised to the bit as transformers does it; one file as the unquantised ones are, transposed."""
    folder, plain_folder = write_mxfp4(VARIANTS["gpt_oss"], tmp_path)
    source, plain = open_source(folder), load_file(plain_folder / "model.safetensors")
    assert isinstance(source, QuantisedFolder)
    values = {weight.header.name: weight.values() for weight in arrays(source)}
    assert values.keys() == plain.keys()
    for name, value in values.items():
        assert torch.equal(value.float(), plain[name]), name
    check_generation(Driver(folder, dtype=DType.FLOAT32), plain_folder)
    check_generation(RankDriver(folder, 2, dtype=DType.FLOAT32), plain_folder)


_EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("_scales", None, "down_proj_blocks is quantised, and model.layers.1.mlp.experts.down_proj_scales is missing"),
        (
            "_scales",
            torch.zeros(8, 64, 2, dtype=torch.uint8),
            "down_proj_scales is U8 [8, 64, 2], expected U8 [8, 64, 1]",
        ),
        ("_blocks", torch.zeros(8, 64, 16, dtype=torch.uint8), "down_proj_blocks is U8 [8, 64, 16], expected U8"),
        ("_blocks", torch.zeros(8, 64, 1, 16), "down_proj_blocks is F32 [8, 64, 1, 16], expected U8"),
    ],
)
def test_parts_of_experts_that_do_not_fit_are_named(tmp_path: Path, part: str, value: Tensor | None, text: str) -> None:
    folder, _ = write_mxfp4(VARIANTS["gpt_oss"], tmp_path)
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors"), _EXPERTS + part: value}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    assert text in str(caught.value)


def test_values_have_the_bits_of_a_product_in_float64(folders: tuple[Path, Path]) -> None:
    check_bits(*folders)


def check_bits(folder: Path, plain_folder: Path) -> None:
    source, plain = open_source(folder), load_file(plain_folder / "model.safetensors")
    assert isinstance(source, QuantisedFolder)
    values = {weight.header.name: weight.values() for weight in arrays(source)}
    assert values.keys() == plain.keys()
    for name, value in values.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_values_have_the_bits_of_transformers(shape: tuple[int, int]) -> None:
    """Which takes only what blocks divide."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise_blocks(tensor, (128, 128))
    want = Fp8Dequantize(None)._dequantize_one(codes, scales)
    assert torch.equal(dequantise(codes, scales, Fp8Blocks(128, 128)), want)


def test_the_check_before_loading_counts_the_values(folders: tuple[Path, Path]) -> None:
    counts = []
    for folder in folders:
        source = open_source(folder)
        inventory = Inventory.of(family_named(load_spec(folder).family), load_spec(folder), source.index)
        check_weights(source.headers(), inventory)
        counts.append(inventory.num_values)
    assert counts[0] == counts[1]


def test_factors_may_lie_in_another_file(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")  # packed weights are opaque
    folder = _copy(folders[0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    mapping = {name: "a.safetensors" if name.endswith("_inv") else "b.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if mapping[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    one, two = (_load(path) for path in (folders[0], folder))
    assert torch.equal(one.embedding, two.embedding)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.attention.out.weight, b.attention.out.weight)


def test_packed_weights_are_found_by_an_index(tmp_path: Path) -> None:
    folder, _ = write_compressed(VARIANTS["llama"], tmp_path, COMPRESSED["int4-group"])
    names = load_file(folder / "model.safetensors")
    mapping = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(mapping))
    _load(folder)


@pytest.mark.parametrize(
    ("form", "part", "value", "text"),
    [
        ("int8-channel", "_scale", torch.ones(3, 1), "q_proj.weight_scale has shape [3, 1], expected [128, 1]"),
        ("int4-group", "_scale", torch.ones(128, 3), "q_proj.weight_scale has shape [128, 3], expected [128, 4]"),
        ("int4-group", "_packed", torch.zeros(128, 7, dtype=torch.int32), "I32 of 56 columns in runs of 16"),
        ("int4-group", "_packed", torch.zeros(128, 8, dtype=torch.int64), "I64 of 64 columns in runs of 16"),
        ("int4-group", "_g_idx", torch.zeros(64), "q_proj.weight_g_idx is not a tensor of this model"),
    ],
)
def test_parts_of_compressed_tensors_that_do_not_fit_are_named(
    tmp_path: Path, form: str, part: str, value: Tensor, text: str
) -> None:
    folder, _ = write_compressed(VARIANTS["llama"], tmp_path, COMPRESSED[form])
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, _QUERIES + part: value}, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    assert text in str(caught.value)


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{_QUERIES}_scale_inv"]


def _put(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[_QUERIES + suffix] = change(tensors[_QUERIES + suffix])

    return edit


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_drop, f"{_QUERIES} is quantised, and {_QUERIES}_scale_inv is missing"),
        (_put("_scale_inv", lambda t: t[:1].contiguous()), "_scale_inv has shape [1, 2], expected [6, 2]"),
        (_put("_scale_inv", lambda t: t.to(torch.int32)), "_scale_inv has dtype I32, expected one of F32"),
        (_put("", lambda t: t.view(-1)), "q_proj.weight is quantised, and no matrix: [8192]"),
        (_put("", lambda t: t.float()), "q_proj.weight_scale_inv is not a tensor of this model"),
        (_put("", lambda t: t.view(torch.int8)), "has dtype I8, expected one of F32, F16, BF16"),
    ],
    ids=["missing", "shape", "factor type", "no matrix", "factors of nothing", "int8"],
)
def test_parts_that_do_not_fit_are_named(
    folders: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Tensor]], None], text: str
) -> None:
    folder = _copy(folders[0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    assert text in str(caught.value)
    assert str(caught.value).startswith("model.safetensors: ")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": method}, f"weights quantised as {method!r} are not supported")
        for method in ("awq", "gptq", "bitsandbytes", "modelopt", "fbgemm_fp8")
    ]
    + [
        (_compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "'nvfp4-pack-quantized', float4 by channel"),
        (_compressed("float-quantized", type="float", strategy="block"), "'float-quantized', float8 by block, are not"),
        (_compressed("pack-quantized", num_bits=3), "int3 by channel, are not supported"),
        (_compressed("int-quantized", symmetric=False), "symmetric is False, expected true"),
        (_compressed("int-quantized", actorder="group"), "actorder is 'group', expected none"),
        (_compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24"}}, "format is 'sparse-24'"),
        (_compressed("int-quantized") | {"config_groups": {}}, "config_groups is {}, expected one group"),
        ({}, "quant_method is missing (quant_algo: not named): not supported"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "quant_method is missing (quant_algo: FP8)"),
        ({"quant_method": "fp8"}, "weight_block_size is None, expected rows and columns of a block"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128], expected rows and columns"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', expected e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme is 'static', expected dynamic"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    folders: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    folder = _copy(folders[0], tmp_path)
    set_quantisation(folder, config)
    with pytest.raises(ConfigError) as caught:
        load_spec(folder)
    assert str(caught.value).startswith("config.json: quantization_config: ")
    assert text in str(caught.value)


def _copy(folder: Path, target: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def _load(folder: Path) -> Any:
    return load_weights(folder, load_spec(folder), torch.float32, torch.device("cpu"))
