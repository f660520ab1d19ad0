"""Any value of any type at any key of a GGUF file: the file is served, or one line names it. Nothing else is raised."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import spec_of
from deltaserve.model.formats.gguf_model import GgufModel
from deltaserve.server.text.gguf_text import read_text
from tests.fixtures.tiny_gguf import GEMMA3, Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, VOCAB_SIZE, Variant

MODELS = {"llama": Variant(VARIANTS["llama"].build, {"num_hidden_layers": 1}), "gemma3": GEMMA3}
ODD: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 2**32 - 1, 2**63, -(2**63), 0.0, -1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "none", "yarn", "a" * 3000, [], [True], [-1, 3], ["x"], [float("nan")], ["\u0120"] * 3),
    *([0] * VOCAB_SIZE, [True] * VOCAB_SIZE, ["a"] * VOCAB_SIZE, [float("nan")] * VOCAB_SIZE),
)
"""Odd values of the types that a file may have: a list holds one of them."""
BESIDE = (
    *("general.sampling.temp", "general.sampling.top_k", "general.type", "split.count", "tokenizer.chat_template"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", "tokenizer.ggml.unknown_token_id"),
    *("tokenizer.ggml.padding_token_id", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"),
)
OF_ARCHITECTURE = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.dimension_count", "attention.key_length", "attention.sliding_window"),
    *("attention.scale", "expert_count", "logit_scale", "rope.freq_base_swa"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, GgufModel]:
    """By architecture."""
    paths = {name: write_gguf(each, tmp_path_factory.mktemp(name), Kind.Q8_0)[0] for name, each in MODELS.items()}
    return {name: GgufModel.open(path) for name, path in paths.items()}


def _changed(model: GgufModel, arch: str) -> Iterator[GgufModel]:
    """With each key in turn taken away, and as each of ODD."""
    metadata = model.header.metadata
    for key in (*metadata, *BESIDE, *(f"{arch}.{name}" for name in OF_ARCHITECTURE)):
        rest = {name: value for name, value in metadata.items() if name != key}
        for values in (rest, *({**metadata, key: odd} for odd in ODD)):
            yield replace(model, header=replace(model.header, metadata=values))


def _succeeds(read: Callable[[GgufModel], object], model: GgufModel) -> bool:
    try:
        read(model)
        return True
    except ConfigError as error:
        assert str(error).startswith(f"{model.header.file}: ")
        assert "\n" not in str(error)
        assert len(str(error)) < 600
        return False


@pytest.mark.parametrize("read", [spec_of, read_text])
@pytest.mark.parametrize("arch", MODELS)
def test_any_value_at_any_key(models: Mapping[str, GgufModel], arch: str, read: Callable[[GgufModel], object]) -> None:
    assert _succeeds(read, models[arch])
    assert {_succeeds(read, model) for model in _changed(models[arch], arch)} == {True, False}
