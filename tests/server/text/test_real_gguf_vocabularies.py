"""GGUF vocabularies of real models with llama.cpp's test vectors."""

from pathlib import Path

import pytest

from deltaserve.model.fields import Fields
from deltaserve.model.formats.gguf_header import read_header
from deltaserve.server.text.gguf_text import Vocabulary, build_tokenizer
from tests.fixtures.source_archives import published_files

pytestmark = pytest.mark.slow
NAMES = (
    "llama-spm",
    "phi-3",
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "command-r",
    "refact",
    "starcoder",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "mpt",
)


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's folder `models`: a vocabulary is a file, with texts in `.inp` and their ids in `.out`."""
    assert pytestconfig.cache is not None
    folder = tmp_path_factory.mktemp("models")
    archives = pytestconfig.cache.mkdir("source_archives")
    for name, content in published_files("llama-cpp-python", archives, "/ggml-vocab-"):
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(models: Path, name: str) -> None:
    file = models / f"ggml-vocab-{name}.gguf"
    header = read_header(file)
    metadata = Fields(dict(header.metadata), file.name)
    tokenizer = build_tokenizer(metadata, Vocabulary.of(metadata))
    texts = (models / f"{file.name}.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (models / f"{file.name}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(part) for part in line.split()], text
