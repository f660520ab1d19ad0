"""Names of what a folder holds, compared between prefill and decode before any KV moves, and with the front."""

import hashlib
from pathlib import Path

from deltaserve.model.folder_files import read_in_folder
from deltaserve.model.open_source import open_source

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_FILE_BYTES = 256 << 20
"""Most bytes of a tokenizer file."""


def model_fingerprint(model_path: Path) -> str:
    """sha256 (hex) of what tells a checkpoint from others; of each weight only a little is read."""
    digest = hashlib.sha256()
    for name, data in open_source(model_path).identity():
        _add(digest, name, data)
    return digest.hexdigest()


def tokenizer_fingerprint(model_path: Path) -> str:
    """sha256 (hex) of what makes tokens of text, and answers of tokens: tokenizer, chat template, tokens that end an
    answer. Equal, where a front may make the prompts for another checkpoint of the model than its own."""
    source = open_source(model_path)
    digest = hashlib.sha256()
    for name, data in source.text_identity():
        _add(digest, name, data)
    for fields in (source.config(), source.generation()):
        ends = None if fields is None else fields.values.get("eos_token_id")
        _add(digest, "ends", repr(ends).encode())
    return digest.hexdigest()


def tokenizer_hash(model_path: Path) -> str:
    """sha256 (hex) of the tokenizer files that are there."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        content = read_in_folder(model_path / name, MAX_FILE_BYTES)
        if content is not None:
            _add(digest, name, content)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, data: bytes) -> None:
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)
