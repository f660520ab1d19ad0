"""The text side of a model as its files have it: tokenizer, chat template, special tokens, sampling."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from deltaserve.base.errors import ConfigError
from deltaserve.files.regular_file import read_if_there
from deltaserve.models.fingerprint import MAX_FILE_BYTES

_MAX_JSON_BYTES = 16 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Of a Hugging Face folder, or of a GGUF file in the same words."""

    config: Mapping[str, object]
    """config.json"""
    generation: Mapping[str, object]
    """generation_config.json; empty without one."""
    special_names: Mapping[str, str]
    """bos_token, eos_token, ... for the template."""
    tokenizer: Tokenizer
    template: str | None


def read_folder(folder: Path) -> TextFiles:
    """Raises ConfigError naming the file and what is wrong with it."""
    config = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", required=False)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    names = _special_names(tokenizer_config)
    return TextFiles(config, generation, names, tokenizer, _template_source(folder, tokenizer_config))


def _read_file(path: Path, max_bytes: int) -> bytes | None:
    """None when nothing has this name."""
    try:
        return read_if_there(path, max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _read_json(path: Path, *, required: bool) -> dict[str, object]:
    content = _read_file(path, _MAX_JSON_BYTES)
    if content is None:
        if required:
            raise ConfigError(f"{path.name} is missing in {path.parent}")
        return {}
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: an object is expected, found {type(value).__name__}")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    content = _read_file(path, MAX_FILE_BYTES)
    if content is None:
        raise ConfigError(f"{path.name} is missing in {path.parent}; only fast tokenizers are supported")
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise ConfigError(f"{path}: not a tokenizer: {str(error)[:200]}") from error
    try:
        tokenizer.encode("hello", add_special_tokens=True)
    except Exception as error:
        raise ConfigError(f"{path}: cannot encode a plain word: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_names(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... as plain strings, for the template."""
    names = {}
    for key, value in tokenizer_config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = _whole(value, f"tokenizer_config.json: {key[:40]}")
        elif key in _SPECIAL_NAMES and value is not None:
            raise ConfigError(f"tokenizer_config.json: {key} is {str(value)[:40]!r}, a string is expected")
    return names


def _whole(text: str, where: str) -> str:
    """The text itself. JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half a surrogate pair") from None
    return text


def _template_source(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the entry of chat_template.json or tokenizer_config.json.

    An entry is a string, or a list with one named `default`; one that is neither is refused even where it is not used.
    """
    entries = {
        "chat_template.json": _read_json(folder / "chat_template.json", required=False),
        "tokenizer_config.json": tokenizer_config,
    }
    given = [_template_entry(name, values.get("chat_template")) for name, values in entries.items()]
    path = folder / "chat_template.jinja"
    content = _read_file(path, _MAX_JSON_BYTES)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: {error.__class__.__name__}") from error
    return given[0] if given[0] is not None else given[1]


def _template_entry(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):
        value = next((e.get("template") for e in value if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(value, str):
        raise ConfigError(f"{name}: chat_template is neither a string nor a list with a default")
    return _whole(value, f"{name}: chat_template")
