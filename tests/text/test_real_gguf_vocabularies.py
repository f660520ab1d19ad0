"""GGUF vocabularies of real models with llama.cpp's test vectors."""

import pytest

from deltaserve.models.fields import Fields
from deltaserve.models.gguf_header import read_header
from deltaserve.text.gguf_text import Vocabulary, build_tokenizer
from tests.fixtures.llama_cpp_sdist import llama_cpp_models

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


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(request: pytest.FixtureRequest, name: str) -> None:
    models = llama_cpp_models(request.config.rootpath / ".pytest_cache")
    file = models / f"ggml-vocab-{name}.gguf"
    header = read_header(file)
    metadata = Fields(dict(header.metadata), file.name)
    tokenizer = build_tokenizer(metadata, Vocabulary.of(metadata))
    texts = (models / f"{file.name}.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (models / f"{file.name}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(part) for part in line.split()], text
