"""GGUF files of every kind of quantisation and every architecture: distributions of transformers on the same values."""

from pathlib import Path

import pytest

from deltaserve.layout.dtype import DType
from tests.fixtures.tiny_gguf import GEMMA3, K_QUANTS, PLAIN, SMALL_BLOCKS, Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant
from tests.runner.world import Driver, check_generation

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


def check(file: Path, folder: Path) -> None:
    check_generation(Driver(file, dtype=DType.FLOAT32), folder)
