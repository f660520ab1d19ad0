"""Names of what a folder holds, compared between prefill and decode before any KV moves."""

import hashlib
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.model.files import find_gguf, weight_files
from deltaserve.model.folder_files import read_in_folder
from deltaserve.model.formats.gguf_header import read_header
from deltaserve.model.stand_ins import HEAD_BYTES, stand_in

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
_MAX_HEADER_BYTES = 100_000_000


def model_fingerprint(model_path: Path) -> str:
    """sha256 (hex) of config.json, every safetensors header and the tokenizer files; no weight is read.

    Of a GGUF file: of everything before its first tensor, which says the same.
    """
    digest = hashlib.sha256()
    gguf = find_gguf(model_path)
    if gguf is not None:
        _add(digest, "gguf", read_header(gguf).raw)
        return digest.hexdigest()
    _add_file(digest, model_path / "config.json")
    for shard in weight_files(model_path)[0]:
        _add(digest, shard.name, _header(shard))
    _add(digest, "tokenizer", tokenizer_hash(model_path).encode())
    return digest.hexdigest()


def tokenizer_hash(model_path: Path) -> str:
    """sha256 (hex) of the tokenizer files that are there."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        _add_file(digest, model_path / name)
    return digest.hexdigest()


def _header(shard: Path) -> bytes:
    with shard.open("rb") as file:
        instead = stand_in(file.read(HEAD_BYTES))
        if instead is not None:
            raise ConfigError(f"{shard.name}: {instead}")
        file.seek(0)
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= num_bytes <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{shard.name}: header of {num_bytes} bytes, expected 2 .. {_MAX_HEADER_BYTES}")
        header = file.read(num_bytes)
    if len(header) < num_bytes:
        raise ConfigError(f"{shard.name}: ends within its header of {num_bytes} bytes")
    return header


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    """Nothing when it is not there."""
    content = read_in_folder(path, MAX_FILE_BYTES)
    if content is not None:
        _add(digest, path.name, content)


def _add(digest: "hashlib._Hash", name: str, data: bytes) -> None:
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)
