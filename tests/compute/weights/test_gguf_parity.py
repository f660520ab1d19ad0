"""GGUF files of every kind of quantisation and every architecture: distributions of transformers on the same values."""

from pathlib import Path

import pytest

from deltaserve.core.layout.dtype import DType
from tests.compute.executor.world import Driver, RankDriver, check_generation
from tests.fixtures.tiny_gguf import GEMMA3, K_QUANTS, PLAIN, SMALL_BLOCKS, Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant

_FAMILIES = ("llama", "qwen3")
_WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}
"""Rows of K-quants are blocks of 256."""
_ROPES = ("llama_llama3_rope", "llama_linear_rope", "qwen3_yarn_rope", "llama_bias_mha")


@pytest.mark.parametrize("kind", [*PLAIN, *SMALL_BLOCKS, *K_QUANTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", _FAMILIES)
def test_generation(tmp_path: Path, family: str, kind: Kind) -> None:
    variant = VARIANTS[family]
    if kind in K_QUANTS:
        variant = Variant(variant.build, _WIDE)
    check(*write_gguf(variant, tmp_path, kind))


@pytest.mark.parametrize("name", _ROPES)
def test_generation_of_variants(tmp_path: Path, name: str) -> None:
    check(*write_gguf(VARIANTS[name], tmp_path, Kind.Q8_0))


def test_generation_of_gemma3(tmp_path: Path) -> None:
    """Its norms stand in the file with 1 added, which transformers adds itself."""
    check(*write_gguf(GEMMA3, tmp_path, Kind.Q8_0))


class Dequantised(Driver):
    quantization = "none"


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_generation_of_values(tmp_path: Path, kind: Kind) -> None:
    """Dequantised when they are loaded."""
    file, folder = write_gguf(_wide("llama"), tmp_path, kind)
    check_generation(Dequantised(file, dtype=DType.FLOAT32), folder)


MIXED = {"v_proj": Kind.Q6_K, "up_proj": Kind.F16, "down_proj": Kind.Q8_0, "embed_tokens": Kind.Q6_K}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_generation_of_several_kinds(tmp_path: Path, name: str) -> None:
    """Also side by side in one product, one of them no codes; qwen3's output matrix is its embedding."""
    check(*write_gguf(_wide(name), tmp_path, Kind.Q4_K, other_kinds=MIXED))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_generation_on_ranks(tmp_path: Path, tp_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A quarter of 96 columns is no whole number of runs."""
    file, folder = write_gguf(VARIANTS["llama"], tmp_path, Kind.Q4_1)
    check_generation(RankDriver(file, dtype=DType.FLOAT32, tp_size=tp_size), folder)
    found = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    assert len(found) == tp_size
    assert all("layers.0.mlp.down_proj.weight" in line and "o_proj" not in line for line in found)


def test_blocks_of_256_are_cut_between_their_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, folder = write_gguf(_wide("llama"), tmp_path, Kind.Q4_K, other_kinds=MIXED)
    check_generation(RankDriver(file, dtype=DType.FLOAT32, tp_size=4), folder)
    assert "dequantised" not in caplog.text


def _wide(name: str) -> Variant:
    return Variant(VARIANTS[name].build, _WIDE)


def check(file: Path, folder: Path) -> None:
    check_generation(Driver(file, dtype=DType.FLOAT32), folder)
